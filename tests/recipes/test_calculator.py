"""The calculator tool, found and called through verl's own parts."""

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

TOOL = str(Path(__file__).parents[2] / "recipes" / "gpu" / "calculator.py")


@pytest.fixture(scope="module")
def tool() -> Any:
    from verl.tools.function_tool import load_function_tools_from_path

    (found,) = load_function_tools_from_path(TOOL)
    return found


def calculate(tool: Any, expression: str) -> str:
    return str(asyncio.run(tool.call({"expression": expression})))


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(3/8 + 1.5) * 16", "30"),
        ("0.1 + 0.2", "3/10 = 0.3"),
        ("1/3", "1/3 ~ 0.3333333333"),
        ("17 // 5 + -17 % 5", "6"),
        ("2^10", "1024"),
        ("2**-2", "1/4 = 0.25"),
        ("sqrt(9/4)", "3/2 = 1.5"),
        ("comb(10, 3) + factorial(5)", "240"),
        ("max(1, 2.5) - abs(-1)", "3/2 = 1.5"),
        ("2**200", str(2**200)),
        (" 1_000 * 2 ", "2000"),
        ("1e-999999999 + 1e3", "1000"),
        ("sqrt(10**1000) / 10**499", "10"),
    ],
)
def test_arithmetic_is_exact(tool: Any, expression: str, result: str) -> None:
    assert calculate(tool, expression) == result


def test_irrational_roots_are_close(tool: Any) -> None:
    assert abs(float(calculate(tool, "sqrt(2)").split("~")[-1].split("=")[-1]) - 2**0.5) < 1e-9


@pytest.mark.parametrize(
    "expression",
    ["1/0", "2 +", "__import__('os')", "().__class__", "x + 1", "9**9**9", "factorial(10**6)", "sqrt(-1)", "(-8)**0.5",
     "True + 1", "'a' * 3", "1e999", "min()", "sqrt(1, 2)", "(" * 200, "[1][0]", "lambda: 1", "1" * 301, "", "1j",
     "0**-1", "10**400 / 3", "sqrt(10**2001)", "1e-301", "9" * 299 + "!", "\x00"],
)  # fmt: skip
def test_what_it_cannot_do_is_an_answer_in_no_time(tool: Any, expression: str) -> None:
    start = time.monotonic()
    assert calculate(tool, expression).startswith("error: ")
    assert time.monotonic() - start < 2


def test_a_call_in_qwens_format_reaches_it_through_the_agent_loop(tool: Any) -> None:
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.experimental.agent_loop.tool_parser import ToolParser

    call = {"name": "calculator", "arguments": {"expression": "6*7"}}
    text = f"Let me see.<tool_call>\n{json.dumps(call)}\n</tool_call>"
    parser = ToolParser.get_tool_parser("hermes", SimpleNamespace(decode=lambda ids: "".join(map(chr, ids))))

    async def run() -> str:
        _, (parsed,) = await parser.extract_tool_calls(list(map(ord, text)))
        loop = SimpleNamespace(
            tools={"calculator": tool}, max_tool_response_length=256, tool_response_truncate_side="middle"
        )
        response, _, _ = await ToolAgentLoop._call_tool(loop, parsed, {}, SimpleNamespace())
        return str(response.text)

    assert asyncio.run(run()) == "42"
    schema = tool.tool_schema.model_dump(exclude_none=True)
    assert schema["function"]["parameters"]["required"] == ["expression"]
