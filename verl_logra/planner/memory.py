"""Bytes that one training rank holds, moment by moment; every formula of the planner with the code that allocates it.

A step is a sequence of moments (end of forward, backward through the head, ..., optimizer step, weight sync). At each
moment some tensors exist at once; the peak is the largest moment, not the sum of everything. Notation:

    W   parameters of this rank's shards          T   tokens of a micro-batch (micro_batch * seq_len)
    N   ranks of the shard group                  r   rank of the sketches or adapters
    s   bytes of an element in storage            c   bytes of an element in computation

Sources: torch's FSDP2 (torch/distributed/fsdp/_fully_shard), torch/optim/adam.py, verl 0.9.1's FSDP engine
(verl/workers/engine/fsdp), transformers 5, and this package. Assumptions that are not options: verl's fsdp2 strategy
with reshard_after_forward, packed sequences (use_remove_padding), flash attention and its cross entropy on a GPU,
gradients reduced in fp32, non-reentrant checkpointing of whole decoder layers, entropy not part of the loss.
Not counted: the CUDA context and NCCL's buffers (1 to 2 GiB), the allocator's fragmentation, vLLM's residue while it
sleeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from verl_logra.planner.models import Model, Parameter, Unit

GIB = 1 << 30
Method = Literal["adamw", "adam8bit", "lora", "galore", "logra", "logra_port"]
METHODS: tuple[Method, ...] = ("adamw", "adam8bit", "lora", "galore", "logra")
Parts = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the memory of a run depends on besides the model."""

    ranks: int
    rank: int = 256
    seq_len: int
    micro_batch: int = 1
    num_micro_batches: int = 1
    """Micro-batches an update. With several, verl keeps unsharded fp32 gradients until the last one, unless
    ``reduce_every_micro_batch``."""
    reduce_every_micro_batch: bool = False
    """verl's use_no_sync_for_gradient_accumulation=False."""
    checkpointing: bool = True
    non_target: Literal["adamw", "frozen"] = "adamw"
    kl: bool = False
    """LoGRA's step controller."""
    probe_sequences: int = 2
    probe_max_tokens: int = 4096
    prompt_len: int = 0
    """Tokens of a sequence that the policy did not generate; the probe makes no logits for them."""
    storage_bytes: int = 4
    compute_bytes: int = 2
    device: Literal["cuda", "cpu"] = "cuda"
    """``cpu``: as our tests measure, with gloo, torch's own attention and log-probabilities."""
    critic: bool = False
    """A value model of the same shape, trained by the same method beside the actor."""
    sync: Literal["low_rank", "full", "none"] = "low_rank"
    """Weight sync of LoGRA; the other methods send everything."""
    bucket_bytes: int = 2048 << 20
    """verl's update_weights_bucket_megabytes."""

    @property
    def tokens(self) -> int:
        return self.micro_batch * self.seq_len

    @property
    def defers_reduction(self) -> bool:
        return self.num_micro_batches > 1 and not self.reduce_every_micro_batch


@dataclass(frozen=True)
class Moment:
    """Everything that exists at one point of a step."""

    name: str
    parts: Parts

    @property
    def total(self) -> float:
        return sum(self.parts.values())


