"""Parameter shapes of a causal language model from its Hugging Face configuration, without building it.

Which parameters are targets of LoGRA follows ``verl_logra.sketch`` with its default ``target_modules``: the seven
projections of attention and MLP, as far as they are ``nn.Linear``. Experts are stacked 3-D parameters in
transformers 5, so they are not.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

Unit = Literal["embedding", "layer", "head", "root"]
SUPPORTED = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma2")
_NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model."""

    name: str
    """As in a checkpoint."""
    shape: tuple[int, ...]
    unit: Unit
    """What verl's fsdp2 strategy gathers it with: a decoder layer; the embedding and the head, each alone when they are
    not tied; the rest."""
    target: bool = False
    """Whether LoGRA sketches its gradient."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def local_numel(self, ranks: int, width: int | None = None) -> int:
        """Elements on the first rank: FSDP2 cuts rows as ``torch.chunk`` does. ``width`` replaces the columns."""
        columns = math.prod(self.shape[1:]) if width is None else width
        return -(-self.shape[0] // ranks) * columns


@dataclass(frozen=True, kw_only=True)
class Model:
    """The numbers of a configuration that memory depends on."""

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    tied: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    num_experts: int = 0
    experts_per_token: int = 0

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> Model:
        """Reads a Hugging Face configuration.

        Raises:
            ValueError: the architecture is not one of ``SUPPORTED``, or a number is missing.
        """
        kind = config.get("model_type")
        if kind not in SUPPORTED:
            raise ValueError(f"{name}: model_type={kind!r} is not supported; the planner knows {', '.join(SUPPORTED)}")
        missing = [key for key in _NEEDED if not isinstance(config.get(key), int) or config[key] < 1]
        if missing:
            raise ValueError(f"{name}: the configuration has no valid {', '.join(missing)}")
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            raise ValueError(f"{name}: layers with and without experts in one model are not supported")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        default_head_dim = {"qwen3": 128, "gemma2": 256}.get(kind, hidden // heads)
        bias = kind == "qwen2" or bool(config.get("attention_bias", False))
        expert = kind == "qwen3_moe"
        return cls(
            name=name,
            model_type=kind,
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or default_head_dim,
            intermediate_size=config["moe_intermediate_size"] if expert else config["intermediate_size"],
            tied=bool(config.get("tie_word_embeddings", kind == "gemma2")),
            attention_bias=bias,
            output_bias=bias and kind != "qwen2",
            mlp_bias=kind == "llama" and bool(config.get("mlp_bias", False)),
            num_experts=(config.get("num_experts") or config.get("num_local_experts") or 0) if expert else 0,
            experts_per_token=config.get("num_experts_per_tok", 8) if expert else 0,
        )

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys are normalised."""
        return self.model_type in ("qwen3", "qwen3_moe")

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters; a tied head is not one."""
        hidden, vocab = self.hidden_size, self.vocab_size
        alone: Unit = "root" if self.tied else "embedding"
        found = [Parameter("model.embed_tokens.weight", (vocab, hidden), alone)]
        for layer in range(self.num_layers):
            found += self._layer(f"model.layers.{layer}")
        found.append(Parameter("model.norm.weight", (hidden,), "root"))
        if not self.tied:
            found.append(Parameter("lm_head.weight", (vocab, hidden), "head"))
        return tuple(found)

    def _layer(self, prefix: str) -> Iterator[Parameter]:
        hidden, q, kv, f = self.hidden_size, self.query_size, self.kv_size, self.intermediate_size

        def linear(name: str, out: int, features: int, bias: bool) -> Iterator[Parameter]:
            yield Parameter(f"{prefix}.{name}.weight", (out, features), "layer", target=True)
            if bias:
                yield Parameter(f"{prefix}.{name}.bias", (out,), "layer")

        for name, size in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            yield from linear(f"self_attn.{name}", size, hidden, self.attention_bias)
        yield from linear("self_attn.o_proj", hidden, q, self.output_bias)
        if self.head_norms:
            yield Parameter(f"{prefix}.self_attn.q_norm.weight", (self.head_dim,), "layer")
            yield Parameter(f"{prefix}.self_attn.k_norm.weight", (self.head_dim,), "layer")
        if self.num_experts:
            yield Parameter(f"{prefix}.mlp.gate.weight", (self.num_experts, hidden), "layer")
            yield Parameter(f"{prefix}.mlp.experts.gate_up_proj", (self.num_experts, 2 * f, hidden), "layer")
            yield Parameter(f"{prefix}.mlp.experts.down_proj", (self.num_experts, hidden, f), "layer")
        else:
            yield from linear("mlp.gate_proj", f, hidden, self.mlp_bias)
            yield from linear("mlp.up_proj", f, hidden, self.mlp_bias)
            yield from linear("mlp.down_proj", hidden, f, self.mlp_bias)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.model_type == "gemma2":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            yield Parameter(f"{prefix}.{name}.weight", (hidden,), "layer")

    @cached_property
    def targets(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.target)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel for p in self.parameters)


def shipped() -> dict[str, Model]:
    """Hub name -> model, of all that the planner knows by name."""
    entries = json.loads(Path(__file__).with_name("models.json").read_text())
    return {name: Model.from_config(name, entry["config"]) for entry in entries for name in entry["names"]}


def load(name_or_path: str) -> Model:
    """A shipped model by its hub name (the part behind the slash is enough), or a configuration on disk.

    Raises:
        ValueError: neither; the closest names are listed.
    """
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text())
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"{path} is not a model's configuration")
        return Model.from_config(str(name_or_path), config)
    known = shipped()
    by_short = {name.rpartition("/")[2].lower(): name for name in known}
    by_full = {name.lower(): name for name in known}
    key = name_or_path.lower()
    name = by_full.get(key) or by_short.get(key)
    if name is not None:
        return known[name]
    close = difflib.get_close_matches(key.rpartition("/")[2], by_short, n=4, cutoff=0.5)
    hint = f"did you mean {', '.join(by_short[c] for c in close)}?" if close else f"known: {', '.join(known)}"
    raise ValueError(f"--model {name_or_path} is neither a shipped model nor a configuration on disk; {hint}")
