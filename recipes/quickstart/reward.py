"""The reward of the quickstart: 1 for the right number and nothing else, 0 otherwise."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """verl's ``custom_reward_function`` interface; with rewards of 0 and 1 their mean is the accuracy."""
    return float(solution_str.strip() == ground_truth)
