import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from verl_logra.integrations.sync_settings import SyncSettings, sync_settings


def engine(backend="naive", **engine_kwargs):
    return SimpleNamespace(backend=backend, engine_kwargs=engine_kwargs)


def test_one_key_switches_the_sync_on():
    assert sync_settings(engine()) is None
    assert sync_settings(engine("nccl", nccl={})) is None
    assert sync_settings(engine("logra")) == SyncSettings()
    assert sync_settings(engine(logra={"enable": True})) == SyncSettings()
    assert sync_settings(engine("logra", logra={"low_half": "device"})) == SyncSettings(low_half="device")
    assert sync_settings(engine("logra", logra={"enable": False})) is None


@pytest.mark.parametrize(
    "values, message",
    [
        ({"lowhalf": "host"}, "did you mean 'low_half'"),
        ({"low_half": "disk"}, "low_half='disk' is not one of 'host', 'device', 'fp32'"),
        ({"full_sync_interval": 0}, "full_sync_interval=0"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
        ({"max_updates": 0}, "max_updates=0"),
    ],
)
def test_wrong_settings_are_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        sync_settings(engine("logra", logra=values))


def test_warnings_are_written_once_whatever_became_of_the_root_logger():
    """As in a worker where a package has turned the root logger down to errors, and where none has."""
    script = """
import logging, sys
from verl_logra.integrations.log_lines import show_log_lines
logging.basicConfig(level=logging.WARNING)
show_log_lines(); show_log_lines()
logger = logging.getLogger("verl_logra.sync.session")
logger.warning("before")
logging.root.setLevel(logging.ERROR)
logging.root.handlers[0].setLevel(logging.ERROR)
logger.warning("after")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ))
    assert run.stderr.count("before") == 1 and run.stderr.count("after") == 1, run.stderr
    assert logging.getLogger("verl_logra").propagate
