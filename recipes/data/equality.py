"""Whether two answers in LaTeX or plain text are the same; runs in processes of its own, see ``reward``."""

import logging
import resource

from math_verify import parse, verify

MEMORY = 2 << 30
"""Bytes that one process may use more than it does after its imports: some answers are numbers of that many digits."""


def prepare_process() -> None:
    """Called once in every process before it compares; the imports above are done by then."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # its time limits are off on purpose: the pool has one
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def equal(answer: str, truth: str) -> bool:
    r"""math-verify's verdict on the contents of two ``\boxed{...}``; what it cannot read is equal to nothing."""
    gold = parse(f"\\boxed{{{truth}}}", parsing_timeout=None)
    return bool(verify(gold, parse(f"\\boxed{{{answer}}}", parsing_timeout=None), timeout_seconds=None))
