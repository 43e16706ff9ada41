"""The reward, called as verl calls it: by its own loader and from threads."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("math_verify")
pytest.importorskip("pebble")

from recipes.data import reward


@pytest.fixture(scope="module", autouse=True)
def end_processes() -> Iterator[None]:
    yield
    pool = reward._pool()
    pool.stop()
    pool.join()


def score(answer: str, truth: str) -> dict[str, float]:
    """Of a boxed answer, from a thread other than the main one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(reward.compute_score, "x", f"So it is $\\boxed{{{answer}}}$.", truth, {}).result()


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("18", "18"),
        ("1,234", "1234"),
        ("0.5", "\\frac{1}{2}"),
        ("\\dfrac{2}{4}", "\\frac{1}{2}"),
        ("\\sqrt{12}", "2\\sqrt{3}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("\\{2, 1\\}", "\\{1,2\\}"),
        ("\\left(3, \\frac{\\pi}{2}\\right)", "(3,\\frac{\\pi}{2})"),
        ("x = 5", "5"),
        ("10 \\text{ apples}", "10"),
        ("\\text{Evelyn}", "\\text{Evelyn}"),
    ],
)
def test_equal_answers_are_right_however_they_are_written(answer: str, truth: str) -> None:
    assert score(answer, truth) == {"score": 1.0, "acc": 1.0, "stated": 1.0, "undecided": 0.0}


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("19", "18"), ("3,4", "3"), ("\\text{Bob}", "\\text{Evelyn}"), ("-5", "5"), ("\\frac{1}{", "\\frac{1}{2}"),
     ("\\frac{}{}}", "2"), ("\\left(", "2"), ("\\begin{matrix} 1 &", "2"), ("\x00\ud7ff", "1"), ("{" * 300, "1")],
)  # fmt: skip
def test_other_answers_and_broken_latex_are_wrong(answer: str, truth: str) -> None:
    assert score(answer, truth)["score"] == 0


@pytest.mark.parametrize(
    ("template", "response", "answer"),
    [
        ("boxed", "First \\boxed{1}, no: \\boxed{\\frac{a}{b}}. Done, 7.", "\\frac{a}{b}"),
        ("boxed", "The answer is 7.", None),
        ("boxed", "\\boxed{7", None),
        ("answer_line", "Answer: 1\nno\nAnswer: $7$ \nend", "7"),
        ("answer_line", "It is \\boxed{7}", None),
        ("hashes", "2+5\n#### 7\n", "7"),
        ("hashes", "7", None),
    ],
)
def test_only_the_form_that_the_prompt_asks_for_states_an_answer(
    template: str, response: str, answer: str | None
) -> None:
    assert reward.stated_answer(response, template) == answer
    result = reward.compute_score("x", response, "7", {"template": template})
    assert result["stated"] == float(answer is not None)
    assert result["score"] == float(answer == "7")


def test_an_unknown_template_is_refused() -> None:
    with pytest.raises(ValueError, match="template='box' is none of boxed, answer_line, hashes"):
        reward.compute_score("x", "7", "7", {"template": "box"})


def test_numbers_too_large_to_compute_cost_seconds_and_the_next_answer_is_scored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reward, "SECONDS", 2.0)
    score("1+1", "2")  # the processes are up
    start = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        answers = ["9^{9^{9^9}}", "10^{10^{10}}", "\\sum_{k=1}^{10^9} k^k", "10000000!"]
        results = list(threads.map(lambda answer: score(answer, "3"), answers))
    seconds = time.monotonic() - start
    assert [result["score"] for result in results] == [0.0] * 4
    assert sum(result["undecided"] for result in results) >= 2  # math-verify refuses some of them by itself
    assert seconds < 30  # two rounds of two processes, each replaced, which imports for some seconds
    assert score("2+3", "5")["score"] == 1


def test_processes_that_die_are_replaced() -> None:
    """As when the machine runs out of memory and they are killed, here all at once."""
    score("1+1", "2")
    for worker in reward._pool()._pool_manager.worker_manager.workers.values():
        os.kill(worker.pid, signal.SIGKILL)
    time.sleep(1)
    results = [score(f"{n}+1", str(n + 1)) for n in range(2, 6)]
    assert results[-1]["score"] == 1
    assert all(result["score"] + result["undecided"] == 1 for result in results)


def test_verl_loads_it_and_calls_it_from_its_reward_manager() -> None:
    import numpy as np
    import torch
    from omegaconf import OmegaConf
    from tensordict import TensorDict
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager

    from recipes.quickstart.prepare import build_tokenizer

    config = OmegaConf.create(
        {
            "reward": {
                "custom_reward_function": {"path": "pkg://recipes.data.reward", "name": "compute_score"},
                "reward_manager": {"source": "register", "name": "dapo"},
                "reward_kwargs": {
                    "max_resp_len": 40,
                    "overlong_buffer_cfg": {"enable": True, "len": 20, "penalty_factor": 1.0, "log": True},
                },
            }
        }
    )
    tokenizer = build_tokenizer()

    async def reward_of(text: str) -> dict[str, Any]:
        manager = load_reward_manager(config, tokenizer)
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        batch = TensorDict({"responses": ids, "attention_mask": torch.ones_like(ids)}, batch_size=1)
        rest: dict[str, Any] = {
            "data_source": "x",
            "reward_model": {"ground_truth": "\\frac12", "style": "rule"},
            "extra_info": {"template": "boxed"},
        }
        fields = {name: np.array([value], dtype=object) for name, value in rest.items()}
        result: dict[str, Any] = await manager.run_single(DataProto(batch=batch, non_tensor_batch=fields))
        return result

    short = asyncio.run(reward_of("\\boxed{0.5}"))
    assert short["reward_score"] == 1 and short["reward_extra_info"]["acc"] == 1
    long = asyncio.run(reward_of("\\boxed{0.5}".rjust(30)))  # half into the buffer of 20 tokens
    assert long["reward_score"] == pytest.approx(0.5) and long["reward_extra_info"]["acc"] == 1
    assert threading.active_count() < 100 and Path(reward.__file__).exists()
