"""The SmolLM2 recipe's questions and reward."""

import re
import threading

import pytest

pytest.importorskip("reasoning_gym")
pytest.importorskip("math_verify")

from recipes.smollm2.questions import INSTRUCTION, questions, without
from recipes.smollm2.reward import compute_score


def test_ground_truth_is_what_the_question_asks_for() -> None:
    for row in questions("train", count=100, seed=5):
        text = row["prompt"][0]["content"]
        assert text.endswith(INSTRUCTION)
        expression = re.search(r"[\d+\- ]+(?= =)", text.replace(INSTRUCTION, "") + " =")
        assert expression is not None
        terms = re.findall(r"[+-]?\d+", expression.group().replace(" ", ""))
        assert sum(map(int, terms)) == int(row["reward_model"]["ground_truth"]), text


def test_held_out_expressions_are_not_trained() -> None:
    held_out = questions("held_out", count=32, seed=1)
    train = questions("train", count=2048, seed=0)
    kept = without(train, held_out)
    asked = {row["extra_info"]["expression"] for row in held_out}
    assert not asked & {row["extra_info"]["expression"] for row in kept}
    assert len(train) - len(kept) < 200, "nearly all questions remain"


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("57", 1.0),
        ("The answer is 57.", 1.0),
        ("23 + 34 = 57", 1.0),
        (r"\boxed{57}", 1.0),
        ("$57$", 1.0),
        ("57.0", 1.0),
        ("75", 0.0),
        ("-57", 0.0),
        ("The answer is fifty.", 0.0),
        ("", 0.0),
    ],
)
def test_reward_accepts_the_right_value_in_any_form(answer: str, score: float) -> None:
    assert compute_score("chain_sum", answer, "57") == score


def test_reward_works_in_a_thread_where_verl_calls_it() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(compute_score("chain_sum", "-4", "-4")))
    thread.start()
    thread.join()
    assert scores == [1.0]
