"""Where a target's weight lives inside vLLM's parameters: fused, and cut by tensor parallelism."""

from collections.abc import Callable

from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from verl_logra.sync.receiver import Slice


class Layout:
    """Finds targets in one vLLM model. ``weight_of(layer)`` is the tensor to update, ``[rows, columns]`` here."""

    def __init__(
        self, model: nn.Module, weight_of: Callable[[LinearBase], Tensor] = lambda layer: layer.weight
    ) -> None:
        self._modules = dict(model.named_modules())
        self._packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        if mapper is not None and hasattr(mapper, "get_unstacked_mapper"):
            mapper = mapper.get_unstacked_mapper()  # newer vLLM also fuses in it
        self._mapper = mapper
        self._weight_of = weight_of

    def locate(self, name: str, out_features: int, in_features: int) -> Slice:
        """This worker's part of the target ``name``.

        Raises:
            NotImplementedError: the target is in no layer that can be updated exactly.
        """
        layer, index = self._find(name)
        if not isinstance(layer.quant_method, UnquantizedLinearMethod):
            method = type(layer.quant_method).__name__
            raise NotImplementedError(f"vLLM holds {name} quantised ({method}), where an update cannot be exact")
        start, rows, columns, counted = _place(layer, index, out_features, in_features)
        inside = max(rows.stop, 0) <= out_features and columns.stop <= in_features
        block = self._weight_of(layer)
        if not inside or start + len(rows) > block.shape[0] or len(columns) != block.shape[1]:
            raise NotImplementedError(
                f"{name} [{out_features}, {in_features}] does not fit {type(layer).__name__} {tuple(block.shape)}: "
                f"rows {rows}, columns {columns} from row {start}"
            )
        return Slice(
            block=lambda: self._weight_of(layer).data[start : start + len(rows)],
            rows=rows,
            columns=columns,
            counted=counted,
        )

    def _find(self, name: str) -> tuple[LinearBase, int | None]:
        """The layer, and the target's place among those fused into it."""
        path = name
        if self._mapper is not None:
            mapped = self._mapper._map_name(f"{name}.weight")
            path = (mapped or name).removesuffix(".weight")
        layer = self._modules.get(path)
        index = None
        if layer is None:
            parent, _, leaf = path.rpartition(".")
            for fused, parts in self._packed.items():
                if leaf in parts and f"{parent}.{fused}" in self._modules:
                    layer, index = self._modules[f"{parent}.{fused}"], parts.index(leaf)
        if not isinstance(layer, LinearBase):
            what = "no module" if layer is None else f"a {type(layer).__name__}"
            raise NotImplementedError(f"vLLM's model has {what} for the target {name}")
        return layer, index


def _place(layer: LinearBase, index: int | None, out_features: int, in_features: int) -> tuple[int, range, range, bool]:
    """First row inside the layer's weight, rows and columns of the whole target, whether this worker counts it."""
    rank = layer.tp_rank
    columns = range(in_features)
    if isinstance(layer, QKVParallelLinear) and index is not None:
        part = "qkv"[index]
        size = layer._get_shard_size_mapping(part)
        replicas = 1 if part == "q" else layer.num_kv_head_replicas
        first = rank // replicas * size
        return layer._get_shard_offset_mapping(part), range(first, first + size), columns, rank % replicas == 0
    if isinstance(layer, MergedColumnParallelLinear) and index is not None:
        sizes = [size // layer.tp_size for size in layer.output_sizes]
        first = rank * sizes[index]
        return sum(sizes[:index]), range(first, first + sizes[index]), columns, True
    if isinstance(layer, RowParallelLinear):
        size = layer.input_size_per_partition
        return 0, range(out_features), range(rank * size, rank * size + size), True
    if isinstance(layer, ColumnParallelLinear) and index is None:
        size = layer.output_size_per_partition
        return 0, range(rank * size, rank * size + size), columns, True
    if isinstance(layer, ReplicatedLinear):
        return 0, range(out_features), columns, rank == 0
    raise NotImplementedError(f"the layout of {type(layer).__name__} is not known")
