"""verl's whole loop, interrupted: a resumed quickstart continues as the one that was never interrupted."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.common.metrics import read_metrics

ROOT = Path(__file__).parents[2]
OUTPUTS = ROOT / "outputs"


def quickstart(name, *overrides):
    """Four controlled steps, with a checkpoint after the second; the metrics of each step."""
    shutil.rmtree(OUTPUTS / name, ignore_errors=True)
    environment = {**os.environ, "VENV": sys.prefix, "OUT": name, "STEPS": "4", "KL_BUDGET": "1e-3"}
    done = subprocess.run(
        [
            "bash",
            ROOT / "recipes/quickstart/run.sh",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            *overrides,
        ],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {record["step"]: record["data"] for record in read_metrics(OUTPUTS / name)}


@pytest.mark.verl
@pytest.mark.timeout(900)
def test_a_resumed_quickstart_continues_bit_for_bit():
    """Weights, moments, update counts, controller, schedule, random states: whatever differed would show in these."""
    whole = quickstart("test-whole", "trainer.save_freq=2")
    checkpoint = OUTPUTS / "test-whole/checkpoints/global_step_2"
    resumed = quickstart("test-resumed", "trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}")
    assert sorted(resumed) == [3, 4]
    for step in (3, 4):
        compared = [
            name
            for name in whole[step]
            if name.startswith(("actor/", "critic/", "response_length/", "rollout_corr/"))
            and not name.startswith(("actor/perf/", "actor/logra_control_share"))
        ]
        assert {"actor/grad_norm", "actor/logra_realized_kl", "critic/score/mean"} <= set(compared)
        assert {name: resumed[step][name] for name in compared} == {name: whole[step][name] for name in compared}
    for name in ("test-whole", "test-resumed"):
        shutil.rmtree(OUTPUTS / name)
