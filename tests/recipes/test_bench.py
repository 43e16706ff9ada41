"""The benchmarks measure what they say: peaks, bytes, the same step for every method, ratios within a repeat."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from recipes.bench import layer, run
from recipes.bench.case import METHODS, NOT_FULL_WEIGHT, PEAK_ENVIRONMENT, PHASES, SHAPES, WITHOUT_RANK, Case
from recipes.bench.measure import Trainer, held_bytes, log_likelihood_loss
from recipes.bench.report import notes, report, series_of
from tests.ranks import run_ranks

RANK = 8
ROOT = Path(__file__).parents[2]
PACKAGES = {"adam8bit": "torchao", "galore": "galore_torch", "flora": "flora_opt", "apollo": "apollo_torch"}
# out, in of a decoder layer's projections in SHAPES["tiny"]: q, k, v, o, gate, up, down
MATRICES = [(64, 64), (32, 64), (32, 64), (64, 64), (192, 64), (192, 64), (64, 192)]
LAYERS = 2


def tiny(method: str, **changes: object) -> Case:
    rank = None if method in WITHOUT_RANK else RANK
    return Case(method=method, rank=rank, shape=SHAPES["tiny"], length=16, threads=1, **changes)


def test_the_peak_is_what_was_held_at_once_and_freed():
    """100 MiB held twice one after the other are a peak of 100 MiB, and are returned."""
    code = """
import gc, torch
from recipes.bench.measure import reset_peak, resident_bytes
torch.ones(1 << 20)
before = resident_bytes(); reset_peak()
for _ in range(2):
    kept = [torch.ones(1 << 16) for _ in range(400)]
    del kept
