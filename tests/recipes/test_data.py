"""The converters, on small files in the formats that the data sets are published in."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

pytest.importorskip("verl")

from verl.utils.reward_score import default_compute_score

from recipes.data import aime, dapo_math, gsm8k, hendrycks_math
from recipes.data.convert import convert
from recipes.data.load import SourceError, records
from recipes.data.problems import TEMPLATES, Problem, deduplicated, normalised

GSM8K = [
    {
        "question": "A crate holds 36 pears and 4 are bad. How many are good?",
        "answer": "Good pears: 36-4=<<36-4=32>>32.\n#### 32",
    },
    {
        "question": "A mill grinds 1250 kg a day. How much is that in four days?",
        "answer": "4*1250=<<4*1250=5000>>5,000 kg\n#### 5,000",
    },
]
MATH = [
    {
        "problem": "Compute $\\frac{3}{4}-\\frac{1}{4}.$",
        "level": "Level 1",
        "type": "Prealgebra",
        "solution": "The difference is $\\frac{2}{4}=\\boxed{\\frac{1}{2}}$.",
    },
    {
        "problem": "What is $7\\cdot 6$?",
        "level": "Level 1",
        "type": "Algebra",
        "solution": "First $\\boxed{41}$ was wrong, so \\fbox{42}.",
    },
]
MATH_500 = [
    {
        "problem": "Compute  $\\dfrac{3}{4} - \\dfrac{1}{4}$.",
        "solution": "It is $\\boxed{\\frac{1}{2}}$.",
        "answer": "\\frac{1}{2}",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/9001.json",
    }
]


def dapo(question: str, answer: str, index: str) -> dict[str, Any]:
    """A row as DAPO's authors publish it."""
    before = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    )
    after = '\n\nRemember to put your answer on its own line after "Answer:".'
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": before + question + after, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    return rows


def truths(path: Path) -> list[str]:
    return [row["reward_model"]["ground_truth"] for row in rows_of(path)]


def test_gsm8k_keeps_the_number_behind_the_hashes_without_its_commas(tmp_path: Path) -> None:
    convert(
        gsm8k.DATASET,
        tmp_path,
        train=[jsonl(tmp_path / "a.jsonl", GSM8K)],
        test=[jsonl(tmp_path / "b.jsonl", GSM8K[:1])],
    )
    assert truths(tmp_path / "test.parquet") == ["32"]
    (row,) = rows_of(tmp_path / "train.parquet")
    assert row == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": TEMPLATES["boxed"].format(question=GSM8K[1]["question"])}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "5000"},
        "extra_info": {"split": "train", "index": 0, "question": GSM8K[1]["question"], "template": "boxed"},
    }


def test_math_is_read_from_its_folders_and_math_500_is_held_out(tmp_path: Path) -> None:
    for number, record in enumerate(MATH):
        folder = tmp_path / "MATH" / "train" / record["type"].lower()
        folder.mkdir(parents=True)
        (folder / f"{number}.json").write_text(json.dumps(record))
    counts = convert(
        hendrycks_math.DATASET,
        tmp_path / "out",
        train=[str(tmp_path / "MATH" / "train")],
        test=[jsonl(tmp_path / "test.jsonl", MATH_500)],
    )
    assert truths(tmp_path / "out" / "train.parquet") == ["42"]  # the same question in other typesetting is left out
    assert truths(tmp_path / "out" / "test.parquet") == ["\\frac{1}{2}"]
    assert (counts["train"].read, counts["train"].held_out, counts["train"].written) == (2, 1, 1)
    assert json.loads((tmp_path / "out" / "counts.json").read_text())["train"]["held_out"] == 1


def test_math_answer_is_the_last_box(tmp_path: Path) -> None:
    assert hendrycks_math.problem(MATH[0], "").answer == "\\frac{1}{2}"
    assert hendrycks_math.problem({**MATH[0], "solution": "$\\boxed{x^{2}}$, or $\\boxed 7$"}, "").answer == "7"


def test_dapo_is_reduced_to_one_row_per_question_and_aime_kept_out(tmp_path: Path) -> None:
    published = [dapo("Find $2+3$.", "5", "a")] * 100 + [dapo("Find $2\\cdot 3$.", "6", "b")] * 100
    published += [dapo("Find $9-2$.", "7", "c"), dapo("Find $9-2$.", "8", "d"), dapo("Find $9-2$.", "7", "c")]
    aime_set = [{"ID": "2024-I-1", "Problem": "Find $2 \\cdot 3$", "Solution": "...", "Answer": "006"}]
    convert(aime.DATASET, tmp_path / "aime", test=[jsonl(tmp_path / "aime.jsonl", aime_set)])
    counts = convert(
        dapo_math.DATASET,
        tmp_path,
        train=[parquet(tmp_path / "dapo.parquet", published)],
        against=[str(tmp_path / "aime" / "test.parquet")],
    )["train"]
    assert truths(tmp_path / "aime" / "test.parquet") == ["6"]
    (row,) = rows_of(tmp_path / "train.parquet")
    assert row["extra_info"]["question"] == "Find $2+3$."
    assert row["prompt"][0]["content"] == TEMPLATES["boxed"].format(question="Find $2+3$.")
    assert (counts.read, counts.repeated, counts.held_out, counts.contradictory, counts.written) == (203, 99, 100, 3, 1)


