"""Checks the patches in this folder against the installed verl, as ``check.sh`` says. Prints a table."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PINNED = "0.9.1"
"""Version of verl that the patches are written against."""
TITLE = re.compile(r"^Subject: \[PATCH\] (\[[a-z_, ]+\] (?:feat|fix|refactor|chore|test): .+)$", re.MULTILINE)
"""What verl demands of the title of a pull request."""
CONFTEST = """\
import pathlib, verl
tree = pathlib.Path(__file__).parent
assert pathlib.Path(verl.__file__).is_relative_to(tree), f"{verl.__file__} is not the patched verl in {tree}"
"""


@dataclass(frozen=True, kw_only=True)
class Patch:
    path: Path
    text: str

    @property
    def tests(self) -> list[str]:
        return re.findall(r"^\+\+\+ b/(tests/\S+\.py)$", self.text, re.MULTILINE)

    def problem(self) -> str:
        """What is wrong with the file itself; "" if nothing is."""
        if not TITLE.search(re.sub(r"\n (?=\S)", " ", self.text)):
            return "its subject is not '[module] type: description'"
        if not self.tests:
            return "it adds no test"
        wrong = [test for test in self.tests if not re.fullmatch(r"tests/\w+/.*test_\w+_on_cpu\.py", test)]
        return f"{wrong} is not named tests/<part of verl>/test_*_on_cpu.py" if wrong else ""


def git(tree: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=check", "-c", "user.email=check@localhost", "-c", "core.autocrlf=false"]
    done = subprocess.run(["git", *identity, *arguments], cwd=tree, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(arguments[:2])}: {done.stderr.strip()}")


def make_source(folder: Path) -> Path:
    """A git repository with the installed verl's files in it.

    Raises:
        SystemExit: another version is installed.
    """
    version = importlib.metadata.version("verl")
    if version != PINNED:
        raise SystemExit(f"verl {version} is installed, the patches are for {PINNED}: pip install verl=={PINNED}")
    spec = importlib.util.find_spec("verl")
    assert spec is not None and spec.origin is not None
    source = folder / "source"
    shutil.copytree(Path(spec.origin).parent, source / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    git(source, "init", "-q")
    git(source, "add", "-A")
    git(source, "commit", "-qm", f"verl {version}")
    return source


def apply(source: Path, tree: Path, patches: Iterable[Patch]) -> None:
    """Puts ``source`` with ``patches`` applied in order into the new folder ``tree``."""
    git(source, "worktree", "add", "-q", "--detach", str(tree))
    for patch in patches:
        git(tree, "apply", "--check", "--whitespace=error-all", str(patch.path))
        git(tree, "apply", str(patch.path))


def run_tests(tree: Path, tests: list[str]) -> dict[str, dict[str, str]]:
    """Runs tests on the verl in ``tree``: file -> test -> "passed", or else what happened."""
    (tree / "conftest.py").write_text(CONFTEST)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    environment |= {"PYTHONPATH": str(tree), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    options = ["-q", "--tb=native", "-c", os.devnull, f"--rootdir={tree}", "-p", "no:cacheprovider"]
    options.append("--import-mode=importlib")
    report = tree / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-o", "junit_family=xunit1", f"--junit-xml={report}", *tests],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode not in (0, 1):  # 1: tests ran and some failed
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    results: dict[str, dict[str, str]] = {test: {} for test in tests}
    for case in ElementTree.parse(report).iter("testcase"):
        reasons = (f"{child.tag}: {child.get('message')}" for child in case if child.tag != "properties")
        outcome = next(reasons, "passed")
        if "file" not in case.attrib:  # a test file that cannot be imported
            raise RuntimeError(f"{case.attrib['name']} {outcome}\n{done.stdout[-4000:]}")
        results[case.attrib["file"]][case.attrib["name"]] = outcome
    return results


def not_passed(results: dict[str, str]) -> list[str]:
    return [f"{name} {outcome}" for name, outcome in results.items() if outcome != "passed"]


def main(numbers: list[str]) -> int:
    """Checks the patches with these numbers, all without any; returns how many have a problem."""
    folder = Path(__file__).resolve().parent
    files = sorted(folder.glob("[0-9]*.patch"))
    if numbers:
        files = [file for file in files if file.name.split("-")[0].lstrip("0") in {n.lstrip("0") for n in numbers}]
    patches = [Patch(path=file, text=file.read_text()) for file in files]
    if not patches:
        raise SystemExit(f"no patches {' '.join(numbers)} in {folder}")

    with tempfile.TemporaryDirectory(prefix="verl-patches-") as temporary:
        source = make_source(Path(temporary))
        trees = [Path(temporary) / patch.path.stem for patch in patches]
        alone: dict[Path, dict[str, str] | str] = {}
        for patch, tree in zip(patches, trees, strict=True):
            try:
                apply(source, tree, [patch])
            except RuntimeError as error:
                alone[patch.path] = str(error)
        together, without = Path(temporary) / "all", Path(temporary) / "none"
        apply(source, together, patches)
        # The unpatched source with all tests in it: reasons for them to fail are the ones to be fixed.
        apply(source, without, [])
        for patch in patches:
            git(without, "apply", "--include=tests/*", str(patch.path))

        def check_alone(patch: Patch, tree: Path) -> None:
            if patch.path not in alone:
                results = run_tests(tree, patch.tests)
                alone[patch.path] = {name: o for tests in results.values() for name, o in tests.items()}

        tests = [test for patch in patches for test in patch.tests]
        with ThreadPoolExecutor(2) as pool:
            all_results, base_results = pool.map(lambda tree: run_tests(tree, tests), (together, without))
            list(pool.map(check_alone, patches, trees))

    print(f"\nverl {PINNED}\n{'patch':52} {'applies':8} {'alone':8} {'in order':9} without it")
    num_bad = 0
    for patch in patches:
        mine = alone[patch.path]
        problems = [patch.problem()] if patch.problem() else []
        if isinstance(mine, str):
            problems.append(mine)
            mine = {}
        in_order = {name: o for test in patch.tests for name, o in all_results[test].items()}
        base = {name: o for test in patch.tests for name, o in base_results[test].items()}
        problems += not_passed(mine) + [f"in order: {p}" for p in not_passed(in_order)]
        for test in patch.tests:
            if not any(o.startswith(("failure", "error")) for o in base_results[test].values()):
                problems.append(f"{test} passes without the patch")
            if base_results[test].keys() != all_results[test].keys():
                problems.append(f"{test} cannot be collected without the patch: that shows nothing about its tests")
        print(
            f"{patch.path.stem:52} {'yes' if mine else 'NO':8} "
            f"{len(mine) - len(not_passed(mine))}/{len(mine):<6} "
            f"{len(in_order) - len(not_passed(in_order))}/{len(in_order):<7} "
            f"{len(not_passed(base))} of {len(base)} fail"
        )
        for problem in problems:
            print(f"    {problem}")
        num_bad += bool(problems)
    print("all patches hold" if not num_bad else f"{num_bad} patches have a problem")
    return num_bad


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
