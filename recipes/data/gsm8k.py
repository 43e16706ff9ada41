"""GSM8K to verl's parquet.

    python -m recipes.data.gsm8k OUT [--train train.jsonl] [--test test.jsonl]

Records have ``question`` and ``answer``; the answer is a worked solution whose last line is ``#### 18``. With
``--template hashes`` verl's own scorer (``reward_score.gsm8k``) fits as well, without a custom reward function.
"""

import re

from recipes.data.convert import Dataset, Source, main
from recipes.data.load import Record
from recipes.data.problems import Problem, require


def problem(record: Record, where: str) -> Problem:
    question, answer = require(record, "question", "answer", where=where)
    found = re.search(r"####\s*(.+?)\s*$", answer)
    if found is None:
        raise ValueError(f"{where}: the answer does not end with '#### NUMBER': ...{answer[-60:]!r}")
    return Problem(question=question.strip(), answer=found[1].replace(",", ""), data_source="openai/gsm8k")


DATASET = Dataset(
    problem=problem,
    train=[Source(name="openai/gsm8k", subset="main", split="train")],
    test=[Source(name="openai/gsm8k", subset="main", split="test")],
)

if __name__ == "__main__":
    main(DATASET, __doc__)