def test_dapo_in_its_own_template_is_the_published_prompt(tmp_path: Path) -> None:
    published = dapo("Find $2+3$.", "5", "a")
    source = parquet(tmp_path / "dapo.parquet", [published])
    convert(dapo_math.DATASET, tmp_path, train=[source], template="answer_line")
    (row,) = rows_of(tmp_path / "train.parquet")
    assert row["prompt"][0]["content"] == published["prompt"][0]["content"]


@pytest.mark.parametrize(
    "record",
    [
        {"problem": "Find $x$.", "answer": 73, "id": 60, "year": "2024"},
        {"question": "Find $x$.", "answer": "073"},
        {"Problem": "Find $x$.", "Answer": "73^\\circ"},
        dapo("Find $x$.", "73", "e"),
    ],
)
def test_aime_is_read_in_every_format_it_is_published_in(record: dict[str, Any]) -> None:
    problem = aime.problem(record, "")
    assert (problem.question, problem.answer) == ("Find $x$.", "73")


@pytest.mark.parametrize(
    ("dataset", "record", "response", "template"),
    [
        (gsm8k, GSM8K[1], "So it is #### 5,000", "hashes"),
        (hendrycks_math, MATH[0], "So it is $\\boxed{\\frac12}$.", "boxed"),
        (dapo_math, dapo("Find $2+3$.", "5", "a"), "Adding.\nAnswer: 5", "answer_line"),
        (aime, {"problem": "Find $x$.", "answer": "73"}, "It is $\\boxed{73}$.", "boxed"),
    ],
)
def test_verls_own_scorer_takes_the_rows_in_the_template_that_fits_it(
    dataset: Any, record: dict[str, Any], response: str, template: str
) -> None:
    assert template in TEMPLATES
    problem = dataset.problem(record, "")

    def score(text: str) -> float:
        result = default_compute_score(problem.data_source, text, problem.answer)
        return float(result["acc"] if isinstance(result, dict) else result)

    assert score(response) == 1
    assert score(response.replace("5", "4").replace("2", "3").replace("7", "8")) == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is $\\frac{1}{2}$ of 6?", "What  is \\(\\dfrac{1}{2}\\) of 6".replace("\\(", "$").replace("\\)", "$")),
        ("Let $f\\left(x\\right)=x\\,y$.", "let $ f(x) = xy $"),
        ("A\u00a0caf\u00e9 sells 3", "A cafe\u0301 sells 3."),
    ],
)
def test_typesetting_makes_no_new_question(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("What is 3.5?", "What is 35?"), ("Find $a-b$.", "Find $ab$."), ("Find $x^2$.", "Find $x_2$."), ("1,5", "15")],
)
def test_other_numbers_and_signs_make_another_question(one: str, other: str) -> None:
    assert normalised(one) != normalised(other)


def test_every_record_is_accounted_for() -> None:
    def problem(question: str, answer: str) -> Problem:
        return Problem(question=question, answer=answer, data_source="x")

    problems = [problem(q, a) for q, a in [*["a1"] * 3, "b1", "c1", "a2", "a1", "t1", *["b1"] * 2]]
    kept, counts = deduplicated(problems, ["T"])
    assert [p.question for p in kept] == ["b", "c"]
    assert (counts.contradictory, counts.repeated, counts.held_out, counts.written) == (5, 2, 1, 2)
    assert counts.read == counts.contradictory + counts.repeated + counts.held_out + counts.written == 10


