"""Arithmetic questions from reasoning-gym, in verl's RL data format."""

from typing import Any

import reasoning_gym

DATASET = "chain_sum"
INSTRUCTION = "Answer with the number only."


def questions(split: str, *, count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` rows; a seed of reasoning-gym never gives the questions of another in the same order.

    Sums and differences of two or three numbers of one or two digits, which a model of 135M parameters sometimes gets.
    """
    data = reasoning_gym.create_dataset(
        DATASET, size=count, seed=seed, min_terms=2, max_terms=3, min_digits=1, max_digits=2
    )
    return [
        {
            "data_source": DATASET,
            "prompt": [{"role": "user", "content": f"{entry['question']} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
            "extra_info": {"split": split, "index": index, "expression": entry["metadata"]["expression"]},
        }
        for index, entry in enumerate(data)
    ]


def without(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows`` whose expression none of ``others`` asks for."""
    taken = {row["extra_info"]["expression"] for row in others}
    return [row for row in rows if row["extra_info"]["expression"] not in taken]
