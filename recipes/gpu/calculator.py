"""A calculator as a function tool of verl's agent loop: exact arithmetic on whole numbers, decimals and fractions.

    actor_rollout_ref.rollout.multi_turn.function_tool_path=recipes/gpu/calculator.py

The expression is a model's, so it is not given to ``eval``: it is parsed, only the operators and functions below are
known, and no number may outgrow a bound. What is wrong with an expression is the tool's answer: the model reads it.
"""

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from verl.tools.function_tool import function_tool

LONGEST = 300
"""Characters of an expression."""
MAX_BITS = 4096
"""Of the numerator and denominator of every number on the way."""


def _power(base: Fraction, exponent: Fraction) -> Fraction | float:
    size = max(abs(base.numerator), base.denominator).bit_length()
    if size * abs(exponent) > MAX_BITS:
        raise ValueError("a number is too large")
    power = base**exponent
    if isinstance(power, complex):
        raise ValueError("an even root of a negative number")
    return power


def _whole(value: Fraction) -> int:
    if value.denominator != 1 or abs(value) > 400:
        raise ValueError("factorial and comb want whole numbers up to 400")
    return int(value)


def _number(value: int | float, written: str) -> Fraction:
    """As it is written, so that 0.1 is a tenth; but 1e-999999999 would take for ever."""
    if isinstance(value, float) and not 1e-300 < abs(value) < 1e300:
        if value:
            raise ValueError("a number is too large or too small")
        return Fraction(0)
    return Fraction(written)


def _root(value: Fraction) -> Fraction | float:
    exact = Fraction(math.isqrt(abs(value.numerator)), math.isqrt(value.denominator))
    return exact if exact**2 == value else math.sqrt(value)


OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sqrt": _root,
    "abs": abs,
    "min": min,
    "max": max,
    "factorial": lambda n: math.factorial(_whole(n)),
    "comb": lambda n, k: math.comb(_whole(n), _whole(k)),
}


def _evaluate(node: ast.expr, source: str) -> Fraction:
    match node:
        case ast.Constant(value=(int() | float()) as number) if not isinstance(number, bool):
            value: Any = _number(number, ast.get_source_segment(source, node) or "0")
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_evaluate(left, source), _evaluate(right, source))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            value = OPERATORS[type(op)](_evaluate(operand, source))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            value = FUNCTIONS[name](*(_evaluate(argument, source) for argument in arguments))
        case _:
            raise ValueError(
                f"{ast.get_source_segment(source, node)!r} is not a number, one of + - * / // % **, or one of "
                f"{', '.join(FUNCTIONS)}"
            )
    value = Fraction(value)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("a number is too large")
    return value


def _written(value: Fraction) -> str:
    """A whole number, or a fraction with its decimals, 3/8 = 0.375."""
    if value.denominator == 1:
        return str(value.numerator)
    decimals = f"{float(value):.10g}"
    return f"{value} = {decimals}" if Fraction(decimals) == value else f"{value} ~ {decimals}"


@function_tool("calculator")
def calculator(expression: str) -> str:
    """Calculates an arithmetic expression exactly.

    Args:
        expression: numbers with + - * / // % ** and parentheses, sqrt, abs, min, max, factorial, comb; for example
            (3/8 + 1.5) * 16
    """
    try:
        if len(expression) > LONGEST:
            raise ValueError(f"the expression has more than {LONGEST} characters")
        source = expression.strip().replace("^", "**")
        return _written(_evaluate(ast.parse(source, mode="eval").body, source))
    except SyntaxError:
        return f"error: {expression} is not an expression"
    except (ValueError, ArithmeticError, TypeError, AttributeError, RecursionError) as error:
        return f"error: {error}"