@pytest.mark.parametrize(
    ("dataset", "record", "message"),
    [
        (gsm8k, {"question": "2+2?"}, "g.jsonl, record 1: field 'answer' is missing or empty; .*'question'"),
        (gsm8k, {"question": "2+2?", "answer": "4"}, "does not end with '#### NUMBER'"),
        (hendrycks_math, {"problem": "2+2?", "solution": "4"}, "no \\\\boxed"),
        (dapo_math, {**dapo("2+2?", "4", ""), "prompt": [{"content": "2+2?"}]}, "not in DAPO's template"),
        (dapo_math, {**dapo("2+2?", "4", ""), "reward_model": {"style": "rule"}}, "'ground_truth' is missing"),
        (aime, {"problem": "2+2?", "answer": "4.5"}, "not a whole number from 0 to 999"),
    ],
)
def test_a_record_of_another_format_is_refused_by_name(
    tmp_path: Path, dataset: Any, record: dict[str, Any], message: str
) -> None:
    source = jsonl(tmp_path / "g.jsonl", [record])
    split = {"test": [source]} if dataset is aime else {"train": [source]}
    if dataset in (gsm8k, hendrycks_math):
        split["test"] = [source]
    with pytest.raises(ValueError, match=message):
        convert(dataset.DATASET, tmp_path, **split)


def test_a_source_that_cannot_be_read_says_which_and_why(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn.jsonl").write_text('{"question": "a"}\n{"question": \n')
    (tmp_path / "list.jsonl").write_text("[1, 2]\n")
    (tmp_path / "page.parquet").write_text("<html>404</html>")
    (tmp_path / "notes.txt").write_text("")
    for name, message in {
        "missing.jsonl": "does not exist: give a file, a folder or a Hugging Face id",
        "empty": "has no .parquet, .jsonl, .json files",
        "torn.jsonl": "torn.jsonl cannot be read",
        "list.jsonl": "line 1 is list, not an object",
        "page.parquet": "page.parquet cannot be read: .*[Pp]arquet",
        "notes.txt": "is none of .parquet, .jsonl, .json",
    }.items():
        with pytest.raises(SourceError, match=message):
            list(records(str(tmp_path / name)))


def test_a_set_to_leave_out_must_be_one_of_ours(tmp_path: Path) -> None:
    source = parquet(tmp_path / "dapo.parquet", [dapo("Find $2+3$.", "5", "a")])
    for other in (source, jsonl(tmp_path / "a.jsonl", GSM8K), parquet(tmp_path / "b.parquet", GSM8K)):
        with pytest.raises(ValueError, match=f"{other} is no test set that these converters wrote"):
            convert(dapo_math.DATASET, tmp_path, train=[source], against=[other])


def test_an_unreachable_hub_names_the_data_set_and_the_way_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def unreachable(*arguments: Any, **_: Any) -> None:
        raise ConnectionError(f"no route to the hub for {arguments}\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(SourceError, match=r"openai/gsm8k \(subset main, split test\) .*ConnectionError.*give the file"):
        list(records("openai/gsm8k", subset="main", split="test"))


def test_hub_rows_are_those_that_datasets_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*arguments: Any, **keywords: Any) -> Any:
        asked.append((arguments, keywords))
        return datasets.Dataset.from_list(GSM8K if keywords["split"] == "train" else GSM8K[:1])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    convert(gsm8k.DATASET, tmp_path, template="hashes")
    assert asked == [(("openai/gsm8k", "main"), {"split": split}) for split in ("test", "train")]
    assert (truths(tmp_path / "test.parquet"), truths(tmp_path / "train.parquet")) == (["32"], ["5000"])


def test_verl_reads_what_is_written(tmp_path: Path) -> None:
    """verl's own dataset class, with a prompt that it renders by the model's chat template."""
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    from recipes.quickstart.prepare import build_tokenizer

    convert(
        hendrycks_math.DATASET,
        tmp_path,
        train=[jsonl(tmp_path / "a.jsonl", MATH)],
        test=[jsonl(tmp_path / "b.jsonl", MATH_500)],
    )
    config = OmegaConf.create({"max_prompt_length": 1024, "filter_overlong_prompts": True, "cache_dir": str(tmp_path)})
    data = RLHFDataset(str(tmp_path / "train.parquet"), build_tokenizer(), config)
    (item,) = [data[i] for i in range(len(data))]
    assert item["raw_prompt"] == [{"role": "user", "content": TEMPLATES["boxed"].format(question=MATH[1]["problem"])}]
    assert item["reward_model"]["ground_truth"] == "42"


def test_command_line_prints_the_counts_and_no_traceback(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "recipes.data.gsm8k", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120, check=False
        )

    good, other = jsonl(tmp_path / "a.jsonl", GSM8K), jsonl(tmp_path / "b.jsonl", GSM8K[:1])
    done = run(str(tmp_path / "out"), "--train", good, "--test", other)
    assert done.returncode == 0, done.stderr
    assert "train.parquet: 1 of 2 problems; left out 0 repeated, 0 with contradictory answers, 1 that" in done.stdout
    failed = run(str(tmp_path / "out"), "--train", str(tmp_path / "no.jsonl"), "--test", other)
    assert failed.returncode == 1 and failed.stderr.startswith("error: ") and "Traceback" not in failed.stderr