print((resident_bytes("VmHWM") - before) / 2**20, (resident_bytes() - before) / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", code], env=PEAK_ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    peak, left = map(float, done.stdout.split())
    assert peak == pytest.approx(100, abs=5) and abs(left) < 5


def bytes_held(rank: int, case: Case) -> dict[str, int]:
    trainer = Trainer(case)
    log_likelihood_loss(trainer.model, trainer.ids).backward()
    for optimizer in trainer.optimizers:
        optimizer.step()
    return held_bytes(trainer.model, trainer.optimizers)


def test_bytes_held_by_adamw_and_by_logra_follow_from_the_shapes():
    adamw, logra = bytes_held(0, tiny("adamw")), bytes_held(0, tiny("logra"))
    elements = LAYERS * sum(out * features for out, features in MATRICES)
    rows = LAYERS * sum(out for out, _ in MATRICES)
    words = LAYERS * sum(RANK * -(-features // 64) for _, features in MATRICES)
    steps = 4 * LAYERS * len(MATRICES)  # torch keeps each parameter's step count in a float
    assert adamw["target gradients"] == 4 * elements
    assert adamw["target state"] == 8 * elements + steps
    assert adamw["added parameters"] == adamw["projections"] == 0
    assert logra["target gradients"] == logra["added parameters"] == 4 * rows * RANK
    assert logra["target state"] == 4 * rows
    assert logra["projections"] == 8 * words
    same = ("weights", "rest gradients", "rest state")
    assert [adamw[key] for key in same] == [logra[key] for key in same]


def test_two_ranks_hold_half_of_sketches_updates_and_state_each():
    whole = bytes_held(0, tiny("logra"))
    for held in run_ranks(2, bytes_held, tiny("logra", shards=2)):
        for key in ("target gradients", "target state", "added parameters"):
            assert held[key] == whole[key] / 2
        assert held["projections"] == whole["projections"]  # 1 bit for each element, on every rank


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_the_same_step_of_what_it_trains(method):
    pytest.importorskip(PACKAGES.get(method, "torch"))
    dense = Trainer(tiny("adamw"))
    expected = dense.step()
    trainer = Trainer(tiny(method))
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    with torch.compiler.set_stance("force_eager"):  # torchao compiles for every shape
        step = trainer.step()
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    matrices = {
        n.replace(".base_layer", "") for n in before if "_proj" in n and n.endswith("weight") and "lora" not in n
    }
    assert step["loss"] == expected["loss"]
    if method == "lora":
        # The A factors get no gradient before B has moved.
        assert moved == {n for n in before if "lora_B" in n}
    elif method in NOT_FULL_WEIGHT:
        assert moved == matrices
    else:
        assert moved >= {*matrices, "model.embed_tokens.weight"} and len(matrices) == LAYERS * len(MATRICES)
        if method != "logra":  # whose norm is an estimate
            assert step["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-5)


def test_the_parts_of_a_step_are_timed_where_they_happen():
    from recipes.bench.measure import watch_parts

    trainer = Trainer(tiny("logra-kl"))
    with pytest.MonkeyPatch.context() as patch:
        from verl_logra.probe import Probe
        from verl_logra.sketch import Target

        for owner, name in ((Target, "unscaled_projection"), *((Probe, n) for n in ("predict", "remember"))):
            patch.setattr(owner, name, getattr(owner, name))
        patch.setattr(Probe, "kl_since_remembered", Probe.kl_since_remembered)
        watch_parts(trainer.optimizers[0], trainer.stopwatch)
        seconds = trainer.step()["seconds"]
    inside = sum(seconds[part] for part in ("propose", "predict", "verify", "commit"))
    assert all(seconds[part] > 0 for part in (*PHASES, "propose", "predict", "verify", "commit", "projections"))
    assert inside <= seconds["optimizer"]


def test_a_tapped_layer_computes_the_sketch_of_the_dense_gradient():
    made = layer.layers(48, 40, RANK)
    features, grad_output = torch.randn(30, 48, requires_grad=True), torch.randn(30, 40)
    for module in made.values():
        layer.seconds(module, features, grad_output)
    target = next(iter(made["tapped"].logra_taps.targets.values()))
    expected = made["dense"][0].weight.grad @ target.projection().T
    assert torch.allclose(target.update.grad, expected, atol=1e-4)
    assert made["frozen"][0].weight.grad is None


def result(case: Case, seconds: float, peak: int = 2**30) -> dict[str, object]:
    phases = dict.fromkeys(PHASES, seconds / 4)
    held = dict.fromkeys(
        ("target gradients", "target state", "added parameters", "projections", "rest state", "rest gradients"), 2**20
    )
    return {
        "case": asdict(case),
        "peak_bytes": peak,
        "held_bytes": held,
        "target_parameters": 2**20,
        "seconds": [phases],
        "warmup_seconds": {**phases, "optimizer": seconds / 4 + 100},
        "profile": None,
    }


def test_ratios_are_taken_within_a_repeat(monkeypatch, tmp_path):
    """A machine that gets three times slower changes no ratio."""
    slowdowns = iter([1, 1, 2, 2, 3, 3])

    def process(arguments, prefix, **variables):
        case = Case(**{**json.loads(arguments[1]), "shape": SHAPES["tiny"]})
        if "MALLOC_MMAP_THRESHOLD_" in variables:
            return result(case, 1.0, peak=2**30 if case.method == "adamw" else 2**29)
        return result(case, next(slowdowns) * (10.0 if case.method == "adamw" else 8.0))

    monkeypatch.setattr(run, "run_process", process)
    arguments = ["--suites", "step", "--size", "tiny", "--methods", "adamw", "galore", "--ranks", "8"]
    assert run.main([*arguments, "--out", str(tmp_path)]) == 0
    row = next(x for x in (tmp_path / "step.md").read_text().splitlines() if x.startswith("| GaLore"))
    assert "| 0.50 | -50% |" in row and "| 16.00 (8.00 to 24.00) | 0.80 (0.80 to 0.80) |" in row
    assert "100.0 s; every 200 steps that is 0.50 s a step, 3% more" in (tmp_path / "step.md").read_text()
    assert (tmp_path / "step.png").stat().st_size > 10_000

    monkeypatch.setattr(run, "run_process", lambda *_: pytest.fail("measured again"))
    assert run.main([*arguments, "--out", str(tmp_path)]) == 0


def test_a_method_that_fails_is_said_and_the_others_are_measured(monkeypatch, tmp_path, capsys):
    def process(arguments, prefix, **variables):
        case = Case(**{**json.loads(arguments[1]), "shape": SHAPES["tiny"]})
        if case.method == "flora":
            raise RuntimeError("no such package")
        return result(case, 1.0)

    monkeypatch.setattr(run, "run_process", process)
    arguments = ["--suites", "step", "--methods", "flora", "adamw", "--size", "tiny", "--out", str(tmp_path)]
    assert run.main(arguments) == 1
    assert "Flora, rank 64: failed: no such package" in capsys.readouterr().err
    assert {m["case"]["method"] for m in json.loads((tmp_path / "step.json").read_text())["measurements"]} == {"adamw"}


def test_the_sweep_varies_one_thing_at_a_time(tmp_path):
    cases = run.sweep_cases(threads=1)
    measurements = [
        {"kind": kind, "repeat": 0, "environment": 0, "load_average": 0.0, **result(c, 1.0)}
        for c in cases
        for kind in ("peak", "time")
    ]
    data = {"environments": [run.environment()], "measurements": measurements}
    (tmp_path / "sweep.json").write_text(json.dumps(data))
    assert "| 1 | LoGRA, rank 64 | 1.0000 | 1.0000 | 1.0000 | 1.0000 | 4.0000 |" in report(tmp_path / "sweep.json")
    from recipes.bench.report import collect

    found = {
        axis: [[m.case for m in chosen] for chosen in methods.values()]
        for axis, methods in series_of(collect(measurements)).items()
    }
    assert {len(chosen) for axis in ("hidden size", "tokens", "FSDP2 ranks") for chosen in found[axis]} == {3}
    assert [c.rank for c in found["rank"][0]] == [16, 64, 256]
    for chosen in found["tokens"]:
        assert len({replace(c, length=1) for c in chosen}) == 1


def test_one_command_measures_in_fresh_processes(tmp_path):
    arguments = ["--suites", "step", "--size", "tiny", "--methods", "logra", "--ranks", "8", "--repeats", "1"]
    assert run.main([*arguments, "--length", "16", "--threads", "1", "--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "step.json").read_text())
    peak, time = data["measurements"]
    assert peak["kind"] == "peak" and peak["malloc_fixed"] and not time["malloc_fixed"]
    assert len(time["losses"]) == 3 and time["losses"][0] > time["losses"][2]
    assert any("mm" in o["name"] for o in time["profile"]["operators"])
    (environment,) = data["environments"]
    assert environment["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert len(environment["commit"]) == 40


def test_old_numbers_keep_their_commit(tmp_path):
    old, new = ({"commit": commit} for commit in "ab")
    run.Results(tmp_path, "step", old).add("time", 0, result(tiny("adamw"), 1.0))
    for repeat in (0, 1):
        run.Results(tmp_path, "step", new).add("time", repeat, result(tiny("logra"), 1.0))
    data = json.loads((tmp_path / "step.json").read_text())
    assert [data["environments"][m["environment"]]["commit"] for m in data["measurements"]] == ["a", "b", "b"]


def test_files_that_git_does_not_know_count_as_changes():
    new = ROOT / "recipes" / "baselines" / "not_in_git.py"
    try:
        new.touch()
        assert new.name in run.environment()["changed_files"]
    finally:
        new.unlink()


def test_a_method_whose_package_is_missing_is_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(run, "find_spec", lambda module: None if module == "peft" else "found")
    with pytest.raises(SystemExit):
        run.main(["--suites", "step", "--methods", "adamw", "lora", "--out", str(tmp_path)])
    assert "not installed: peft. `uv pip install" in capsys.readouterr().err
    assert run.missing_modules(["adamw"]) == []


@pytest.mark.parametrize("rank, noted", [(8, False), (64, True)])
def test_matrices_that_peers_leave_to_adamw_are_noted(rank, noted):
    case = Case(method="galore", rank=rank, shape=SHAPES["tiny"])  # k_proj has 32 rows
    assert ("have 32 rows: at rank 64" in "".join(notes([case]))) == noted


def test_a_wrong_case_is_refused():
    with pytest.raises(ValueError, match="none of adamw"):
        Case(method="sgd")
    with pytest.raises(ValueError, match="logra has a rank"):
        Case(method="logra")
