"""Products that a tiny model cannot do in its head, as word questions."""

import random
from dataclasses import dataclass

TEMPLATES = (
    "{a} boxes of {b} {things}?",
    "{a} times {b}?",
    "{name} packs {b} {things} {a} times. Sum?",
    "{a} rows, {b} {things} each?",
)
NUM_CLEAR = 2
"""The first templates; in the warm-up, questions in the later ones are mostly answered without the tool."""
NAMES = ("Ada", "Ben", "Eva", "Kim", "Lea", "Max", "Sam", "Tom")
THINGS = ("cards", "coins", "eggs", "figs", "keys", "nuts", "pens", "pins")
FACTORS = range(12, 100)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question, its one right answer, and the call that gives it."""

    text: str
    answer: str
    expression: str
    template: int


def split_pairs(num_held_out: int, seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs of factors as two disjoint lists, in random order: for training, and ``num_held_out`` held out."""
    pairs = [(a, b) for a in FACTORS for b in FACTORS]
    if not 0 < num_held_out < len(pairs):
        raise ValueError(f"num_held_out must be between 1 and {len(pairs) - 1}, got {num_held_out}")
    random.Random(seed).shuffle(pairs)
    return pairs[num_held_out:], pairs[:num_held_out]


def ask(pair: tuple[int, int], rng: random.Random) -> Question:
    """The pair under a random template, name and thing."""
    a, b = pair
    template = rng.randrange(len(TEMPLATES))
    text = TEMPLATES[template].format(a=a, b=b, name=rng.choice(NAMES), things=rng.choice(THINGS))
    return Question(text=text, answer=str(a * b), expression=f"{a}*{b}", template=template)
