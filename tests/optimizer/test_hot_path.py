"""What a step may cost: no synchronisation with the host, few operations a target, no garbage, small temporaries."""

import collections
import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tiny_models import loss_of, tiny_model, tokens
from verl_logra import LoGRA

WAITS_FOR_THE_DEVICE = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "item"}


class _HotPath(TorchDispatchMode):
    """Fails where a GPU would have to be waited for; counts operations that launch kernels.

    On a GPU ``torch.cuda.set_sync_debug_mode("error")`` finds the same and copies to the host besides.
    """

    VIEWS = (
        "view",
        "split",
        "unbind",
        "select",
        "slice",
        "expand",
        "unsqueeze",
        "t.",
        "alias",
        "detach",
        "transpose",
        "permute",
        "as_strided",
    )

    def __init__(self):
        super().__init__()
        self.count = collections.Counter()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        if name.partition(".")[0] in WAITS_FOR_THE_DEVICE:
            raise AssertionError(f"{name} waits for the device")
        if not name.startswith(self.VIEWS):
            self.count[name] += 1
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return result


def after_backward(model=None, **settings):
    model = model or tiny_model()
    optimizer = LoGRA(model, {"rank": 6, "non_target": "frozen", **settings}, lr=1e-3, weight_decay=0.1)
    for seed in (1, 2):
        loss_of(model, tokens(seed=seed)).backward()
        if seed == 1:
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("factor_dtype", ["int8", "bfloat16", "float32"])
@pytest.mark.parametrize("scale", ["ratio", "lr"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_proposing_and_committing_wait_for_no_device(factor_dtype, scale, dtype):
    optimizer = after_backward(tiny_model(dtype=dtype), factor_dtype=factor_dtype, scale=scale)
    before = {n: t.module.weight.clone() for n, t in optimizer.targets.items()}
    with _HotPath():
        optimizer.propose()
        optimizer.commit(0.7)
    assert optimizer.num_updates == 2
    low = [optimizer.state[t.update].get("low_half") for t in optimizer.targets.values()]
    assert any(not torch.equal(before[n], t.module.weight) for n, t in optimizer.targets.items()) or low[0].any()


def test_the_mode_would_see_a_wait():
    with pytest.raises(AssertionError, match="_local_scalar_dense waits"), _HotPath():
        float(torch.ones(()))


def test_operations_per_target():
    """Between 2 and 4 layers the rest of a step cancels. A kernel launch costs 5 to 10 microseconds on a GPU, and a 7B
    model has 196 targets."""
    counts = {}
    for num_layers in (2, 4):
        optimizer = after_backward(tiny_model(num_hidden_layers=num_layers))
        for half in (optimizer.propose, optimizer.commit):
            with _HotPath() as seen:
                half()
            counts[num_layers, half.__name__] = sum(seen.count.values())
    per_target = {half: (counts[4, half] - counts[2, half]) / 14 for half in ("propose", "commit")}
    assert per_target["propose"] <= 20 and per_target["commit"] <= 20, per_target


def test_no_garbage_is_left_for_the_collector():
    """A reference cycle would keep tensors until Python's collector stops the step to look for them."""
    model = tiny_model()
    optimizer = after_backward(model)
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    gc.disable()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        loss_of(model, tokens()).backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        tensors = [o for o in gc.garbage if isinstance(o, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_committing_makes_no_temporary_of_a_weights_size(dtype):
    model = nn.Sequential(nn.Linear(1024, 4096, bias=False)).to(dtype)
    optimizer = LoGRA(model, {"rank": 8, "target_modules": ["0"], "non_target": "frozen"}, lr=1e-3, weight_decay=0.1)
    model(torch.randn(4, 1024, dtype=dtype)).sum().backward()
    optimizer.propose()
    with _HotPath() as seen:
        optimizer.commit()
    assert seen.largest <= 4 * 1024 * 4096 / 8


def test_checkpointing_projects_once_and_recomputes_no_output_that_nothing_needs():
    """Products ``[tokens, features] @ [features, ...]`` by the shape of their result, forward and backward apart."""
    model = tiny_model("llama", intermediate_size=70)
    LoGRA(model, {"rank": 6, "non_target": "frozen"})
    loss_of(model, tokens()).backward()
    plain = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    with _Products() as forward:
        loss = loss_of(model, tokens())
    with _Products() as backward:
        loss.backward()
    assert all(torch.equal(plain[n], model.get_parameter(n).grad) for n in plain)
    layers, num_tokens = 2, tokens().numel()
    assert forward.shapes[num_tokens, 6] == 0, "the first pass projects nothing"
    assert backward.shapes[num_tokens, 6] == 7 * layers
    # Results [tokens, 70]: gate and up recomputed, the gradient of down's input. [tokens, 36] in a layer: q and o
    # recomputed, but not down; gradients of the inputs of q, k, v, o, gate and up; the head's, once.
    assert backward.shapes[num_tokens, 70] == 3 * layers
    assert backward.shapes[num_tokens, 36] == (2 + 6) * layers + 1


class _Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.shapes = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.name() in ("aten::mm", "aten::addmm"):
            self.shapes[tuple(result.shape)] += 1
        return result
