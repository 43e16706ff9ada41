"""Sketches against a dense float64 model, and what install leaves on a model."""

import copy
import logging

import jaxtyping
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_models import ARCHITECTURES, loss_of, tiny_model, tokens
from verl_logra import LoGRA, LoGRAConfig, install


def sketch_errors(model, targets, dense):
    """Relative error of each target's sketch against ``G A^T`` of the dense model."""
    errors = {}
    for name, target in targets.items():
        expected = dense.get_submodule(name).weight.grad @ target.projection().double().T
        errors[name] = float((target.update.grad.double() - expected).norm() / expected.norm())
    return errors


@pytest.mark.parametrize("projection", ["rademacher", "gaussian"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sketch_equals_dense_oracle(architecture, checkpointing, projection):
    model = tiny_model(architecture)
    targets = install(model, LoGRAConfig(rank=6, projection=projection))
    dense = tiny_model(architecture).double()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for seed in (1, 2):  # accumulated over two micro-batches
        loss_of(model.train(), tokens(seed=seed)).backward()
        loss_of(dense.train(), tokens(seed=seed)).backward()
    assert len(targets) == 14
    assert max(sketch_errors(model, targets, dense).values()) < 1e-5
    assert all(target.module.weight.grad is None for target in targets.values())
    rest = {n: p for n, p in model.named_parameters() if p.requires_grad and not n.endswith("logra_update")}
    assert any(n.endswith("bias") for n in rest) == (architecture == "qwen2")
    for name, parameter in rest.items():
        torch.testing.assert_close(parameter.grad.double(), dense.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def test_sketch_under_bfloat16_autocast():
    model, dense = tiny_model(), tiny_model().double()
    targets = install(model, LoGRAConfig(rank=6))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, tokens())
    loss.backward()
    loss_of(dense, tokens()).backward()
    assert max(sketch_errors(model, targets, dense).values()) < 0.05


@pytest.fixture
def unchecked_signatures():
    """The shape checks of the tests cannot be compiled."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_sketch_of_a_compiled_model(unchecked_signatures):
    """Also after an update, which draws new projections into the compiled graphs."""
    model, dense = tiny_model(attn_implementation="sdpa", num_hidden_layers=1), tiny_model(num_hidden_layers=1).double()
    optimizer = LoGRA(model, {"rank": 6}, lr=1e-3)
    compiled = torch.compile(model, backend="aot_eager")
    for seed in (1, 2):
        loss_of(compiled, tokens(seed=seed)).backward()
        loss_of(dense, tokens(seed=seed)).backward()
        assert max(sketch_errors(model, optimizer.targets, dense).values()) < 1e-5
        optimizer.step()
        optimizer.zero_grad()
        dense.zero_grad()
        dense.load_state_dict(model.state_dict())


class _Allocations(TorchDispatchMode):
    """Shapes of every floating-point tensor that any operation returns, views of the weights aside."""

    def __init__(self, model):
        super().__init__()
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            if value.untyped_storage().data_ptr() not in self.weights:
                self.shapes.add(tuple(value.shape))
        return result


def _allocated_in_backward(model, finish):
    loss = loss_of(model, tokens(batch=3, length=7))
    with _Allocations(model) as seen:
        loss.backward()
        finish()
    return seen.shapes


def test_no_dense_gradient_exists_between_backward_and_commit():
    """Rows and columns are unlike any other size of the model, so a tensor of a weight's shape is a dense gradient."""
    sizes = dict(hidden_size=45, intermediate_size=77, num_attention_heads=3, head_dim=14)
    model, control = tiny_model(**sizes), tiny_model(**sizes)
    optimizer = LoGRA(model, {"rank": 6, "non_target": "frozen"}, lr=1e-3)
    shapes = {tuple(t.module.weight.shape) for t in optimizer.targets.values()}
    shapes |= {shape[::-1] for shape in shapes}
    seen = _allocated_in_backward(model, optimizer.propose)
    assert not seen & shapes
    assert {(42, 6), (45, 6), (77, 6)} <= seen, "the sketches were seen"
    assert all(t.module.weight.grad is None for t in optimizer.targets.values())
    assert _allocated_in_backward(control, lambda: None) & shapes, "a dense gradient would have been seen"


def test_frozen_embeddings_and_checkpointing_still_sketch_the_first_layer():
    model, dense = tiny_model(), tiny_model().double()
    targets = install(model, LoGRAConfig(rank=6, non_target="frozen"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss_of(model.train(), tokens()).backward()
    loss_of(dense, tokens()).backward()
    assert max(sketch_errors(model, targets, dense).values()) < 1e-5
    assert sum(p.requires_grad for p in model.parameters()) == len(targets)


def test_output_is_unchanged_to_the_last_bit():
    model, plain = tiny_model(), tiny_model()
    install(model, LoGRAConfig(rank=6))
    ids = tokens()
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_state_dict_keeps_the_original_names(tmp_path):
    model, plain = tiny_model(), tiny_model()
    install(model, LoGRAConfig(rank=6))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.load_state_dict(tiny_model(seed=3).state_dict()) == ([], [])
    model.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path, attn_implementation="eager")
    assert torch.equal(loaded(input_ids=tokens()).logits, tiny_model(seed=3)(input_ids=tokens()).logits)


def test_a_frozen_layer_stays_frozen(caplog):
    model = tiny_model()
    frozen = model.model.layers[0]
    frozen.requires_grad_(False)
    before = copy.deepcopy(frozen.state_dict())
    with caplog.at_level(logging.WARNING):
        optimizer = LoGRA(model, {"rank": 6, "scale": "lr"}, lr=1e-2, weight_decay=0.1)
    assert "7 modules whose weights are frozen: model.layers.0.self_attn.q_proj" in caplog.text
    loss_of(model, tokens()).backward()
    optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in frozen.state_dict().items())
    assert len(optimizer.targets) == 7


def test_query_and_key_norms_are_no_targets():
    targets = install(tiny_model("qwen3"), LoGRAConfig(rank=6))
    assert {name.rpartition(".")[2] for name in targets} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip


class _WithTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.ModuleDict({"mlp": nn.ModuleDict({"gate_proj": nn.Linear(16, 16)})})
        self.language_model = nn.ModuleDict({"mlp": nn.ModuleDict({"gate_proj": nn.Linear(16, 16)})})


def test_vision_tower_is_excluded_unless_named():
    assert list(install(_WithTower(), LoGRAConfig(rank=4))) == ["language_model.mlp.gate_proj"]
    both = LoGRAConfig(rank=4, target_modules=("gate_proj", "visual.*.gate_proj"))
    assert list(install(_WithTower(), both)) == ["visual.mlp.gate_proj", "language_model.mlp.gate_proj"]
    none = LoGRAConfig(rank=4, target_modules=("visual.*.gate_proj",), exclude_modules=("gate_proj",))
    with pytest.raises(ValueError, match="matched no nn.Linear"):
        install(_WithTower(), none)


def test_stacked_experts_are_named_and_left_to_adamw(caplog):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=1,
    )  # fmt: skip
    model = MixtralForCausalLM(config)
    with caplog.at_level(logging.WARNING):
        optimizer = LoGRA(model, {"rank": 4}, lr=1e-2)
    assert "2 stacked parameters are left to AdamW: model.layers.0.mlp.experts.gate_up_proj" in caplog.text
    experts = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    before = experts.detach().clone()
    loss_of(model, tokens()).backward()
    optimizer.step()
    assert not torch.equal(before, experts) and len(optimizer.targets) == 4


class _Bypassing(nn.Module):
    """As fused kernels do: the weight is used, the module is not called."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.up_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.linear(self.q_proj(x), self.up_proj.weight, self.up_proj.bias)


def test_a_forward_that_bypasses_the_module_is_refused():
    model = _Bypassing()
    optimizer = LoGRA(model, {"rank": 4}, lr=1e-2)
    model(torch.randn(3, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="1 targets have no sketch after the first backward.*up_proj"):
        optimizer.step()


def test_an_expert_without_tokens_gets_a_zero_sketch():
    experts = nn.ModuleList([nn.ModuleDict({"up_proj": nn.Linear(8, 8)}) for _ in range(2)])
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"experts": experts})})
    optimizer = LoGRA(model, {"rank": 4, "non_target": "frozen", "target_modules": ["up_proj"]}, lr=1e-2)
    idle = copy.deepcopy(experts[1]["up_proj"].weight)
    experts[0]["up_proj"](torch.randn(3, 8)).sum().backward()
    optimizer.step()
    assert torch.equal(idle, experts[1]["up_proj"].weight)
    assert optimizer.last_step.applied


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="matched no nn.Linear; the model's nn.Linear modules are called: 0, 2"):
        install(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), LoGRAConfig(rank=4))
    with pytest.raises(ValueError, match="rank=40 exceeds in_features=36 of model.layers.0.self_attn.q_proj"):
        install(tiny_model(), LoGRAConfig(rank=40))
    model = tiny_model()
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight
    with pytest.raises(ValueError, match="share one weight"):
        install(model, LoGRAConfig(rank=4))
    model = tiny_model(tie_word_embeddings=True)
    with pytest.raises(ValueError, match="lm_head.weight is also model.embed_tokens.weight"):
        install(model, LoGRAConfig(rank=4, target_modules=("lm_head",)))
    with pytest.raises(ValueError, match="stored in torch.float16; LoGRA trains float32 and bfloat16"):
        LoGRA(tiny_model(dtype=torch.float16), {"rank": 4}, lr=1e-3)


def test_install_is_idempotent():
    model, config = tiny_model(), LoGRAConfig(rank=4)
    assert install(model, config) is install(model, config)
    with pytest.raises(ValueError, match="already carries LoGRA with other settings"):
        install(model, LoGRAConfig(rank=5))
    loss_of(model, tokens()).backward()
    dense = tiny_model().double()
    loss_of(dense, tokens()).backward()
    assert max(sketch_errors(model, install(model, config), dense).values()) < 1e-5


def test_a_copy_of_the_model_has_its_own_sketches():
    model = tiny_model()
    targets = install(model, LoGRAConfig(rank=4))
    copied = copy.deepcopy(model)
    loss_of(copied, tokens()).backward()
    assert all(t.update.grad is None for t in targets.values())
    assert all(t.update.grad is not None for t in install(copied, LoGRAConfig(rank=4)).values())
