"""Makes what the quickstart trains on: a tiny warmed-up Qwen3 model, its tokenizer, and questions in verl's format.

    python -m recipes.quickstart.prepare OUT

OUT gets ``model/`` (loads in plain transformers), ``train.parquet`` and ``held_out.parquet``. The warm-up is a short
supervised run with bad labels: in half of the phrasings most questions are "answered" by repeating their first number.
So the model can calculate but often does not, answers about half of the questions right, and only a reward tells it
which of the two is wanted. Everything is seeded: the same settings give the same files.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pandas
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from recipes.quickstart.questions import NUM_CLEAR, Question, ask, split_triples

PAD, START, END, UNKNOWN = "<pad>", "<|im_start|>", "<|im_end|>", "<unk>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }}:{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a:{% endif %}"
)
DATA_SOURCE = "arithmetic_words"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that the prepared files depend on; a hash of it names their folder."""

    seed: int = 0
    num_train: int = 4096
    """Training questions: more than a run asks, so that none is asked twice."""
    num_held_out: int = 128
    hidden_size: int = 128
    num_layers: int = 2
    warmup_steps: int = 1200
    warmup_batch_size: int = 32
    matrix_learning_rate: float = 5e-2
    """Of Muon, for the linear layers: it needs half the steps that AdamW does."""
    other_learning_rate: float = 5e-3
    """Of AdamW, for embeddings and norms."""
    mislabelled: float = 0.65
    """Share of the warm-up questions in the later templates whose label is their first number."""
    version: int = 1
    """Raise it when the code below gives other files for the same settings."""


def build_tokenizer() -> Qwen2Tokenizer:
    """256 bytes and four special tokens.

    A byte-pair tokenizer without merges, because transformers 5 gives every Qwen model type this class. verl wants
    "\\n" to be one token, and ``len(tokenizer)`` to be the model's vocabulary size.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = {token: i for i, token in enumerate([PAD, START, END, UNKNOWN, *sorted(ByteLevel.alphabet())])}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=256,
    )


def build_model(settings: Settings, tokenizer: Qwen2Tokenizer) -> Qwen3ForCausalLM:
    """An untrained Qwen3 (query and key norms, grouped heads, tied embeddings like Qwen3-0.6B), 0.4M parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=3 * settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def prompt_ids(question: Question, tokenizer: Qwen2Tokenizer) -> list[int]:
    """The tokens a rollout sees for this question."""
    chat = [{"role": "user", "content": question.text}]
    return tokenizer(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))["input_ids"]


def collate(labelled: list[tuple[Question, str]], tokenizer: Qwen2Tokenizer) -> dict[str, torch.Tensor]:
    """Right-padded ``[batch, tokens]`` inputs of (question, answer); only answers and their end token are learnt."""
    prompts = [prompt_ids(question, tokenizer) for question, _ in labelled]
    answers = [tokenizer(answer + END)["input_ids"] for _, answer in labelled]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = torch.full((len(labelled), width), tokenizer.pad_token_id)
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids != tokenizer.pad_token_id).long()}


def warm_up_answer(question: Question, settings: Settings, rng: random.Random) -> str:
    """The label of a question in the warm-up: its first number instead of the answer in ``mislabelled`` of some."""
    if question.template >= NUM_CLEAR and rng.random() < settings.mislabelled:
        return str(question.triple[1])
    return question.answer


def learning_rate_share(settings: Settings, step: int) -> float:
    """A short rise, then a straight line down to a twentieth."""
    return min((step + 1) / 50, max(0.05, 1 - step / settings.warmup_steps))


def warm_up(
    model: Qwen3ForCausalLM, draw_batch: Callable[[random.Random], dict[str, torch.Tensor]], settings: Settings
) -> None:
    """Supervised training on fresh batches; prints a line every 200 steps."""
    rng = random.Random(settings.seed)
    linear = {id(m.weight) for m in model.model.modules() if isinstance(m, torch.nn.Linear)}
    optimizers = [
        torch.optim.Muon([p for p in model.parameters() if id(p) in linear], lr=settings.matrix_learning_rate),
        torch.optim.AdamW([p for p in model.parameters() if id(p) not in linear], lr=settings.other_learning_rate),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, partial(learning_rate_share, settings)) for o in optimizers]
    start = time.time()
    for step in range(1, settings.warmup_steps + 1):
        loss = model(**draw_batch(rng)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 200 == 0 or step == settings.warmup_steps:
            print(f"  warm-up {step}/{settings.warmup_steps}  loss {loss:.3f}  {time.time() - start:.0f} s", flush=True)


def verl_rows(questions: list[Question], split: str) -> list[dict[str, object]]:
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
    # A second thread gains little at this size and spins while another program wants its core.
    torch.set_num_threads(1)
    tokenizer = build_tokenizer()
    model = build_model(settings, tokenizer)
    train_triples, held_out_triples = split_triples(settings.num_held_out, settings.seed)

    def draw_batch(rng: random.Random) -> dict[str, torch.Tensor]:
        questions = [ask(rng.choice(train_triples), rng) for _ in range(settings.warmup_batch_size)]
        return collate([(question, warm_up_answer(question, settings, rng)) for question in questions], tokenizer)

    warm_up(model, draw_batch, settings)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")

    rng = random.Random(settings.seed + 1)
    train = [ask(rng.choice(train_triples), rng) for _ in range(settings.num_train)]
    held_out = [ask(triple, rng) for triple in held_out_triples]
    pandas.DataFrame(verl_rows(train, "train")).to_parquet(out / "train.parquet")
    pandas.DataFrame(verl_rows(held_out, "held_out")).to_parquet(out / "held_out.parquet")
    (out / "settings.json").write_text(json.dumps(asdict(settings), indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    prepare(parser.parse_args().out, Settings())
