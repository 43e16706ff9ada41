"""A model under LoGRA as the weight sync sees it."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from verl_logra.core.projection import canonical_name
from verl_logra.optimizer import LoGRA
from verl_logra.sync.sender import Item, TrainedWeight, whole


class LoGRATrainedModel:
    """Implements ``sync.session.TrainedModel``.

    Args:
        module: the (sharded) model; its state dict names the parameters.
        optimizer: built on it.
        parameters: all parameters as a full sync sends them; the default gathers the state dict.
        rename: state dict -> the same under checkpoint names.
        export: what else a full sync does to parameters on their way out.
        device: where parameters are gathered.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: LoGRA,
        *,
        parameters: Callable[[], Iterable[Item]] | None = None,
        rename: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda state: state,
        export: Callable[[Iterable[Item]], Iterable[Item]] = lambda items: items,
        device: torch.device | str = "cpu",
    ) -> None:
        config = optimizer.config
        self.seed, self.rank, self.projection = config.seed, config.rank, config.projection
        self._module, self._optimizer, self._rename = module, optimizer, rename
        self._parameters, self._export = parameters, export
        self._device = torch.device(device)
        self.refusal = _refusal(optimizer) or self._renamed_targets()
        rest = {id(p) for group in optimizer.param_groups[1:] for p in group["params"]}
        named = module.named_parameters(remove_duplicate=False)
        self._changing = {canonical_name(name) for name, p in named if id(p) in rest} - _tied_copies(module)

    def _renamed_targets(self) -> str:
        names = self._rename(self._module.state_dict()).keys()
        lost = [w.name for w in self.weights() if f"{w.name}.weight" not in names]
        return f"{len(lost)} targets have another name in checkpoints: {', '.join(lost[:4])}" if lost else ""

    def device(self) -> torch.device:
        return self._device

    def weights(self) -> list[TrainedWeight]:
        return [
            TrainedWeight(name=name, weight=weight, low_half=low)
            for name, weight, low in self._optimizer.target_weights()
        ]

    def parameters(self) -> Iterable[Item]:
        if self._parameters is not None:
            return self._parameters()
        return self._whole(self._rename(self._module.state_dict()))

    def changed_parameters(self) -> Iterable[Item]:
        state = {n: p for n, p in self._module.state_dict().items() if canonical_name(n) in self._changing}
        return self._whole(self._rename(state))

    def _whole(self, state: dict[str, Tensor]) -> Iterable[Item]:
        return self._export((name, whole(tensor, self._device)) for name, tensor in state.items())

    def full_bytes(self) -> int:
        return sum(2 * p.numel() for n, p in self._module.state_dict().items())


def _tied_copies(module: nn.Module) -> set[str]:
    """Second names of tied parameters that Hugging Face leaves out of checkpoints, so that rollouts do without them."""
    left_out = getattr(module, "_tied_weights_keys", None) or ()
    first = {name for name, _ in module.named_parameters()}
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {canonical_name(name) for name in every - first} & set(left_out)


def _refusal(optimizer: LoGRA) -> str:
    config = optimizer.config
    if config.projection != "rademacher":
        return f"projection={config.projection}: its elements are not the same bits on every device; set rademacher"
    if config.factor_dtype != "int8":
        return f"factor_dtype={config.factor_dtype}: products of such factors are not exact; set int8"
    if 127 * config.rank >= 1 << 24:
        return f"rank={config.rank}: sums of so many codes are not exact in float32; set at most {(1 << 24) // 127}"
    return ""