class Rank:
    """One rank's memory under one method. ``moments`` is the step; everything else are its ingredients."""

    def __init__(self, model: Model, setting: Setting, method: Method) -> None:
        self.model, self.setting, self.method = model, setting, method
        r = setting.rank
        self.extra: list[Parameter] = []
        """Parameters that the method adds to the targets, sharded and gathered like the model's own."""
        self.trained: list[Parameter] = list(model.parameters)
        """The model's own parameters that get a dense gradient."""
        if method == "lora":
            for p in model.targets:
                self.extra += [replace(p, shape=(r, p.shape[1])), replace(p, shape=(p.shape[0], r))]
            self.trained = []
        elif method in ("logra", "logra_port"):
            rest = [p for p in model.parameters if not p.target]
            self.trained = rest if setting.non_target == "adamw" else []
            if method == "logra":
                self.extra = [replace(p, shape=(p.shape[0], r)) for p in model.targets]

    # Counting elements

    @cached_property
    def graded(self) -> list[Parameter]:
        """Everything that FSDP2 reduces a gradient of."""
        return self.trained + self.extra

    def local(self, parameters: list[Parameter]) -> int:
        return sum(p.local_numel(self.setting.ranks) for p in parameters)

    def largest_local(self, parameters: list[Parameter]) -> int:
        return max((p.local_numel(self.setting.ranks) for p in parameters), default=0)

    def of_unit(self, parameters: list[Parameter], unit: Unit) -> int:
        """Elements of one unit of FSDP2 (of one decoder layer), unsharded."""
        numel = sum(p.numel for p in parameters if p.unit == unit)
        return numel // self.model.num_layers if unit == "layer" else numel

    # What stays between the steps

    @cached_property
    def resident(self) -> Parts:
        s, model, r = self.setting.storage_bytes, self.model, self.setting.rank
        parts: Parts = {"weights": s * self.local(list(model.parameters))}
        if self.method == "lora":
            parts["adapters"] = s * self.local(self.extra)
        if self.method == "logra":
            parts["update factors"] = s * self.local(self.extra)
            # sketch.Target._words: 64 signs a word, kept from the first forward after a refresh.
            parts["projections"] = sum(8 * r * -(-p.shape[1] // 64) for p in model.targets)
        if self.method == "logra_port":
            parts["sketches"] = sum(4 * r * p.shape[0] for p in model.targets)
            parts["projections"] = sum(4 * r * p.shape[1] for p in model.targets)
        parts["optimizer state"] = self.state_bytes
        return parts

    @cached_property
    def state_bytes(self) -> float:
        """Moments in the storage dtype, as torch.optim.AdamW makes them (``zeros_like`` of the parameter)."""
        s, n, model = self.setting.storage_bytes, self.setting.ranks, self.model
        if self.method == "lora":
            return 2 * s * self.local(self.extra)
        if self.method == "adam8bit":
            # Two bytes and, per block of 256, two fp32 scales; small tensors keep fp32 moments (bitsandbytes, torchao).
            sizes = [p.local_numel(n) for p in model.parameters]
            return sum(2 * size + 8 * size / 256 if size >= 4096 else 8 * size for size in sizes)
        if self.method == "galore":
            rest = [p for p in self.trained if not p.target]
            return 2 * s * self.local(rest) + sum(self._galore_state(p) for p in model.targets)
        if self.method in ("logra", "logra_port"):
            rows = sum(p.local_numel(n, 1) for p in model.targets)
            low_halves = 2 * self.local(list(model.targets)) if s == 2 else 0
            return 2 * s * self.local(self.trained) + 4 * rows + low_halves
        return 2 * s * self.local(self.trained)

    def _galore_state(self, p: Parameter) -> float:
        """Moments [longer side, r], counted as if sharded; projection [r, shorter side], on every rank."""
        longer, shorter = max(p.shape), min(p.shape)
        r = min(self.setting.rank, shorter)
        return 8 * longer * r / self.setting.ranks + 4 * r * shorter

    # Activations

    @cached_property
    def saved_by_layer(self) -> float:
        """What autograd saves inside of one decoder layer, its input apart."""
        m, t, r = self.model, self.setting.tokens, self.setting.rank
        c = self.setting.compute_bytes
        h, q, kv = m.hidden_size, m.query_size, m.kv_size
        f = m.intermediate_size * max(1, m.experts_per_token)
        dense = self.method not in ("lora", "logra", "logra_port")
        keeps_inputs = dense or self.method == "lora"
        norms_train = dense or (self.method != "lora" and self.setting.non_target == "adamw")
        # RMSNorm: its input in fp32 (the tensor itself if it is fp32: the layer's input is counted apart), the
        # normalised input if the norm's weight trains, one rms a token.
        num_norms = 4 if m.model_type == "gemma2" else 2
        widened = 4 * h * (num_norms if c < 4 else num_norms - 1)
        norm = widened + num_norms * (4 + (c * h if norms_train else 0))
        if m.head_norms:
            norm += (q + kv) * (4 + (c if norms_train else 0)) + 4 * (m.num_heads + m.num_kv_heads)
        # Flash attention: q, k, v, output, log-sum-exp; the output is also the input of o_proj.
        attention = c * (2 * q + 2 * kv) + 4 * m.num_heads
        # Inputs of the projections are only saved for the gradient of a weight (or adapter).
        mlp = c * f * (4 if keeps_inputs else 3)
        inputs = 2 * c * h if keeps_inputs else 0
        # sketch._Tap saves X A^T of every target; an adapter saves the same shape.
        num_targets = len(m.targets) // m.num_layers
        projected = c * r * num_targets if not dense and self.method != "logra_port" else 0
        return t * (norm + attention + mlp + inputs + projected)

    @cached_property
    def layer_input(self) -> float:
        return self.setting.compute_bytes * self.setting.tokens * self.model.hidden_size

    def activations(self, layers: int) -> float:
        """Saved by ``layers`` decoder layers that the backward has not reached."""
        inside = 0.0 if self.setting.checkpointing else self.saved_by_layer
        return layers * (self.layer_input + inside)

    @cached_property
    def layer_backward(self) -> float:
        """In the backward of one layer: the recomputed inside, gradients of two MLP activations and of the stream."""
        m, s = self.model, self.setting
        f = m.intermediate_size * max(1, m.experts_per_token)
        gradients = s.compute_bytes * s.tokens * (2 * f + m.hidden_size)
        return gradients + (self.saved_by_layer if s.checkpointing else 0)

    @cached_property
    def logits(self) -> float:
        return self.setting.compute_bytes * self.setting.tokens * self.model.vocab_size

    # Moments

    def _moment(self, name: str, **parts: float) -> Moment:
        named = {key.replace("_", " "): value for key, value in parts.items()}
        return Moment(name, {key: value for key, value in {**self.resident, **named}.items() if value})

    def gathered(self, *units: Unit) -> float:
        """Unsharded parameters of units in the computing dtype; the root stays gathered until the backward ends."""
        everything = list(self.model.parameters) + self.extra
        return self.setting.compute_bytes * sum(self.of_unit(everything, unit) for unit in ("root", *units))

    def reduced(self, layers: int, head: bool = True) -> float:
        """Sharded gradients of the last ``layers`` decoder layers and the head."""
        n, model = self.setting.ranks, self.model
        per_layer = sum(p.local_numel(n) for p in self.graded if p.unit == "layer") / model.num_layers
        of_head = sum(p.local_numel(n) for p in self.graded if p.unit == "head") if head else 0
        return self.setting.storage_bytes * (layers * per_layer + of_head)

    def gradients_of(self, unit: Unit) -> float:
        """Unsharded gradients as the backward leaves them."""
        return self.setting.compute_bytes * self.of_unit(self.graded, unit)

    def reduce_input(self, unit: Unit) -> float:
        """fp32 input of a unit's reduce-scatter; kept until the next unit's begins (FSDPParamGroup.post_backward)."""
        return 4 * self.of_unit(self.graded, unit)

    @cached_property
    def accumulated(self) -> float:
        """Unsharded fp32 gradients between micro-batches whose reduction is put off."""
        return 4.0 * sum(p.numel for p in self.graded) if self.setting.defers_reduction else 0.0

    def prefetched(self, *units: Unit) -> float:
        """Flat output of an all-gather that has not been waited for, or not been freed; one rank makes none."""
        if self.setting.ranks == 1:
            return 0.0
        everything = list(self.model.parameters) + self.extra
        return self.setting.compute_bytes * sum(self.of_unit(everything, unit) for unit in units)

    def forward_backward(self) -> Iterator[Moment]:
        """Of the last micro-batch. A backward prefetches the unit before (FSDPParamGroup._backward_prefetch)."""
        layers, tied, stream = self.model.num_layers, self.model.tied, self.layer_input
        head: Unit = "root" if tied else "head"
        embedding: Unit = "root" if tied else "embedding"
        only_untied: tuple[Unit, ...] = () if tied else ("head",)
        waiting = self.accumulated

        yield self._moment(
            "forward of the head",
            activations=self.activations(layers) + 2 * stream,
            logits=self.logits,
            gathered_layers=self.gathered(*only_untied) + self.prefetched(*only_untied),
            unsharded_gradients=waiting,
        )
        yield self._moment(
            "loss",
            activations=self.activations(layers) + 2 * stream,
            logits=self.log_probs_bytes,
            gathered_layers=self.gathered(),
            unsharded_gradients=waiting,
        )
        yield self._moment(
            "backward of the head",
            activations=self.activations(layers) + 3 * stream,
            logits=self.logits,
            gathered_layers=self.gathered(*only_untied) + self.prefetched("layer"),
            unsharded_gradients=waiting + self.gradients_of(head),
        )
        if not tied:
            yield self._moment(
                "reduction of the head",
                activations=self.activations(layers) + 2 * stream,
                gathered_layers=self.gathered() + self.prefetched("layer"),
                unsharded_gradients=waiting + self.gradients_of(head) + self.reduce_input(head),
            )
        root = self.gradients_of("root") if tied else 0.0
        for layer in (layers - 1, 0):
            before: Unit = "layer" if layer < layers - 1 else head
            held = self.reduce_input(before) if before != "root" else 0.0
            ahead: tuple[Unit, ...] = ("layer",) if layer else (() if tied else ("embedding",))
            gathered = self.gathered("layer") + self.prefetched(*ahead)
            done = self.reduced(layers - 1 - layer)
            yield self._moment(
                f"backward of layer {layer}, MLP",
                activations=self.activations(layer + 1) + self.layer_backward,
                gathered_layers=gathered,
                unsharded_gradients=waiting + root + held + self.largest_gradient,
                gradients=done,
            )
            yield self._moment(
                f"backward of layer {layer}, attention",
                activations=self.activations(layer + 1) + 6 * stream,
                gathered_layers=gathered,
                unsharded_gradients=waiting + root + held + self.gradients_of("layer"),
                gradients=done,
            )
            yield self._moment(
                f"reduction of layer {layer}",
                activations=self.activations(layer) + 2 * stream,
                gathered_layers=self.gathered() + self.prefetched(*ahead),
                unsharded_gradients=waiting + root + self.gradients_of("layer") + self.reduce_input("layer"),
                gradients=done,
            )
        waiting /= layers
        yield self._moment(
            "backward of the embedding",
            activations=stream,
            gathered_layers=self.gathered(*(() if tied else ("embedding",))),
            unsharded_gradients=waiting + root + self.reduce_input("layer") + self.gradients_of(embedding),
            gradients=self.reduced(layers),
        )
        # The root post-backward of FSDP2 comes last and brings the embedding's, whose input needs no gradient.
        yield self._moment(
            "reduction of the embedding",
            unsharded_gradients=waiting + self.gradients_of(embedding) + self.reduce_input(embedding),
            gradients=self.reduced(layers),
        )

    @cached_property
    def largest_gradient(self) -> float:
        """Unsharded gradient of down_proj, the first of a layer's."""
        mlp = [p for p in self.graded if p.unit == "layer" and ".mlp." in p.name]
        return self.setting.compute_bytes * max((p.numel for p in mlp), default=0)

    @cached_property
    def log_probs_bytes(self) -> float:
        """Logits and what their log-probabilities add until the head's backward has the gradient."""
        if self.setting.device == "cuda":
            return self.logits  # flash-attn's cross entropy writes the gradient over the logits
        return 3 * self.logits  # verl's logprobs_from_logits_v2: rows' gradients, stacked, beside the logits

    @cached_property
    def all_gradients(self) -> float:
        return self.setting.storage_bytes * self.local(self.graded)

    def adamw_temporaries(self, parameters: list[Parameter]) -> float:
        """torch.optim.AdamW: its foreach form on a GPU holds a square root of every second moment at once
        (``_multi_tensor_adam``, exp_avg_sq_sqrt); on a CPU it goes tensor by tensor with two (``_single_tensor_adam``).
        """
        s = self.setting.storage_bytes
        return s * self.local(parameters) if self.setting.device == "cuda" else 2 * s * self.largest_local(parameters)

    def optimizer_step(self) -> Iterator[Moment]:
        grads = self.all_gradients
        if self.method in ("adamw", "lora"):
            yield self._moment("AdamW", gradients=grads, optimizer_temporaries=self.adamw_temporaries(self.graded))
        elif self.method == "adam8bit":
            yield self._moment("8-bit Adam", gradients=grads)  # a fused kernel in place
        elif self.method == "galore":
            # One dense update at a time, and for a new subspace the factors of one gradient's SVD.
            rest = [p for p in self.trained if not p.target]
            svd = 3 * 4 * max(p.numel for p in self.model.targets)
            yield self._moment("GaLore", gradients=grads, optimizer_temporaries=self.adamw_temporaries(rest) + svd)
        elif self.method == "logra_port":
            yield self._moment(
                "AdamW on the rest", gradients=grads, optimizer_temporaries=self.adamw_temporaries(self.trained)
            )
        else:
            yield from self._logra_step(grads)

    def _logra_step(self, grads: float) -> Iterator[Moment]:
        """``optimizer.LoGRA``: propose, probe, commit, nested AdamW."""
        targets, r, n, cpu = self.model.targets, self.setting.rank, self.setting.ranks, self.setting.device == "cpu"
        sign = 1 if cpu else 4  # factor.sign_dtype

        def signs(p: Parameter) -> float:  # projection.unpack_signs: a byte index in int64 for 8 signs, and the signs
            return r * p.shape[1] * (1 + sign)

        def rows(p: Parameter, width: int) -> int:
            return p.local_numel(n, width)

        yield self._moment(
            "LoGRA: propose",
            gradients=grads,
            # row_codes; then projected_code_squared_norms: codes @ Gram.
            optimizer_temporaries=max(max(4 * rows(p, r) * 2, signs(p) + 4 * rows(p, r)) for p in targets),
        )
        codes = float(sum(rows(p, r) for p in targets)) if self.setting.sync == "low_rank" else 0.0
        block = 1 << (18 if cpu else 24)  # factor.block_rows
        yield self._moment(
            "LoGRA: commit",
            gradients=grads,
            # int8_codes; apply_codes_ in blocks of rows: product and, in nudge_ties_, a mask.
            optimizer_temporaries=codes
            + max(max(8 * rows(p, r), signs(p) + 8 * min(rows(p, p.shape[1]), block)) for p in targets),
        )
        if self.trained:
            yield self._moment(
                "LoGRA: AdamW on the rest",
                gradients=grads,
                optimizer_temporaries=codes + self.adamw_temporaries(self.trained),
            )

    def probe(self) -> Iterator[Moment]:
        """``probe.Probe`` between propose and commit: a forward with tangents, then plain ones in fp32 activations."""
        m, s, c = self.model, self.setting, self.setting.compute_bytes
        batch, length = s.probe_sequences, min(s.probe_max_tokens, s.seq_len)
        kept = batch * (length - min(s.prompt_len, length - 1)) * m.vocab_size
        scores = batch * m.num_heads * length * min(256, length)  # blockwise_attention.BLOCK
        stream = batch * length * (m.hidden_size + 3 * m.intermediate_size * max(1, m.experts_per_token))
        gathered = self.gathered("layer", "layer")
        head = self.gathered(*(() if m.tied else ("head",)))
        moved = 0.0
        if self.trained:
            moved = 2 * s.storage_bytes * self.local(self.trained)  # rest.RestDisplacement
        grads = self.all_gradients
        # Eager attention of a block of queries: scores, masked scores and fp32 softmax, each with its tangent; without
        # the tangent in fp32.
        yield self._moment(
            "probe: tangent", gradients=grads, gathered_layers=gathered, probe=scores * (4 * c + 20) + 2 * c * stream
        )
        yield self._moment("probe: tangent's logits", gradients=grads, gathered_layers=head, probe=4 * c * kept)
        yield self._moment(
            "probe: verification",
            gradients=grads,
            gathered_layers=gathered,
            probe=4 * kept + moved + 16 * scores + 4 * stream,
        )
        yield self._moment(
            "probe: verification's logits", gradients=grads, gathered_layers=head, probe=12 * kept + moved
        )

    def weight_sync(self) -> Iterator[Moment]:
        """What the trainer adds while it sends; gradients are gone."""
        if self.setting.sync == "none" or (self.method == "logra" and self.setting.sync == "low_rank"):
            # Factors are gathered in frames, twice while they are put together; the rest goes whole.
            rest = max((p.numel for p in self.trained), default=0)
            frames = 0 if self.setting.sync == "none" else 3 * self.setting.bucket_bytes / 8
            yield self._moment("weight sync", sync_buffers=max(frames, 6 * rest))
            return
        largest = max(p.numel for p in self.model.parameters)
        whole = (self.setting.storage_bytes + 2) * largest
        yield self._moment("weight sync", sync_buffers=whole + self.setting.bucket_bytes)

    def step(self) -> Iterator[Moment]:
        """The optimizer's step, the controller's probe included."""
        yield from self.optimizer_step()
        if self.method == "logra" and self.setting.kl:
            yield from self.probe()

    def training_step(self) -> list[Moment]:
        """One update, without the weight sync after it."""
        return [*self.forward_backward(), *self.step()]

    def moments(self) -> list[Moment]:
        """One update and the weight sync after it."""
        found = [*self.training_step(), *self.weight_sync()]
        if self.setting.critic:
            beside = sum(self.resident.values())
            found = [Moment(m.name, {**m.parts, "critic": beside}) for m in found]
        return found

    def peak(self) -> Moment:
        return max(self.moments(), key=lambda moment: moment.total)
