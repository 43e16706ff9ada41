"""Problems with a short answer, and how they become verl's rows.

A row has ``data_source``, ``prompt`` (one user message), ``ability``, ``reward_model`` and ``extra_info``; the bare
question stays in ``extra_info`` so that other sets can be checked against it, and so does the name of the prompt's
template, which tells the reward where the answer stands.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from recipes.data.load import Record

TEMPLATES = {
    # Qwen2.5-Math's own wording.
    "boxed": "{question}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    # DAPO's: verl's scorer for its data, math_dapo, looks for this line.
    "answer_line": (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\n"
        'Remember to put your answer on its own line after "Answer:".'
    ),
    # verl's for GSM8K; its strict scorer looks for the four hashes.
    "hashes": '{question} Let\'s think step by step and output the final answer after "####".',
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question in words and LaTeX, and its answer."""

    question: str
    answer: str
    data_source: str
    """What verl's own scorers choose by."""
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class Counts:
    """What became of the problems that were read."""

    read: int = 0
    repeated: int = 0
    """The same question with the same answer once more: one is kept."""
    contradictory: int = 0
    """Copies of questions that come with different answers: none is kept."""
    held_out: int = 0
    """Copies of questions that are in a test set: none is kept."""
    written: int = 0


def require(record: Record, *names: str, where: str) -> list[Any]:
    """The named fields of a record.

    Raises:
        ValueError: one is missing or empty; the text names it and those that there are.
    """
    for name in names:
        if record.get(name) in (None, ""):
            raise ValueError(f"{where}: field {name!r} is missing or empty; the record has {sorted(record)}")
    return [record[name] for name in names]


_SPACING = re.compile(r"\\[,;:! ]|\\q?quad\b|\\left\b|\\right\b|\\displaystyle\b|~|\$|\s+")


def normalised(question: str) -> str:
    """Equal for two copies of a question that differ in typesetting only: spaces, dollars, sizes, case, last dot."""
    text = unicodedata.normalize("NFKC", question).casefold()
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    return _SPACING.sub("", text).rstrip(".?!:")


def deduplicated(problems: Iterable[Problem], held_out: Iterable[str] = ()) -> tuple[list[Problem], Counts]:
    """One problem per question, in the order of first appearance, none of them a ``held_out`` question."""
    test = {normalised(question) for question in held_out}
    first: dict[str, Problem] = {}
    contradicted: dict[str, int] = {}  # copies so far
    copies: dict[str, int] = {}
    counts = Counts()
    for problem in problems:
        counts.read += 1
        key = normalised(problem.question)
        if key in test:
            counts.held_out += 1
        elif key in contradicted:
            counts.contradictory += 1
        elif key not in first:
            first[key], copies[key] = problem, 1
        elif normalised(first[key].answer) == normalised(problem.answer):
            copies[key] += 1
            counts.repeated += 1
        else:
            contradicted[key] = 1
            counts.contradictory += copies[key] + 1
            counts.repeated -= copies[key] - 1
            del first[key]
    counts.written = len(first)
    return list(first.values()), counts


def row(problem: Problem, *, split: str, index: int, template: str) -> dict[str, Any]:
    """A row of verl's RL data format."""
    return {
        "data_source": problem.data_source,
        "prompt": [{"role": "user", "content": TEMPLATES[template].format(question=problem.question)}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": problem.answer},
        "extra_info": {
            "split": split,
            "index": index,
            "question": problem.question,
            "template": template,
            **problem.extra,
        },
    }


def write(problems: list[Problem], path: Path, *, split: str, template: str) -> None:
    """Writes verl's parquet; an empty set is refused, since verl would only fail much later."""
    if not problems:
        raise ValueError(f"nothing is left for {path}: every problem was a duplicate or in a test set")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row(problem, split=split, index=i, template=template) for i, problem in enumerate(problems)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def questions_of(path: str) -> Iterator[str]:
    """The bare questions of a file that ``write`` made."""
    try:
        rows = pyarrow.parquet.read_table(path, columns=["extra_info"]).to_pylist()
        questions = [row["extra_info"]["question"] for row in rows]
    except (pyarrow.ArrowInvalid, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no test set that these converters wrote: {error!r}") from error
    yield from questions
