"""Whole optimizer steps against the formulas in float64, and what a step leaves alone."""

import copy
import logging
import math

import pytest
import torch

from tests.tiny_models import loss_of, tiny_model, tokens
from verl_logra import LoGRA


class DenseReference:
    """LoGRA in float64 from dense gradients, as the paper writes it; all targets of one model."""

    def __init__(self, model, optimizer, **settings):
        self.model, self.optimizer = model, optimizer
        self.__dict__.update(settings)
        self.v = {name: torch.zeros(m.weight.shape[0], dtype=torch.float64) for name, m in self.modules().items()}
        self.t = 0

    def modules(self):
        return {name: self.model.get_submodule(name) for name in self.optimizer.targets}

    def step(self, projections):
        self.t += 1
        layers = {}
        for name, module in self.modules().items():
            sketch = module.weight.grad @ projections[name].double().T
            self.v[name] = self.beta2 * self.v[name] + (1 - self.beta2) * sketch.square().mean(1)
            rms = (self.v[name] / (1 - self.beta2**self.t)).sqrt()
            eps = self.eps * (rms.mean() if self.scale == "ratio" else 1)
            direction = sketch / (rms + eps)[:, None]
            if self.scale == "ratio":
                direction *= sketch.norm() / direction.norm()
            layers[name] = direction @ projections[name].double()
        factor = self.lr
        if self.scale == "ratio":
            moved = math.sqrt(sum(float(d.square().sum()) for d in layers.values()))
            size = math.sqrt(sum(float(m.weight.detach().square().sum()) for m in self.modules().values()))
            factor = self.update_ratio * size / moved
        with torch.no_grad():
            for name, module in self.modules().items():
                module.weight.mul_(1 - self.lr * self.weight_decay).sub_(factor * layers[name])


def trained(optimizer, model, num_steps=3, first_seed=0):
    for seed in range(first_seed, first_seed + num_steps):
        loss_of(model, tokens(seed=seed)).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("factor_dtype, tolerance", [("float32", 1e-4), ("bfloat16", 5e-3), ("int8", 1e-2)])
@pytest.mark.parametrize("scale", ["lr", "ratio"])
def test_steps_equal_the_dense_formula_in_float64(scale, factor_dtype, tolerance):
    settings = dict(scale=scale, beta2=0.9, eps=1e-3, update_ratio=1e-2)
    model, dense = tiny_model(), tiny_model().double()
    optimizer = LoGRA(
        model, {"rank": 6, "non_target": "frozen", "factor_dtype": factor_dtype, **settings}, lr=1e-2, weight_decay=0.1
    )
    reference = DenseReference(dense, optimizer, lr=1e-2, weight_decay=0.1, **settings)
    start = {name: t.module.weight.detach().clone() for name, t in optimizer.targets.items()}
    for seed in range(3):
        loss_of(model, tokens(seed=seed)).backward()
        dense.zero_grad()
        with torch.no_grad():  # the sketch is of the gradient at LoGRA's own weights
            for name, target in optimizer.targets.items():
                dense.get_submodule(name).weight.copy_(target.module.weight)
        loss_of(dense, tokens(seed=seed)).backward()
        reference.step({name: t.projection() for name, t in optimizer.targets.items()})
        optimizer.step()
        optimizer.zero_grad()
        for name, target in optimizer.targets.items():
            moved = dense.get_submodule(name).weight - start[name].double()
            error = (target.module.weight.double() - start[name].double() - moved).norm()
            assert error <= tolerance * moved.norm(), name
            start[name] = target.module.weight.detach().clone()


