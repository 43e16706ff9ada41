"""Arithmetic word questions: templates, and a split in which no held-out sum is ever seen in training.

A question is a template (addition or subtraction, a name, a thing) filled with two numbers. The split is made on the
triple (operation, a, b), not on the text: a held-out triple appears under no template in training.
"""

import random
from dataclasses import dataclass

NAMES = ("Ada", "Ben", "Eva", "Kim", "Lea", "Max", "Sam", "Tom")
THINGS = ("apples", "books", "cards", "coins", "eggs", "nuts", "pens", "stamps")
TEMPLATES = {
    "add": (
        "{name} has {a} {things} and gets {b} more. How many now?",
        "{name} found {a} {things}, then {b} others. How many in all?",
        "There are {a} {things} here and {b} there. How many together?",
    ),
    "subtract": (
        "{name} has {a} {things} and gives {b} away. How many are left?",
        "{name} had {a} {things} but lost {b}. How many remain?",
        "Of {a} {things}, {name} sold {b}. How many are unsold?",
    ),
}
LARGE_NUMBERS = range(10, 40)
SMALL_NUMBERS = range(1, 10)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question and its one right answer."""

    text: str
    answer: str


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
    text = rng.choice(TEMPLATES[operation]).format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, b=b)
    return Question(text=text, answer=str(a + b if operation == "add" else a - b))
