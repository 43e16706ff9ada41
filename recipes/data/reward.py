r"""The reward of the math recipes: 1 if the answer equals the true one, 0 otherwise.

    reward.custom_reward_function.path=pkg://recipes.data.reward

Only an answer in the form that the prompt asks for counts (the last ``\boxed{...}``, the last ``Answer: ...`` line,
the last ``#### ...``), so numbers strewn over the text earn nothing. Whether two answers are equal is math-verify's
word, given in a process of its own: verl calls rewards from threads, where math-verify's time limits (signals) do not
work, and an answer such as ``9^{9^{9^9}}`` must cost seconds at most. A process that takes longer or dies is replaced.
"""

import atexit
import multiprocessing
import re
import threading
from concurrent.futures import TimeoutError
from typing import Any

from pebble import ProcessExpired, ProcessPool
from verl.utils.reward_score.math_dapo import last_boxed_only_string, remove_boxed

from recipes.data.equality import equal, prepare_process

SECONDS = 5.0
"""For one comparison; ordinary ones take milliseconds."""
NUM_PROCESSES = 2
"""Of each of verl's reward workers (``reward.num_workers``), about 150 MB each."""
LONGEST_ANSWER = 500
"""Characters; the longest true answer of MATH-500 has 159."""


def stated_answer(response: str, template: str) -> str | None:
    """What the response gives as its answer, in the form that the template asks for; None if it does not."""
    if template == "boxed":
        boxed = last_boxed_only_string(response)
        return None if boxed is None else remove_boxed(boxed).strip()
    if template not in ("answer_line", "hashes"):
        raise ValueError(f"extra_info.template={template!r} is none of boxed, answer_line, hashes")
    pattern = r"(?i)\banswer\s*:\s*([^\n]+)" if template == "answer_line" else r"####[ \t]*([^\n]+)"
    found = re.findall(pattern, response)
    return found[-1].strip().strip("$").strip() if found else None


_lock = threading.Lock()
_current: ProcessPool | None = None


def _pool() -> ProcessPool:
    """The processes; a new set if all of the last one died at once, which pebble gives up on."""
    global _current
    with _lock:
        if _current is None or not _current.active:
            # Not forked: the caller runs threads, and a fork copies their locks as they happen to stand.
            context = multiprocessing.get_context("spawn")
            _current = ProcessPool(max_workers=NUM_PROCESSES, initializer=prepare_process, context=context)
            atexit.register(_current.stop)
        return _current


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """verl's ``custom_reward_function`` interface.

    Returns ``score`` and ``acc`` (0 or 1), ``stated`` (whether there was an answer in the form asked for) and
    ``undecided`` (whether comparing failed or took too long; scored 0).
    """
    answer = stated_answer(solution_str, (extra_info or {}).get("template") or "boxed")
    correct = undecided = False
    if answer and len(answer) <= LONGEST_ANSWER:
        correct = answer == ground_truth.strip()
        if not correct:
            try:
                correct = _pool().schedule(equal, args=[answer, ground_truth], timeout=SECONDS).result()
            except (TimeoutError, ProcessExpired, MemoryError, RuntimeError):  # the last: recursion, or the pool broke
                undecided = True
    return {
        "score": float(correct),
        "acc": float(correct),
        "stated": float(answer is not None),
        "undecided": float(undecided),
    }