def test_ratio_moves_all_targets_together_by_the_update_ratio():
    model = tiny_model()
    optimizer = LoGRA(model, {"rank": 6, "update_ratio": 3e-3, "non_target": "frozen"}, lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for expected in (3e-3, 1.5e-3):
        before = {name: t.module.weight.detach().clone() for name, t in optimizer.targets.items()}
        trained(optimizer, model, 1)
        moved = sum((t.module.weight - before[n]).double().square().sum() for n, t in optimizer.targets.items())
        size = sum(w.double().square().sum() for w in before.values())
        assert float((moved / size).sqrt()) == pytest.approx(expected, rel=1e-2)
        assert optimizer.last_step.metrics()["update_ratio"] == pytest.approx(expected, rel=1e-3)
        scheduler.step()


def test_sketch_norm_is_the_norm_of_all_sketches():
    model = tiny_model()
    optimizer = LoGRA(model, {"rank": 6}, lr=1e-3)
    loss_of(model, tokens()).backward()
    expected = math.sqrt(sum(float(t.update.grad.double().square().sum()) for t in optimizer.targets.values()))
    optimizer.step()
    assert optimizer.last_step.metrics()["sketch_norm"] == pytest.approx(expected, rel=1e-6)


def test_sgd_applies_the_sketch_itself():
    model = tiny_model()
    optimizer = LoGRA(
        model, {"rank": 6, "optimizer": "sgd", "scale": "lr", "factor_dtype": "float32", "non_target": "frozen"}, lr=0.3
    )
    target = optimizer.targets["model.layers.1.mlp.down_proj"]
    loss_of(model, tokens()).backward()
    expected = target.module.weight - 0.3 * target.update.grad @ target.projection()
    optimizer.step()
    torch.testing.assert_close(target.module.weight, expected, rtol=1e-5, atol=1e-7)


def test_the_rest_moves_as_under_torch_adamw():
    model, dense = tiny_model("qwen2"), tiny_model("qwen2")
    settings = {"rank": 6, "adamw": {"betas": (0.8, 0.9), "eps": 1e-6, "lr": 2e-3}}
    optimizer = LoGRA(model, settings, lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    rest = [n for n, p in model.named_parameters() if p.requires_grad and not n.endswith("logra_update")]
    assert "model.layers.0.self_attn.q_proj.bias" in rest and "lm_head.weight" in rest
    adamw = torch.optim.AdamW(
        [dense.get_parameter(n) for n in rest], lr=2e-3, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, fused=True
    )
    for seed in range(3):
        loss_of(model, tokens(seed=seed)).backward()
        for group in adamw.param_groups:
            group["lr"] = 2e-3 / (1 + seed)
        for name in rest:
            dense.get_parameter(name).grad = model.get_parameter(name).grad.clone()
        optimizer.step()
        adamw.step()
        optimizer.zero_grad()
        scheduler.step()
        for name in rest:
            assert torch.equal(model.get_parameter(name), dense.get_parameter(name)), name


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["target", "rest"])
def test_a_gradient_that_is_not_finite_changes_nothing(value, where, caplog):
    model = tiny_model()
    optimizer = LoGRA(model, {"rank": 6}, lr=1e-2, weight_decay=0.1)
    trained(optimizer, model, 2)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    projection = optimizer.targets["model.layers.0.mlp.up_proj"].projection()
    loss_of(model, tokens(seed=9)).backward()
    broken = optimizer.targets["model.layers.1.mlp.up_proj"].update if where == "target" else model.lm_head.weight
    broken.grad.view(-1)[3] = value
    with caplog.at_level(logging.WARNING):
        optimizer.step()
    assert caplog.text.count("skips update 3: the gradient is not finite") == 1
    assert_same(optimizer, state)
    assert all(torch.equal(weights[n], p) for n, p in model.state_dict().items())
    assert torch.equal(projection, optimizer.targets["model.layers.0.mlp.up_proj"].projection())
    assert all((t.update == 0).all() for t in optimizer.targets.values())
    assert not optimizer.last_step.applied


def assert_same(optimizer, state_dict):
    now = optimizer.state_dict()
    assert now["param_groups"] == state_dict["param_groups"]
    for index, state in state_dict["state"].items():
        for key, value in state.items():
            assert torch.equal(now["state"][index][key], value), (index, key)


def test_discard_changes_nothing():
    model = tiny_model()
    optimizer = LoGRA(model, {"rank": 6}, lr=1e-2, weight_decay=0.1)
    trained(optimizer, model, 1)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    loss_of(model, tokens(seed=5)).backward()
    optimizer.propose()
    assert any((t.update != 0).any() for t in optimizer.targets.values())
    optimizer.discard()
    assert_same(optimizer, state)
    assert all(torch.equal(weights[n], p) for n, p in model.state_dict().items())
    with pytest.raises(RuntimeError, match="no proposal is open"):
        optimizer.commit(1.0)


def test_an_error_between_the_halves_leaves_no_proposal():
    model = tiny_model()
    optimizer = LoGRA(model, {"rank": 6}, lr=1e-2)
    loss_of(model, tokens()).backward()
    optimizer.step_scale = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert all((t.update == 0).all() for t in optimizer.targets.values()) and optimizer.num_updates == 0
    optimizer.step_scale = None
    optimizer.step()
    assert optimizer.num_updates == 1


@pytest.mark.parametrize("non_target", ["frozen", "adamw"])
def test_alpha_scales_everything_that_moves(non_target):
    """Half the step is half of the displacement of targets, decay and the rest."""
    whole, half = tiny_model(), tiny_model()
    start = copy.deepcopy(whole.state_dict())
    for model, alpha in ((whole, 1.0), (half, 0.5)):
        settings = {"rank": 6, "scale": "lr", "factor_dtype": "float32", "non_target": non_target}
        optimizer = LoGRA(model, settings, lr=1e-2, weight_decay=0.1)
        loss_of(model, tokens()).backward()
        optimizer.step_scale = lambda _, alpha=alpha: alpha
        optimizer.step()
    for name, before in start.items():
        moved = whole.state_dict()[name] - before
        torch.testing.assert_close(half.state_dict()[name] - before, moved / 2, rtol=1e-3, atol=1e-7, msg=name)
        assert moved.any() == (non_target == "adamw" or name.endswith("proj.weight")), name


def test_equal_rewards_move_nothing_but_decay():
    model = tiny_model()
    optimizer = LoGRA(model, {"rank": 6, "non_target": "frozen"}, lr=1e-2, weight_decay=0.1)
    before = copy.deepcopy(model.state_dict())
    (loss_of(model, tokens()) * 0).backward()
    optimizer.step()
    assert optimizer.last_step.applied and optimizer.last_step.metrics()["update_ratio"] == 0
    for name, target in optimizer.targets.items():
        expected = before[name + ".weight"] * (1 - 1e-3)
        torch.testing.assert_close(target.module.weight.data, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("refresh, changes", [("update", [1, 2]), ("sync", [0, 0]), ("never", [0, 0])])
def test_when_projections_are_drawn_anew(refresh, changes):
    model = tiny_model()
    optimizer = LoGRA(model, {"rank": 6, "refresh": refresh}, lr=1e-2)
    target = optimizer.targets["model.layers.0.mlp.up_proj"]
    first = target.projection()
    for expected in changes:
        trained(optimizer, model, 1)
        assert optimizer.taps.refresh == expected
        assert torch.equal(first, target.projection()) == (expected == 0)
    optimizer.refresh_projections()
    assert not torch.equal(first, target.projection())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resume_continues_bit_for_bit(dtype):
    model = tiny_model("qwen2", dtype=dtype)
    settings = {"rank": 6, "scale": "lr"}
    optimizer = LoGRA(model, settings, lr=1e-2, weight_decay=0.1)
    trained(optimizer, model, 3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    trained(optimizer, model, 3, first_seed=3)

    resumed = tiny_model("qwen2", seed=7, dtype=dtype)
    resumed_optimizer = LoGRA(resumed, settings, lr=1e-2, weight_decay=0.1)
    resumed.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    trained(resumed_optimizer, resumed, 3, first_seed=3)
    assert all(torch.equal(p, resumed.state_dict()[n]) for n, p in model.state_dict().items())
    assert_same(resumed_optimizer, optimizer.state_dict())


def test_a_checkpoint_for_other_targets_is_refused():
    optimizer = LoGRA(tiny_model(), {"rank": 6}, lr=1e-2)
    other = LoGRA(tiny_model(), {"rank": 6, "exclude_modules": ["layers.0.mlp.up_proj"]}, lr=1e-2)
    with pytest.raises(ValueError, match="for other targets; they differ in: model.layers.0.mlp.up_proj"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="not a LoGRA checkpoint"):
        optimizer.load_state_dict(torch.optim.AdamW(tiny_model().parameters()).state_dict())


def test_bfloat16_weights_move_as_float32_masters():
    """100 steps of 1e-6, each far below a bf16 step: the bf16 model is the rounded float32 one, low halves included."""
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(dtype=torch.bfloat16).to(dtype)
        optimizer = LoGRA(model, {"rank": 6, "scale": "lr", "non_target": "frozen"}, lr=1e-6)
        start = {n: t.module.weight.detach().clone().float() for n, t in optimizer.targets.items()}
        generator = torch.Generator().manual_seed(0)
        for _ in range(100):
            for target in optimizer.targets.values():
                grad = torch.randn(target.update.shape, generator=generator) + 0.5
                target.update.grad = grad.bfloat16().to(dtype)
            optimizer.step()
        results[dtype] = {n: t.module.weight.detach().float() for n, t in optimizer.targets.items()}
    for name, master in results[torch.float32].items():
        moved = master - start[name]
        assert moved.abs().mean() > 1e-6
        # The direction is rounded to bf16 before int8, which may move a code: 1e-2 of the path, not more.
        error = (results[torch.bfloat16][name] - master.bfloat16().float()).abs()
        assert (error > 0).float().mean() < 0.02, name


def test_in_verl_a_stock_engine_is_told_what_to_set():
    with pytest.raises(TypeError, match="set actor_rollout_ref.actor.strategy=fsdp2"):
        LoGRA(iter(tiny_model().parameters()), lr=1e-6, weight_decay=0.0, rank=8)


def test_state_is_one_moment_a_row():
    model = tiny_model()
    optimizer = LoGRA(model, {"rank": 6, "non_target": "frozen"}, lr=1e-3)
    rows = sum(t.module.out_features for t in optimizer.targets.values())
    assert optimizer.state_bytes() == 4 * rows
