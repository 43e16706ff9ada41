"""The tool: a calculator for one product, in the form in which verl loads function tools."""

import re

from verl.tools.function_tool import function_tool


@function_tool("calc")
def calculate(e: str) -> str:
    """Calculates a product.

    Args:
        e: two numbers with a star between them, such as 17*24
    """
    match = re.fullmatch(r"(\d{1,4})\*(\d{1,4})", e)
    # The model reads this and may try again; raising would put a traceback into its context.
    return str(int(match[1]) * int(match[2])) if match else "error"
