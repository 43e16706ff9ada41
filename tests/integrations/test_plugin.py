"""What ``import verl`` makes of the plugin, each in a process of its own."""

import os
import subprocess
import sys

import pytest

PRELUDE = "import sys, warnings; warnings.simplefilter('ignore')\n"


def python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def test_verl_finds_the_plugin_and_stays_light():
    code, out, err = python(
        "import verl\n"
        "assert 'verl_logra.integrations.plugin' in sys.modules\n"
        "assert 'verl.workers.engine' not in sys.modules and 'verl_logra.optimizer' not in sys.modules\n"
        "from verl.workers.engine import EngineRegistry\n"
        "for model_type in ('language_model', 'value_model'):\n"
        "    for backend in ('fsdp', 'fsdp2'):\n"
        "        print(EngineRegistry.get_engine_cls(model_type, backend).__name__)\n",
        VERL_PLATFORM="cpu",
    )
    assert code == 0, err
    assert out.split() == [
        "RefusingEngine_CPUEngineWithLMHead",
        "LoGRAEngine_CPUEngineWithLMHead",
        "RefusingEngine_CPUEngineWithValueHead",
        "LoGRAEngine_CPUEngineWithValueHead",
    ]


@pytest.mark.parametrize("platform", ["nvidia", "amd"])
def test_engines_of_accelerators_are_taken_over(platform):
    """Registration needs no accelerator; ROCm comes to verl as the device cuda of another vendor."""
    code, out, err = python(
        "from verl.workers.engine import EngineRegistry\n"
        "print(EngineRegistry.get_engine_cls('language_model', 'fsdp2').__name__)\n",
        VERL_PLATFORM=platform,
    )
    assert code == 0, err
    assert out.split() == ["LoGRAEngine_FSDPEngineWithLMHead"]


def test_nothing_is_done_about_the_cpu_unless_asked():
    code, _, err = python(
        "import verl\n"
        "from verl.plugin.platform import PlatformRegistry\n"
        "assert 'cpu' not in PlatformRegistry.registered_names()\n"
        "assert not [m for m in sys.modules if m.startswith('verl_logra.cpu')]\n",
        VERL_PLATFORM="",
    )
    assert code == 0, err


def test_a_plugin_that_cannot_register_is_heard():
    """verl hides import errors of plugins at DEBUG; ours are printed, and the optimizer refuses to run without it."""
    code, out, err = python(
        "sys.modules['verl_logra.integrations.when_imported'] = None  # as a broken installation\n"
        "import verl, torch\n"
        "from verl.workers.config import FSDPOptimizerConfig\n"
        "from verl.workers.config.optimizer import build_optimizer\n"
        "config = FSDPOptimizerConfig(lr=1e-6, optimizer='LoGRA', optimizer_impl='verl_logra')\n"
        "try:\n"
        "    build_optimizer(torch.nn.Linear(2, 2).parameters(), config)\n"
        "except TypeError as error:\n"
        "    print(error)\n",
        VERL_PLATFORM="",
    )
    assert code == 0, err
    assert "verl_logra could not register with verl: LoGRA is not available in this process" in err
    assert "LoGRA needs the model, not its parameters" in out and "strategy=fsdp2" in out


def test_an_error_while_registering_engines_reaches_who_needs_them():
    code, _, err = python(
        "sys.modules['verl_logra.integrations.engine'] = None\nimport verl\nimport verl.workers.engine\n",
        VERL_PLATFORM="cpu",
    )
    assert code != 0 and "import of verl_logra.integrations.engine halted" in err


def test_when_imported_runs_after_the_module():
    code, out, err = python(
        "from verl_logra.integrations.when_imported import when_imported\n"
        "assert 'colorsys' not in sys.modules\n"
        "when_imported('colorsys', lambda module: print('late', module.rgb_to_hsv(0, 0, 0)))\n"
        "import colorsys\n"
        "when_imported('colorsys', lambda module: print('at once', module is colorsys))\n"
        "import importlib; importlib.reload(colorsys)\n",
    )
    assert code == 0, err
    assert out.splitlines() == ["late (0.0, 0.0, 0)", "at once True"]
