"""The study's runner and tables, on made-up results."""

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from recipes.study import report, run
from recipes.study.experiments import ABLATIONS, EXPERIMENTS, GROUPS, METHODS, REFERENCE, Experiment


def made_up_run(folder: Path, *, accuracy: float, rewards: Sequence[float]) -> Path:
    """What a finished quickstart leaves: metrics and a summary."""
    folder.mkdir(parents=True)
    records = [{"step": 0, "data": {"val-core/words/acc/mean@1": 0.25}}]
    records += [{"step": i, "data": {"critic/score/mean": r}} for i, r in enumerate(rewards, 1)]
    records[-1]["data"]["val-core/words/acc/mean@1"] = accuracy
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    summary = {"gradient_bytes": 1000, "optimizer_state_bytes": 2000, "added_parameter_bytes": 72}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


class MadeUpRuns:
    """A runner that counts its runs; those named in ``broken`` fail."""

    def __init__(self, folder: Path, broken: Sequence[str] = ()) -> None:
        self.folder, self.broken, self.started = folder, broken, []

    def __call__(self, experiment: Experiment, seed: int, name: str, prefix: Sequence[str]) -> Path:
        self.started.append(name)
        if name in self.broken:
            raise subprocess.CalledProcessError(1, "run.sh")
        attempt = self.folder / f"{name}-{len(self.started)}"
        return made_up_run(attempt, accuracy=0.5 + seed / 10, rewards=[0.0] * 5 + [0.5] * 5 + [1.0] * 5)


def test_finished_runs_are_kept_and_failed_ones_are_run_again(tmp_path: Path) -> None:
    results = tmp_path / "results"
    first = MadeUpRuns(tmp_path / "first", broken=["study-logra-seed1"])
    assert run.study(["adamw", "logra"], [1, 2], results=results, runner=first) == ["logra-seed1"]
    assert first.started == [f"study-{name}-seed{seed}" for seed in (1, 2) for name in ("adamw", "logra")]
    assert not (results / "logra-seed1.json").exists()

    second = MadeUpRuns(tmp_path / "second")
    assert run.study(["adamw", "logra"], [1, 2], results=results, runner=second) == []
    assert second.started == ["study-logra-seed1"]
    third = MadeUpRuns(tmp_path / "third")
    assert run.study(["adamw", "logra"], [1, 2], results=results, runner=third) == [] and third.started == []


def test_a_result_that_was_being_written_when_the_study_died_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "adamw-seed1.partial").write_text('{"half')
    runner = MadeUpRuns(tmp_path / "runs")
    run.study(["adamw"], [1], results=tmp_path, runner=runner)
    assert runner.started == ["study-adamw-seed1"]
    assert report.load(tmp_path)["adamw"][0]["accuracy"][-1] == [15, 0.6]


def test_an_interrupt_starts_no_further_run(tmp_path: Path) -> None:
    started = []

    def interrupted(experiment: Experiment, seed: int, name: str, prefix: Sequence[str]) -> Path:
        started.append(name)
        time.sleep(0.1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.study(list(EXPERIMENTS), [1, 2, 3], results=tmp_path, runner=interrupted)
    assert len(started) < 5 and not list(tmp_path.glob("*.json"))


def test_a_run_whose_files_are_missing_is_a_failed_run(tmp_path: Path) -> None:
    assert run.study(["adamw"], [1], results=tmp_path, runner=lambda *_: tmp_path / "nothing") == ["adamw-seed1"]


def test_table_has_mean_and_deviation_over_seeds_and_what_is_held(tmp_path: Path) -> None:
    run.study(["adamw", "logra"], [1, 2, 3], results=tmp_path, runner=MadeUpRuns(tmp_path / "runs"))
    run.study(["lora"], [1], results=tmp_path, runner=MadeUpRuns(tmp_path / "more"))
    rows = {line.split(" | ")[0]: line for line in report.table(METHODS, report.load(tmp_path)).splitlines()}
    # Accuracies 0.6, 0.7, 0.8; the last ten rewards are five of 0.5 and five of 1.
    assert rows["| AdamW"] == "| AdamW | 3 | 70.0% ± 10.0% | 75.0% ± 0.0% | 3.0 KiB |"
    assert rows["| LoRA, rank 16"] == "| LoRA, rank 16 | 1 | 60.0% | 75.0% | 3.0 KiB |"
    assert not any("GaLore" in row for row in rows), "what was not run has no row"


def test_an_ablation_is_shown_beside_the_default_that_it_changes(tmp_path: Path) -> None:
    run.study(["logra", "rank-4", "refresh-never"], [1], results=tmp_path, runner=MadeUpRuns(tmp_path / "runs"))
    groups = report.groups(report.load(tmp_path))
    assert list(groups) == ["methods", "rank", "refresh"]
    assert groups["rank"][0] is REFERENCE and REFERENCE not in groups["refresh"]
    report.pictures(report.load(tmp_path), tmp_path)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("methods.png", "ablations.png"))


def test_readme_gets_the_tables_and_keeps_its_text(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.renew(readme, "new")
    report.renew(readme, "newer")
    assert readme.read_text() == f"before\n{report.BEGIN}\n\nnewer\n\n{report.END}\nafter\n"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="lacks the lines"):
        report.renew(readme, "new")
    assert readme.read_text() == "no marks"


def test_every_ablation_changes_one_thing_of_the_default() -> None:
    for experiment in ABLATIONS:
        changed = set(experiment.variables.items()) - set(REFERENCE.variables.items())
        if experiment.group != "refresh":
            # A learning rate of one scale of the update is none of the other.
            changed -= {("LR", "1e-3")} if experiment.group == "scale" else set()
            assert len(changed) + len(experiment.overrides) == 1, experiment.name
    refresh = [EXPERIMENTS[name] for name in GROUPS["refresh"]]
    assert len({tuple(e.variables.items()) for e in refresh}) == 1 and len({e.overrides for e in refresh}) == 3


def test_no_results_say_what_to_call(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run\.sh"):
        report.load(tmp_path)
