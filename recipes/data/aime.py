"""AIME 2024 and 2025 to verl's parquet, for evaluation only.

    python -m recipes.data.aime OUT [--test SOURCE ...]

The usual sources are both years, 60 problems. Records have ``problem`` or ``question`` and ``answer``, in lower case or
capitals, or are verl rows in DAPO's template (BytedTsinghua-SIA/AIME-2024, each problem 32 times: one is kept; draw
several answers with ``rollout.val_kwargs.n`` instead). Answers are whole numbers from 0 to 999.
"""

from recipes.data import dapo_math
from recipes.data.convert import Dataset, Source, main
from recipes.data.load import Record
from recipes.data.problems import Problem, require


def problem(record: Record, where: str) -> Problem:
    if "reward_model" in record:
        dapo = dapo_math.problem(record, where)
        question, answer = dapo.question, dapo.answer
    else:
        fields = {name.lower(): value for name, value in record.items()}
        name = "question" if "question" in fields else "problem"
        question, answer = require(fields, name, "answer", where=where)
    answer = str(answer).strip().removesuffix("^\\circ")  # the one degree sign among the published answers
    if not (answer.isdecimal() and int(answer) <= 999):
        raise ValueError(f"{where}: {answer!r} is not a whole number from 0 to 999, as AIME's answers are")
    return Problem(question=question.strip(), answer=str(int(answer)), data_source="aime")


DATASET = Dataset(
    problem=problem,
    test=[
        Source(name="HuggingFaceH4/aime_2024"),
        *(Source(name="opencompass/AIME2025", subset=f"AIME2025-{part}", split="test") for part in ("I", "II")),
    ],
)

if __name__ == "__main__":
    main(DATASET, __doc__)
