"""Arithmetic word questions: templates, and a split in which no held-out sum is ever seen in training.

A question is a template (addition or subtraction, a name, a thing) filled with two numbers. The split is made on the
triple (operation, a, b), not on the text: a held-out triple appears under no template in training.
"""

import random
from dataclasses import dataclass

NAMES = ("Ada", "Ben", "Eva", "Kim", "Lea", "Max", "Sam", "Tom")
THINGS = ("cards", "coins", "eggs", "figs", "keys", "nuts", "pens", "pins")
TEMPLATES = {
    "add": (
        "{name} has {a} {things}, gets {b}. Now?",
        "{a} {things} and {b} more?",
        "With {a}, add {b} {things}?",
        "{name} took {a}, then {b}?",
    ),
    "subtract": (
        "{name} has {a} {things}, loses {b}. Now?",
        "{a} {things} less {b}?",
        "Of {a} {things} sell {b}?",
        "{name} owns {a}, gives {b}?",
    ),
}
NUM_CLEAR = 2
"""The first templates of an operation; the warm-up mislabels questions in the later ones."""
LARGE_NUMBERS = range(10, 60)
SMALL_NUMBERS = range(1, 10)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question and its one right answer."""

    text: str
    answer: str
    triple: tuple[str, int, int]
    template: int


def split_triples(num_held_out: int, seed: int) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]:
    """All (operation, a, b) as two disjoint lists, in random order: for training, and ``num_held_out`` held out."""
    triples = [(operation, a, b) for operation in TEMPLATES for a in LARGE_NUMBERS for b in SMALL_NUMBERS]
    if not 0 < num_held_out < len(triples):
        raise ValueError(f"num_held_out must be between 1 and {len(triples) - 1}, got {num_held_out}")
    random.Random(seed).shuffle(triples)
    return triples[num_held_out:], triples[:num_held_out]


def ask(triple: tuple[str, int, int], rng: random.Random) -> Question:
    """The triple under a random template, name and thing."""
    operation, a, b = triple
    template = rng.randrange(len(TEMPLATES[operation]))
    text = TEMPLATES[operation][template].format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
    answer = str(a + b if operation == "add" else a - b)
    return Question(text=text, answer=answer, triple=triple, template=template)
