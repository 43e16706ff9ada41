"""DAPO-Math-17k to verl's parquet; AIME, which it is measured with, is kept out of it.

    python -m recipes.data.dapo_math OUT --against AIME/test.parquet [--train dapo-math-17k.parquet]

Records already are verl rows: ``prompt`` with the question inside DAPO's template, ``reward_model.ground_truth``. The
published file has 1.8 million rows, each question about a hundred times; one of each is kept. The question is taken out
of its template and put into ours; ``--template answer_line`` is DAPO's own, for verl's own scorer
(``reward_score.math_dapo``), which rewards with 1 and -1.
"""

from recipes.data.convert import Dataset, Source, main
from recipes.data.load import Record
from recipes.data.problems import TEMPLATES, Problem, require

BEFORE, AFTER = (part.strip() for part in TEMPLATES["answer_line"].split("{question}"))


def problem(record: Record, where: str) -> Problem:
    prompt, reward_model = require(record, "prompt", "reward_model", where=where)
    if not isinstance(prompt, list) or len(prompt) != 1 or not isinstance(prompt[0], dict):
        raise ValueError(f"{where}: the prompt is not one chat message: {prompt!r:.80}")
    (content,) = require(prompt[0], "content", where=f"{where}, prompt")
    (answer,) = require(reward_model, "ground_truth", where=f"{where}, reward_model")
    content = content.strip()
    if not (content.startswith(BEFORE) and content.endswith(AFTER)):
        raise ValueError(f"{where}: the prompt is not in DAPO's template: {content[:80]!r}...")
    question = content.removeprefix(BEFORE).removesuffix(AFTER).strip()
    return Problem(question=question, answer=str(answer).strip(), data_source="math_dapo")


DATASET = Dataset(problem=problem, train=[Source(name="BytedTsinghua-SIA/DAPO-Math-17k")])

if __name__ == "__main__":
    main(DATASET, __doc__)
