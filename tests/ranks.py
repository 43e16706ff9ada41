"""Runs a function in several gloo ranks, each a fresh process, and hands back what each of them returned."""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank_main(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        torch.save(function(rank, *args), f"{folder}/result{rank}")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``[function(rank, *args) for every rank]``; an error in any rank is raised here with its traceback."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (world_size, folder, function, args), nprocs=world_size)
        return [torch.load(f"{folder}/result{rank}", weights_only=False) for rank in range(world_size)]
