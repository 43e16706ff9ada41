"""The command line that all converters share.

    python -m recipes.data.gsm8k OUT [--train SOURCE] [--test SOURCE] [--against FILE ...] [--template NAME]

OUT gets ``train.parquet`` and/or ``test.parquet`` in verl's format and ``counts.json``. Training questions that occur
in the test set of the same call, or in a file named by ``--against``, are left out.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recipes.data.load import Record, SourceError, records
from recipes.data.problems import TEMPLATES, Counts, Problem, deduplicated, questions_of, write


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set on the Hugging Face hub; a local source of the same format may take its place."""

    name: str
    subset: str | None = None
    split: str = "train"

    def __str__(self) -> str:
        return ":".join(filter(None, (self.name, self.subset, self.split)))


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What one converter knows."""

    problem: Callable[[Record, str], Problem]
    """Reads one record; the text says where it stands, for errors."""
    train: Sequence[Source] = ()
    test: Sequence[Source] = ()
    template: str = "boxed"


def read(dataset: Dataset, given: list[str] | None, usual: Sequence[Source]) -> Iterable[Problem]:
    """The problems of the given sources, or else of the usual ones."""
    for source in [Source(name=name) for name in given] if given else usual:
        for number, record in enumerate(records(source.name, subset=source.subset, split=source.split), start=1):
            yield dataset.problem(record, f"{source.name}, record {number}")


def convert(
    dataset: Dataset,
    out: Path,
    *,
    train: list[str] | None = None,
    test: list[str] | None = None,
    against: Sequence[str] = (),
    template: str | None = None,
) -> dict[str, Counts]:
    """Writes the files and returns what became of the records, by split.

    Raises:
        SourceError, ValueError: a source cannot be read, a record is not of the set's format, or nothing is left.
    """
    template = template or dataset.template
    held_out = [question for path in against for question in questions_of(path)]
    counts = {}
    if test or dataset.test:
        problems, counts["test"] = deduplicated(read(dataset, test, dataset.test))
        write(problems, out / "test.parquet", split="test", template=template)
        held_out += [problem.question for problem in problems]
    if train or dataset.train:
        problems, counts["train"] = deduplicated(read(dataset, train, dataset.train), held_out)
        write(problems, out / "train.parquet", split="train", template=template)
    (out / "counts.json").write_text(json.dumps({name: asdict(c) for name, c in counts.items()}, indent=2) + "\n")
    return counts


def main(dataset: Dataset, description: str | None) -> None:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for train.parquet, test.parquet and counts.json")
    for name in ("train", "test"):
        usual: Sequence[Source] = getattr(dataset, name)
        if usual:
            text = f"files, folders or Hugging Face ids in place of {', '.join(map(str, usual))}"
            parser.add_argument(f"--{name}", nargs="+", metavar="SOURCE", help=text)
        else:
            parser.set_defaults(**{name: None})
    text = "parquet files of these converters: their questions are left out of the training set"
    parser.add_argument("--against", nargs="+", default=[], metavar="FILE", help=text)
    parser.add_argument("--template", choices=TEMPLATES, default=dataset.template, help="of the prompt (%(default)s)")
    arguments = parser.parse_args()
    try:
        counts = convert(dataset, **vars(arguments))
    except (SourceError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    for split, c in counts.items():
        print(
            f"{arguments.out / split}.parquet: {c.written} of {c.read} problems; left out {c.repeated} repeated, "
            f"{c.contradictory} with contradictory answers, {c.held_out} that are in a test set"
        )
