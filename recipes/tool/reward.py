"""The reward of the tool recipe: 1 if the last turn is the right number and nothing else, 0 otherwise."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """verl's ``custom_reward_function`` interface. The text holds every turn, tool results included, without special
    tokens; a turn of the assistant begins with "a:", except the first, whose header belongs to the prompt."""
    return float(solution_str.rpartition("a:")[2].strip() == ground_truth)
