"""The recipes' report and launcher, from small fixed files and small commands."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("psutil")
pytest.importorskip("matplotlib")

from recipes.common import launch, metrics, report


def record(step: int, **data: float) -> dict:
    return {"step": step, "data": data}


def training(step: int, reward: float, seconds: float, **more: float) -> dict:
    return record(
        step,
        **{
            "critic/score/mean": reward,
            "timing_s/step": seconds,
            "actor/grad_norm": 1.0,
            "actor/perf/max_memory_allocated_gb": 0.5 + step / 8,
        },
        **more,
    )


RECORDS = [
    record(0, **{"val-core/words/acc/mean@1": 0.4, "val-aux/words/reward/mean@1": 0.9}),
    training(1, 0.25, 9.0),
    training(2, 0.5, 2.0, **{"val-core/words/acc/mean@1": 0.5}),
    training(3, 0.75, 1.0, **{"val-core/words/acc/mean@1": 0.8}),
]
RUN = {"wall_seconds": 70.0, "peak_memory_bytes": 3 * 2**30, "exit_code": 0}


MEMORY = {"state_bytes": 2000, "gradient_bytes": 1536, "added_parameter_bytes": 0}


def config(optimizer: str, ranks: int, lora_rank: int = 0) -> dict:
    optim = {"optimizer": optimizer, "override_optimizer_config": None, "lr": 1e-3}
    return {
        "actor_rollout_ref": {"actor": {"optim": optim}, "model": {"lora_rank": lora_rank}},
        "trainer": {"n_gpus_per_node": ranks},
        "data": {"seed": 7},
    }


def test_summary_takes_first_and_last_validation_and_the_median_step() -> None:
    summary = report.summarize(RECORDS, RUN, config=config("LoGRA", 2), parameters=500, memory=MEMORY)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.4, 0.8)
    assert summary["seconds_per_step"] == 2.0, "the first step is slow and must not count"
    assert (summary["steps"], summary["seed"]) == (3, 7)
    assert summary["reward_first_steps"] == summary["reward_last_steps"] == 0.5
    assert summary["trainer_peak_memory_bytes"] == (0.5 + 3 / 8) * 2**30
    assert (summary["optimizer_state_bytes"], summary["gradient_bytes"]) == (2000, 1536)


def test_a_run_that_validated_nothing_is_reported_all_the_same(tmp_path: Path) -> None:
    records = [training(1, 0.25, 9.0), training(2, 0.5, 2.0)]
    summary = report.summarize(records, RUN, config=config("LoGRA", 1), parameters=500, memory=None)
    lines = [line.split() for line in report.table({"run": summary}).splitlines() if "accuracy" in line]
    assert [line[-1] for line in lines] == ["-", "-"]
    report.draw({"run": records}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_lora_is_named_though_verl_calls_its_optimizer_adamw() -> None:
    summary = report.summarize(RECORDS, RUN, config=config("AdamW", 1, lora_rank=8), parameters=500, memory=MEMORY)
    assert summary["optimizer"] == "LoRA rank 8"


def test_optimizer_memory_adds_up_ranks_and_keeps_critic_and_actor_apart(tmp_path: Path) -> None:
    folder = tmp_path / "optimizer_memory"
    folder.mkdir()
    for order, pid, size in ((0, 7, 10), (0, 8, 20), (1, 7, 300), (1, 8, 400)):
        (folder / f"{order}-{pid}.json").write_text(json.dumps({"optimizer": "AdamW", "state_bytes": size}))
    assert report.optimizer_memory(tmp_path) == [{"state_bytes": 30}, {"state_bytes": 700}]
    assert report.optimizer_memory(tmp_path / "a run of one update") == []


def test_table_says_what_the_summary_does() -> None:
    summary = report.summarize(RECORDS, RUN, config=config("LoGRA", 1), parameters=1500, memory=MEMORY)
    text = report.table({"one": summary, "two": summary})
    line = {line[:30].strip(): line[30:].split() for line in text.splitlines()}
    assert line["held-out accuracy before"] == ["40.0%", "40.0%"]
    assert line["held-out accuracy after"] == ["80.0%", "80.0%"]
    assert line["peak memory, all processes"] == ["3.00", "GiB"] * 2
    assert line["optimizer state"] == ["2.0", "KiB"] * 2
    assert line["gradients"] == ["1.5", "KiB"] * 2


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**30, "5.00 GiB")]
)
def test_size_is_readable(num_bytes: int, text: str) -> None:
    assert report.size(num_bytes) == text


def test_report_of_a_run_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    import yaml
    from safetensors.torch import save_file

    run, model = tmp_path / "run", tmp_path / "model"
    model.mkdir()
    (run / "hydra/.hydra").mkdir(parents=True)
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(4)}, model / "model.safetensors")
    settings = config("AdamW", 1)
    settings["actor_rollout_ref"]["model"] = {"path": str(model)}
    (run / "hydra/.hydra/config.yaml").write_text(yaml.safe_dump(settings))
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in RECORDS))
    (run / "run.json").write_text(json.dumps(RUN))
    report.report([run])
    summary = json.loads((run / "summary.json").read_text())
    assert summary["parameters"] == 19 and summary["accuracy_after"] == 0.8
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "80.0%" in capsys.readouterr().out


def test_run_without_a_step_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"train\.log"):
        metrics.read_metrics(tmp_path)


def test_half_a_line_of_metrics_is_left_for_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert launch.new_records(path, 0) == ([], 0)
    path.write_text('{"step": 1}\n{"st')
    records, position = launch.new_records(path, 0)
    assert records == [{"step": 1}]
    path.write_text('{"step": 1}\n{"step": 2}\n')
    assert launch.new_records(path, position)[0] == [{"step": 2}]


def test_progress_line_names_reward_accuracy_and_time() -> None:
    assert launch.progress_line(RECORDS[2], 40, 12.3) == (
        "step   2/40  reward 0.500  held-out accuracy 0.500  2.0 s/step  (12 s)"
    )


def start(code: str, out: Path, **limits: float) -> tuple[int, float]:
    begin = time.monotonic()
    limits = {"stall_limit": 60, "time_limit": 60, **limits}
    return launch.run([sys.executable, "-c", code], out=out, num_steps=1, **limits), time.monotonic() - begin


def test_hanging_run_is_stopped_with_its_children_and_its_errors_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid_file = tmp_path / "pid"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
open({str(pid_file)!r}, "w").write(str(child.pid))
print("(Worker pid=1) ValueError: weights do not fit", flush=True)
time.sleep(300)
"""
    code, seconds = start(code, tmp_path, stall_limit=3)
    assert code == 124 and seconds < 30
    assert not launch.psutil.pid_exists(int(pid_file.read_text())), "a detached child outlived its run"
    assert json.loads((tmp_path / "run.json").read_text())["exit_code"] == 124
    error = capsys.readouterr().err
    assert "STALL_LIMIT" in error and "ValueError: weights do not fit" in error


