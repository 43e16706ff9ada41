"""The quickstart's questions, reward, tokenizer and model, each against something computed another way."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from recipes.quickstart.questions import TEMPLATES, ask, split_triples
from recipes.quickstart.reward import compute_score

pytest.importorskip("pandas")
from recipes.quickstart import prepare

ADDITIVE = re.compile(r"gets|more|add|then")
SUBTRACTIVE = re.compile(r"loses|less|sell|gives")


def solve(text: str) -> str:
    """The answer read off the words alone."""
    a, b = map(int, re.findall(r"\d+", text))
    added, taken = bool(ADDITIVE.search(text)), bool(SUBTRACTIVE.search(text))
    assert added != taken, f"{text!r} does not say what to do"
    return str(a + b if added else a - b)


@pytest.fixture(scope="module")
def tokenizer() -> prepare.Qwen2Tokenizer:
    return prepare.build_tokenizer()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the recipe prepares, with a warm-up of two steps."""
    out = tmp_path_factory.mktemp("quickstart")
    prepare.prepare(out, prepare.Settings(warmup_steps=2, num_train=300))
    return out


def rows(path: Path) -> list[dict]:
    import pandas

    return pandas.read_parquet(path).to_dict("records")


def test_answers_are_those_that_the_words_ask_for() -> None:
    rng = random.Random(0)
    train, held_out = split_triples(50, seed=3)
    for triple in train + held_out:
        question = ask(triple, rng)
        assert question.answer == solve(question.text), question


def test_no_held_out_sum_is_trained_under_any_wording(data: Path) -> None:
    def sums(split: str) -> set[tuple[str, ...]]:
        texts = [row["prompt"][0]["content"] for row in rows(data / f"{split}.parquet")]
        return {(*re.findall(r"\d+", text), str(bool(ADDITIVE.search(text)))) for text in texts}

    train, held_out = sums("train"), sums("held_out")
    assert len(held_out) == prepare.Settings().num_held_out, "every held-out sum is asked once"
    assert not train & held_out


def test_split_is_a_partition_and_depends_on_the_seed() -> None:
    train, held_out = split_triples(64, seed=0)
    assert len(set(train) | set(held_out)) == len(train) + len(held_out)
    assert {operation for operation, _, _ in held_out} == set(TEMPLATES)
    assert split_triples(64, seed=0) == (train, held_out) != split_triples(64, seed=1)
    with pytest.raises(ValueError, match="num_held_out"):
        split_triples(0, seed=0)


def test_rows_are_what_verl_reads_and_their_ground_truth_is_right(data: Path) -> None:
    for row in rows(data / "train.parquet") + rows(data / "held_out.parquet"):
        assert [m["role"] for m in row["prompt"]] == ["user"]
        truth = row["reward_model"]["ground_truth"]
        assert truth == solve(row["prompt"][0]["content"])
        assert compute_score(row["data_source"], f" {truth} ", truth, row["extra_info"]) == 1.0
    indices = [row["extra_info"]["index"] for row in rows(data / "train.parquet")]
    assert len(set(indices)) == len(indices), "the sampling seed of an answer is made from its question's index"


@pytest.mark.parametrize("answer", ["", "13", "12 or 13", "012", "12.0", "<|im_end|>", "the answer is 12"])
def test_only_the_number_itself_is_rewarded(answer: str) -> None:
    assert compute_score("arithmetic_words", "12", "12") == 1.0
    assert compute_score("arithmetic_words", answer, "12") == 0.0


def test_mislabelling_is_confined_to_the_later_templates_and_has_its_share() -> None:
    settings, rng = prepare.Settings(), random.Random(0)
    train, _ = split_triples(1, seed=0)
    wrong, asked = Counter(), Counter()
    for _ in range(4000):
        question = ask(rng.choice(train), rng)
        unclear = question.template >= prepare.NUM_CLEAR
        asked[unclear] += 1
        wrong[unclear] += prepare.warm_up_answer(question, settings, rng) != question.answer
    assert wrong[False] == 0
    spread = (settings.mislabelled * (1 - settings.mislabelled) / asked[True]) ** 0.5
    assert abs(wrong[True] / asked[True] - settings.mislabelled) < 5 * spread


def test_tokenizer_gives_back_any_text_and_is_as_large_as_the_model(
    tokenizer: prepare.Qwen2Tokenizer, data: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(data / "model")
    model = AutoModelForCausalLM.from_pretrained(data / "model")
    assert model.config.vocab_size == len(loaded) == len(tokenizer) == 260
    for text in ("Ada has 23 nuts, gets 5?\n", "naïve ∑ 🙂", "\n", "a" * 50):
        ids = loaded(text)["input_ids"]
        assert ids == tokenizer(text)["input_ids"]
        assert len(ids) == len(text.encode()), "one token per byte"
        assert loaded.decode(ids) == text
    assert loaded(prepare.END)["input_ids"] == [model.config.eos_token_id] == [loaded.eos_token_id]


def test_warm_up_learns_answers_and_nothing_of_the_question(tokenizer: prepare.Qwen2Tokenizer) -> None:
    question = ask(("add", 23, 5), random.Random(0))
    batch = prepare.collate([(question, "28"), (ask(("add", 9, 9), random.Random(1)), "18")], tokenizer)
    for ids, labels, answer in zip(batch["input_ids"], batch["labels"], ["28", "18"], strict=True):
        learnt = labels != -100
        assert torch.equal(ids[learnt], labels[learnt])
        assert tokenizer.decode(labels[learnt]) == answer + prepare.END
    prompt = tokenizer.decode(batch["input_ids"][0][batch["labels"][0] == -100], skip_special_tokens=False)
    assert prompt.replace(prepare.PAD, "") == f"<|im_start|>u:{question.text}<|im_end|><|im_start|>a:"


def test_same_settings_give_the_same_files(data: Path, tmp_path: Path) -> None:
    prepare.prepare(tmp_path, prepare.Settings(warmup_steps=2, num_train=300))
    for name in ("model/model.safetensors", "settings.json"):
        assert (tmp_path / name).read_bytes() == (data / name).read_bytes()
    assert str(rows(tmp_path / "train.parquet")) == str(rows(data / "train.parquet"))
    assert json.loads((data / "settings.json").read_text())["warmup_steps"] == 2
