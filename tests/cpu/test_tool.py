"""The tool recipe: questions, calculator, reward, and the tokens of a conversation as verl's agent loop builds them."""

import asyncio
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pandas")
pytest.importorskip("verl")

from recipes.tool import prepare
from recipes.tool.questions import NUM_CLEAR, Question, ask, split_pairs
from recipes.tool.reward import compute_score

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def calculator() -> Any:
    """As verl loads it; a second import under another name would be refused."""
    from verl.tools.function_tool import load_function_tools_from_path

    (tool,) = load_function_tools_from_path(str(ROOT / "recipes/tool/calculator.py"))
    return tool


@pytest.fixture(scope="module")
def tokenizer() -> prepare.Qwen2Tokenizer:
    return prepare.build_tokenizer()


@pytest.fixture
def question() -> Question:
    return ask((23, 45), random.Random(0))


def test_answer_is_the_product_of_the_two_numbers_in_the_text(calculator: Any) -> None:
    rng = random.Random(0)
    train, held_out = split_pairs(100, seed=1)
    assert not set(train) & set(held_out)
    for pair in held_out + train[:500]:
        asked = ask(pair, rng)
        a, b = map(int, re.findall(r"\d+", asked.text))
        assert asked.answer == str(a * b) == calculator.fn(asked.expression)


@pytest.mark.parametrize("expression", ["", "23", "23*", "23+45", "__import__('os')", "9**9", "23*45*67", "99999*1"])
def test_calculator_answers_what_it_cannot_do_instead_of_raising(calculator: Any, expression: str) -> None:
    assert calculator.fn(expression) == "error"


def test_reward_looks_at_the_last_turn_only() -> None:
    call = '{"name": "calc", "arguments": {"e": "23*45"}}\nt:1035\na:'
    assert compute_score("products", "1035", "1035") == 1.0
    assert compute_score("products", call + "1035", "1035") == 1.0
    for wrong in (call, call + "103", call + "1035 1035", "23", call[:-3] + "1035"):
        assert compute_score("products", wrong, "1035") == 0.0, wrong


def test_warm_up_shows_the_call_always_in_clear_phrasings_and_seldom_in_others() -> None:
    settings, rng = prepare.Settings(), random.Random(0)
    asked = [ask((12, 34), rng) for _ in range(3000)]
    shown = {clear: [] for clear in (True, False)}
    for each in asked:
        shown[each.template < NUM_CLEAR].append(prepare.uses_tool(each, settings, rng))
    assert all(shown[True])
    share = sum(shown[False]) / len(shown[False])
    assert abs(share - (1 - settings.mislabelled)) < 0.06


def rollout_tokens(question: Question, tokenizer: prepare.Qwen2Tokenizer, tool: Any) -> tuple[list[int], list[int]]:
    """Tokens and mask of a perfect conversation through verl's tool parser, tool and multi-turn tokenizer."""
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.utils.tokenizer.continuous_token import QwenContinuousTokenBuilder

    schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)]
    builder = QwenContinuousTokenBuilder(tokenizer)
    written = [turn for turn in prepare.conversation(question, use_tool=True) if turn["role"] == "assistant"]
    user = {"role": "user", "content": question.text}
    ids = builder.build_initial_tokens([user], tools=schemas)
    mask = [0] * len(ids)

    call = f"<tool_call>{json.dumps(written[0]['tool_calls'][0]['function'])}</tool_call><|im_end|>"
    said = tokenizer(call)["input_ids"]
    ids, mask = builder.merge_assistant_tokens(ids, said).token_ids, mask + [1] * len(said)
    content, calls = asyncio.run(ToolParser.get_tool_parser("hermes", tokenizer).extract_tool_calls(said, []))
    result = asyncio.run(tool.call(json.loads(calls[0].arguments)))
    before = [user, {"role": "assistant", "content": content}]
    ids = builder.merge_context_tokens(before, [*before, {"role": "tool", "content": result}], ids).token_ids
    mask += [0] * (len(ids) - len(mask))
    said = tokenizer(question.answer + "<|im_end|>")["input_ids"]
    return builder.merge_assistant_tokens(ids, said).token_ids, mask + [1] * len(said)


def test_warm_up_has_the_tokens_and_the_mask_of_verls_rollouts(
    tokenizer: prepare.Qwen2Tokenizer, question: Question, calculator: Any
) -> None:
    ids, own = prepare.tokens(prepare.conversation(question, use_tool=True), tokenizer)
    expected, mask = rollout_tokens(question, tokenizer, calculator)
    assert ids == expected, f"{tokenizer.decode(ids)!r} is not {tokenizer.decode(expected)!r}"
    assert own == [bool(m) for m in mask]


def test_a_conversation_fits_the_lengths_of_the_recipe(tokenizer: prepare.Qwen2Tokenizer) -> None:
    script = (ROOT / "recipes/tool/run.sh").read_text()
    prompt, response = map(int, re.findall(r"(?:PROMPT|RESPONSE)_LENGTH=(\d+)", script))
    rng = random.Random(0)
    for _ in range(200):
        messages = prepare.conversation(ask((99, 99), rng), use_tool=True)
        asked = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
        length = len(tokenizer(asked)["input_ids"])
        assert length <= prompt and len(prepare.tokens(messages, tokenizer)[0]) - length <= response


def test_learnt_labels_are_the_models_own_turns(tokenizer: prepare.Qwen2Tokenizer, question: Question) -> None:
    batch = prepare.collate([prepare.conversation(question, use_tool=use) for use in (True, False)], tokenizer)
    texts = [tokenizer.decode(labels[labels != -100]) for labels in batch["labels"]]
    call = '<tool_call>{"name": "calc", "arguments": {"e": "23*45"}}</tool_call><|im_end|>'
    assert texts == [call + "1035<|im_end|>", "23<|im_end|>"]
    assert batch["attention_mask"].sum(1).tolist() == [
        len(prepare.tokens(prepare.conversation(question, use_tool=use), tokenizer)[0]) for use in (True, False)
    ]
