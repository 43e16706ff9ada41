"""Who may import whom, and what an import costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "verl_logra"
LAYERS = {
    # top-level part of the package: parts and foreign packages it may import
    "core": {"core", "torch", "jaxtyping"},
    "config": set(),
    "sketch": {"core", "config", "torch", "jaxtyping"},
    "sharding": {"torch"},
    "proposal": {"torch"},
    "rest": {"sharding", "torch"},
    "optimizer": {"core", "config", "proposal", "rest", "sharding", "sketch", "torch"},
    "exact_forward": {"torch"},
    "blockwise_attention": {"torch", "transformers"},
    "probe": {"blockwise_attention", "core", "sketch", "exact_forward", "torch", "jaxtyping"},
    "controller": {"core", "config", "optimizer", "probe", "torch"},
    "sync": {"sync", "core", "sharding", "torch", "jaxtyping", "numpy"},
    "planner": {"planner", "matplotlib"},
    "cli": {"planner"},
    "cpu": {"cpu", "torch", "verl", "vllm", "transformers", "psutil"},
}


def imported(path):
    """Dotted names that a file imports, in functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


def part_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("part", LAYERS)
def test_arrows_point_one_way(part):
    files = [path for path in PACKAGE.rglob("*.py") if part_of(path) == part]
    assert files
    for path in files:
        for name in imported(path):
            root = name.partition(".")[0]
            if root in sys.stdlib_module_names:
                continue
            target = name.split(".")[1] if root == "verl_logra" else root
            assert target in LAYERS[part], f"{path.relative_to(PACKAGE)} imports {name}"


def test_every_part_has_a_layer():
    parts = {part_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "integrations"}
    assert parts == set(LAYERS)


def test_import_is_light():
    """No torch, and so well under the time that importing torch takes."""
    code = "import sys, verl_logra; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "verl_logra" in loaded
    assert not {"torch", "verl", "vllm", "ray", "transformers", "jaxtyping"} & set(loaded)


def test_an_unknown_name_says_which_there_are():
    import verl_logra

    with pytest.raises(AttributeError, match="no attribute 'Logra'; it has KLConfig, LoGRA, LoGRAConfig, install"):
        verl_logra.Logra  # noqa: B018
