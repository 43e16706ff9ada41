"""The reward of the SmolLM2 recipe: 1 if math-verify finds the answer equal to the true one, 0 otherwise."""

from typing import Any

from math_verify import parse, verify


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """verl's ``custom_reward_function`` interface. The answer may stand in a sentence, a box or an equation."""
    # math-verify's own time limits are signals, which work in a main thread only; verl calls this from another.
    answer = parse(solution_str, parsing_timeout=None)
    return float(verify(parse(ground_truth, parsing_timeout=None), answer, timeout_seconds=None))
