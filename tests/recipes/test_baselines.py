"""The peer optimizers against their packages: our splitting and unwrapping must not change what they compute."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.ranks import run_ranks
from tests.tiny_models import loss_of, tiny_model, tokens

RANK = 8
METHODS = ["GaLoreAdamW", "APOLLOAdamW", "Flora"]
PACKAGES = {"GaLoreAdamW": "galore_torch", "APOLLOAdamW": "apollo_torch", "Flora": "flora_opt"}
CLOCK = {"GaLoreAdamW": "update_proj_gap", "APOLLOAdamW": "update_proj_gap", "Flora": "kappa"}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> list[torch.Tensor]:
    for seed in range(steps):
        loss_of(model, tokens(seed=seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def ours(name: str, model: nn.Module, **changes: object) -> torch.optim.Optimizer:
    import recipes.baselines

    optimizer = getattr(recipes.baselines, name)
    return optimizer(model.parameters(), lr=1e-2, weight_decay=0.1, **{"rank": RANK, CLOCK[name]: 2, **changes})


@pytest.mark.parametrize("name", METHODS)
def test_trains_as_the_package_on_the_matrices_and_as_adamw_on_the_rest(name):
    pytest.importorskip(PACKAGES[name])
    import apollo_torch
    import flora_opt
    import galore_torch

    model = tiny_model()
    matrices = [p for n, p in model.named_parameters() if "_proj.weight" in n]
    rest = [p for n, p in model.named_parameters() if "_proj.weight" not in n]
    common = dict(lr=1e-2, weight_decay=0.1)
    if name == "GaLoreAdamW":
        group = dict(params=matrices, rank=RANK, update_proj_gap=2, scale=0.25, proj_type="std")
        package = galore_torch.GaLoreAdamW([group], eps=1e-8, no_deprecation_warning=True, **common)
    elif name == "APOLLOAdamW":
        group = dict(params=matrices, rank=RANK, update_proj_gap=2, scale=1.0, scale_type="channel")
        package = apollo_torch.APOLLOAdamW([group | dict(proj="random", proj_type="std")], eps=1e-8, **common)
    else:
        package = flora_opt.Flora(matrices, rank=RANK, beta1=0.9, kappa=2, **common)
    adamw = torch.optim.AdamW(rest, fused=True, **common)
    for seed in range(5):
        loss_of(model, tokens(seed=seed)).backward()
        package.step()
        adamw.step()
        model.zero_grad()
    expected = [p.detach() for p in model.parameters()]

    model = tiny_model()
    for got, want in zip(trained(model, ours(name, model)), expected, strict=True):
        assert torch.equal(got, want)


def sharded_error(name: str, **changes: object) -> float:
    """How far training of FSDP2 parameters ends from that of plain ones, relative to how far that moved."""
    whole, model = tiny_model(), tiny_model()
    start = [p.detach().clone() for p in whole.parameters()]
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    expected = trained(whole, ours(name, whole, **changes))
    got = trained(model, ours(name, model, **changes))
    expected, got = [e.detach() for e in expected], [g.detach() for g in got]
    moved = sum((e - s).square().sum() for e, s in zip(expected, start, strict=True)).sqrt()
    return float(sum((g - e).square().sum() for g, e in zip(got, expected, strict=True)).sqrt() / moved)


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", METHODS)
def test_training_of_fsdp2_parameters_on_one_rank_equals_that_of_plain_ones(name, one_rank):
    pytest.importorskip(PACKAGES[name])
    assert sharded_error(name) < 1e-6


def _on_two_ranks(rank: int) -> tuple[float, list[str]]:
    refusals = []
    for name in ("APOLLOAdamW", "Flora"):
        model = tiny_model()
        fully_shard(model)
        with pytest.raises(NotImplementedError) as error:
            ours(name, model)
        refusals.append(str(error.value))
    # One SVD, for 100 steps: a second one would amplify rounding, see GaLoreAdamW.
    return sharded_error("GaLoreAdamW", update_proj_gap=100), refusals


def test_on_two_ranks_galore_trains_as_on_one_and_the_others_are_refused():
    for package in PACKAGES.values():
        pytest.importorskip(package)
    for error, refusals in run_ranks(2, _on_two_ranks):
        assert error < 1e-4
        assert all("2 ranks" in refusal for refusal in refusals)


@pytest.mark.parametrize("name", METHODS)
def test_a_schedule_reaches_both_halves_and_a_checkpoint_continues(name):
    pytest.importorskip(PACKAGES[name])
    model = tiny_model()
    optimizer = ours(name, model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [p.detach().clone() for p in model.parameters()]
    assert all(map(torch.equal, trained(model, optimizer, steps=1), before))

    model = tiny_model()
    optimizer = ours(name, model)
    trained(model, optimizer, steps=3)
    saved = {n: p.detach().clone() for n, p in model.state_dict().items()}
    state = optimizer.state_dict()
    import copy

    state = copy.deepcopy(state)
    expected = trained(model, optimizer, steps=2)
    resumed = tiny_model(seed=3)
    resumed.load_state_dict(saved)
    optimizer = ours(name, resumed)
    optimizer.load_state_dict(state)
    assert all(map(torch.equal, trained(resumed, optimizer, steps=2), expected))


def test_matrices_too_small_for_the_rank_go_to_adamw_by_name(caplog):
    from recipes.baselines.groups import split_by_shape

    model = tiny_model()  # k and v are 12 x 36
    low_rank, rest = split_by_shape(model.parameters(), 12)
    assert {tuple(p.shape) for p in low_rank} == {(36, 36), (70, 36), (36, 70)}
    assert len(low_rank) + len(rest) == len(list(model.parameters()))
    assert "12x36" in caplog.text
    with pytest.raises(ValueError, match="set a smaller rank"):
        split_by_shape(model.parameters(), 64)