def test_exit_code_of_the_run_is_that_of_the_command(tmp_path: Path) -> None:
    assert start("raise SystemExit(3)", tmp_path)[0] == 3
    assert start("pass", tmp_path)[0] == 0


def test_other_runs_are_left_alone(tmp_path: Path) -> None:
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={launch.RUN_MARK: "another run"}
    )
    try:
        assert start("pass", tmp_path)[0] == 0
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_memory_of_a_run_counts_what_its_processes_hold(tmp_path: Path) -> None:
    code = "import time; held = b'x' * (200 * 2**20); time.sleep(7)"
    start(code, tmp_path)
    peak = json.loads((tmp_path / "run.json").read_text())["peak_memory_bytes"]
    assert 200 * 2**20 < peak < 300 * 2**20


def test_records_of_a_resumed_run_are_those_of_all_its_parts(tmp_path: Path) -> None:
    """A part that was killed behind its checkpoint, in the middle of a line, and the part that resumed it."""
    first = [record(0, accuracy=0.1), record(1, x=1.0), record(2, x=2.0), record(3, x=3.0)]
    text = "".join(json.dumps(r) + "\n" for r in first) + '{"step": 4, "da'
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "run.json").write_text(json.dumps({"wall_seconds": 1e4, "peak_memory_bytes": 2**50, "exit_code": 124}))
    second = [record(3, x=3.5), record(4, x=4.5)]
    script = "import os; open(os.environ['VERL_FILE_LOGGER_PATH'], 'w').write(" + repr(
        "".join(json.dumps(r) + "\n" for r in second)
    )
    command = [sys.executable, "-c", script + ")"]
    limits = {"num_steps": 4, "stall_limit": 60, "time_limit": 60}
    assert launch.run(command, out=tmp_path, resume=True, **limits) == 0
    assert metrics.read_metrics(tmp_path) == [*first[:3], *second]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["wall_seconds"] > 1e4 and run["peak_memory_bytes"] == 2**50 and run["exit_code"] == 0


def test_prediction_is_drawn_for_the_step_that_was_applied() -> None:
    """Second order: half of the update moves the policy by a quarter of the KL."""
    assert report.predicted_as_applied({"actor/logra_alpha": 0.5, "actor/logra_predicted_kl": 8e-3}) == 2e-3
