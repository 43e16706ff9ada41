"""The patches to verl apply, hold, and say truthfully what they would replace here."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATCHES = sorted((ROOT / "patches").glob("*.patch"))
README = (ROOT / "patches/README.md").read_text()


def names_in(path):
    """Functions, classes, methods and global variables of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_the_table_lists_every_patch_by_its_title():
    rows = re.findall(r"^\| \[(\d{4})\]\((\S+)\) `(\[.+?\] \w+)`", README, re.MULTILINE)
    assert [file for _, file, _ in rows] == [path.name for path in PATCHES]
    for (number, file, title), path in zip(rows, PATCHES, strict=True):
        assert file.startswith(number)
        assert f"Subject: [PATCH] {title}: " in path.read_text()


def test_what_the_table_calls_unnecessary_exists():
    named = [
        (path, name)
        for path, rest in re.findall(r"`(verl_logra/\S+\.py)`:? ?((?:[^|;]*?`\w+`)*)", README)
        for name in re.findall(r"`(\w+)`", rest)
    ]
    assert len(named) > 10
    assert not [(path, name) for path, name in named if name not in names_in(ROOT / path)]


@pytest.mark.timeout(900)
def test_every_patch_holds_alone_and_in_order_and_its_tests_fail_without_it():
    done = subprocess.run([sys.executable, ROOT / "patches/check.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" fail\n") == len(PATCHES)
