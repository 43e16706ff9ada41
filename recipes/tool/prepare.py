"""Makes what the tool recipe trains on: a tiny Qwen3 model that can call a calculator, and products it cannot do alone.

    python -m recipes.tool.prepare OUT

As recipes.quickstart.prepare, with tool calls: the warm-up shows how to call the calculator and to repeat its result,
but in half of the phrasings most questions are "answered" at once by their first number. So the model knows the tool
and often does not use it, and only the reward tells it to. A call is in the format of Qwen and Hermes, and the chat
template ends a turn with a newline as Qwen's does, which verl's multi-turn tokenizer relies on.
"""

import argparse
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas
import torch
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from recipes.quickstart import prepare as quickstart
from recipes.tool.questions import NUM_CLEAR, Question, ask, split_pairs

# verl hands the schemas of the tools to the template. A model of this size learns the one call by heart instead of
# reading 500 tokens of schema, so the template leaves them out.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }}:{{ m['content'] }}"
    "{% for call in m.get('tool_calls') or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a:{% endif %}"
)
DATA_SOURCE = "products"
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings(quickstart.Settings):
    """All that the prepared files depend on; longer texts, of which most is the same every time."""

    warmup_steps: int = 500
    warmup_batch_size: int = 24


def build_tokenizer() -> Qwen2Tokenizer:
    """The quickstart's bytes, and one token each for the beginning and the end of a tool call."""
    tokenizer = quickstart.build_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def conversation(question: Question, *, use_tool: bool) -> list[Message]:
    """The question, the call and its result if the tool is used, and what is then answered: else the first number."""
    user: Message = {"role": "user", "content": question.text}
    if not use_tool:
        return [user, {"role": "assistant", "content": question.expression.partition("*")[0]}]
    call = {"type": "function", "function": {"name": "calc", "arguments": {"e": question.expression}}}
    return [
        user,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": question.answer},
        {"role": "assistant", "content": question.answer},
    ]


def tokens(messages: list[Message], tokenizer: Qwen2Tokenizer) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation, and which of them the model writes itself: assistant turns up to their end token."""
    ids: list[int] = []
    own: list[bool] = []
    for i, message in enumerate(messages):
        before = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True) if i else ""
        after = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
        if message["role"] == "assistant":
            # The header is given to the model, the newline after the end token is added by verl.
            context = tokenizer(before)["input_ids"][len(ids) :]
            written = tokenizer(after.removeprefix(before).removesuffix("\n"))["input_ids"]
            ids += context + written
            own += [False] * len(context) + [True] * len(written)
    return ids, own


def collate(conversations: list[list[Message]], tokenizer: Qwen2Tokenizer) -> dict[str, torch.Tensor]:
    """Right-padded ``[batch, tokens]`` inputs; only what the model writes itself is learnt."""
    rows = [tokens(messages, tokenizer) for messages in conversations]
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full_like(input_ids, -100)
    for row, (ids, own) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, : len(ids)] = torch.tensor([token if mine else -100 for token, mine in zip(ids, own, strict=True)])
    return {"input_ids": input_ids, "labels": labels, "attention_mask": (input_ids != tokenizer.pad_token_id).long()}


def uses_tool(question: Question, settings: Settings, rng: random.Random) -> bool:
    """Whether the warm-up shows the call: not in ``mislabelled`` of the questions in the later templates."""
    return question.template < NUM_CLEAR or rng.random() >= settings.mislabelled


def verl_rows(questions: list[Question], split: str) -> list[dict[str, Any]]:
    """Rows of verl's RL data format."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question.text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, question in enumerate(questions)
    ]


def prepare(out: Path, settings: Settings) -> None:
    """Write model, tokenizer, questions and the settings to ``out``."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)  # as in the quickstart
    tokenizer = build_tokenizer()
    model = quickstart.build_model(settings, tokenizer)
    train_pairs, held_out_pairs = split_pairs(settings.num_held_out, settings.seed)

    def draw_batch(rng: random.Random) -> dict[str, torch.Tensor]:
        questions = [ask(rng.choice(train_pairs), rng) for _ in range(settings.warmup_batch_size)]
        return collate([conversation(q, use_tool=uses_tool(q, settings, rng)) for q in questions], tokenizer)

    quickstart.warm_up(model, draw_batch, settings)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")

    rng = random.Random(settings.seed + 1)
    train = [ask(rng.choice(train_pairs), rng) for _ in range(settings.num_train)]
    held_out = [ask(pair, rng) for pair in held_out_pairs]
    pandas.DataFrame(verl_rows(train, "train")).to_parquet(out / "train.parquet")
    pandas.DataFrame(verl_rows(held_out, "held_out")).to_parquet(out / "held_out.parquet")
    (out / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    prepare(parser.parse_args().out, Settings())
