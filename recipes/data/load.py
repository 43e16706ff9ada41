"""Records of a data set as its authors publish them, from local files or from the Hugging Face hub.

The only place that needs a network. A source is a file (.parquet, .jsonl, .json), a folder of such files, or the id of
a data set on the hub.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet

Record = dict[str, Any]
SUFFIXES = (".parquet", ".jsonl", ".json")


class SourceError(ValueError):
    """A source that cannot be read; the text says which and what to give instead."""


def records(source: str, *, subset: str | None = None, split: str = "train") -> Iterator[Record]:
    """One after another, so that a file of millions of rows never is in memory as a whole.

    ``subset`` and ``split`` are for the hub; a local file is read to its end.

    Raises:
        SourceError: the source does not exist, has no readable files or is not what its name says.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        if not files:
            raise SourceError(f"{source} has no {', '.join(SUFFIXES)} files")
        for file in files:
            yield from _file(file)
    elif path.exists():
        yield from _file(path)
    elif path.suffix in SUFFIXES or source.count("/") != 1 or source.startswith((".", "~", "/")):
        raise SourceError(f"{source} does not exist: give a file, a folder or a Hugging Face id such as openai/gsm8k")
    else:
        yield from _hub(source, subset, split)


def _file(path: Path) -> Iterator[Record]:
    try:
        if path.suffix == ".parquet":
            for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=4096):
                yield from batch.to_pylist()
        elif path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield _mapping(json.loads(line), f"line {number}")
        elif path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            for number, record in enumerate(content if isinstance(content, list) else [content], start=1):
                yield _mapping(record, f"record {number}")
        else:
            raise ValueError(f"it is none of {', '.join(SUFFIXES)}")
    except (ValueError, OSError) as error:  # pyarrow's and json's errors are ValueErrors
        raise SourceError(f"{path} cannot be read: {error}") from error


def _mapping(value: Any, where: str) -> Record:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {type(value).__name__}, not an object with named fields")
    return value


def _hub(name: str, subset: str | None, split: str) -> Iterator[Record]:
    import datasets

    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # a dozen kinds, from httpx to datasets' own
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        wanted = f"{name} (subset {subset}, split {split})" if subset else f"{name} (split {split})"
        raise SourceError(
            f"{wanted} could not be loaded from the Hugging Face hub: {type(error).__name__}: {reason}. Without a "
            f"network, download it elsewhere and give the file or folder in its place"
        ) from error
    yield from rows
