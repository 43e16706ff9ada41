r"""MATH to verl's parquet, with MATH-500 held out.

    python -m recipes.data.hendrycks_math OUT [--train MATH/train MATH/test ...] [--test math500.jsonl]

Records have ``problem`` and ``solution``; the answer is the last ``\boxed{...}`` of the solution, or the field
``answer`` where there is one (MATH-500). The authors' folders of one JSON file per problem are read as they are. The
usual training set is all 12,500 problems without the 500 that are held out. verl's own scorer
(``reward_score.math_reward``) fits the template ``boxed`` as well.
"""

from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

from recipes.data.convert import Dataset, Source, main
from recipes.data.load import Record
from recipes.data.problems import Problem, require


def problem(record: Record, where: str) -> Problem:
    question, solution = require(record, "problem", "solution", where=where)
    answer = record.get("answer")
    if not answer:
        boxed = last_boxed_only_string(solution.replace("\\fbox{", "\\boxed{"))  # both are published
        if boxed is None:
            raise ValueError(f"{where}: the solution has no \\boxed{{...}}: ...{solution[-60:]!r}")
        answer = remove_boxed(boxed)
    extra = {"level": str(record.get("level", "")), "subject": record.get("subject") or record.get("type") or ""}
    source = "HuggingFaceH4/MATH-500" if "unique_id" in record else "DigitalLearningGmbH/MATH-lighteval"
    return Problem(question=question.strip(), answer=answer.strip(), data_source=source, extra=extra)


DATASET = Dataset(
    problem=problem,
    train=[Source(name="DigitalLearningGmbH/MATH-lighteval", split=split) for split in ("train", "test")],
    test=[Source(name="HuggingFaceH4/MATH-500", split="test")],
)

if __name__ == "__main__":
    main(DATASET, __doc__)
