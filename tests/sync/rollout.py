"""A rollout worker of plain tensors: fused projections, tensor-parallel shards, a loader that casts.

Written from vLLM's layout (q, k and v stacked; gate and up stacked; o and down cut by columns), not from our code.
"""

import torch
from torch import nn

from tests.tiny_models import loss_of, tokens
from verl_logra import LoGRA
from verl_logra.integrations.trained_model import LoGRATrainedModel
from verl_logra.sync.receiver import Receiver, Slice
from verl_logra.sync.session import SessionSettings, WeightSync

FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
BY_COLUMNS = ("o_proj", "down_proj")


class Rollout:
    """``num_workers`` workers, each with its shard of every parameter in ``dtype``."""

    def __init__(self, model, dtype, num_workers=1, low_half="host"):
        self.num_workers, self.dtype = num_workers, dtype
        self.shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
        self.workers = [Worker(self, i, low_half) for i in range(num_workers)]

    def states(self):
        return [dict(worker.receiver.state) for worker in self.workers]

    def whole(self, name):
        """A parameter put together from the workers' shards."""
        parts = [worker.part(name) for worker in self.workers]
        if self.num_workers == 1 or not self.is_split(name):
            return parts[0]
        return torch.cat(parts, dim=1 if name.split(".")[-2] in BY_COLUMNS else 0)

    def is_split(self, name):
        return name.split(".")[-2] in (*FUSED, *BY_COLUMNS)


class Worker:
    def __init__(self, rollout, index, low_half):
        self.rollout, self.index = rollout, index
        self.fused = {}
        for name in rollout.shapes:
            key, size = self.home(name)
            self.fused.setdefault(key, []).append((name, size))
        self.offsets = {}
        self.parameters = {}
        for key, parts in self.fused.items():
            start = 0
            for name, size in parts:
                self.offsets[name] = (key, start, size[0])
                start += size[0]
            self.parameters[key] = torch.full((start, *parts[0][1][1:]), torch.nan, dtype=rollout.dtype)
        # Partial checksums of all workers are added up, as an all-reduce would.
        self.receiver = Receiver(self.locate, self.sum_over_workers, low_half)

    def home(self, name):
        parts, shape = name.split("."), self.rollout.shapes[name]
        n = self.rollout.num_workers
        if len(parts) > 1 and parts[-2] in FUSED:
            return ".".join([*parts[:-2], FUSED[parts[-2]], parts[-1]]), (shape[0] // n, *shape[1:])
        if len(parts) > 1 and parts[-2] in BY_COLUMNS and len(shape) == 2:
            return name, (shape[0], shape[1] // n)
        return name, shape

    def part(self, name):
        key, start, size = self.offsets[name]
        return self.parameters[key][start : start + size]

    def ranges(self, name):
        rows, columns = self.rollout.shapes[name]
        n, i = self.rollout.num_workers, self.index
        if name.split(".")[-2] in FUSED:
            return range(i * rows // n, (i + 1) * rows // n), range(columns)
        if name.split(".")[-2] in BY_COLUMNS:
            return range(rows), range(i * columns // n, (i + 1) * columns // n)
        return range(rows), range(columns)

    def load(self, name, tensor):
        if tensor.dim() == 2 and self.rollout.is_split(name):
            rows, columns = self.ranges(name)
            tensor = tensor[rows.start : rows.stop, columns.start : columns.stop]
        elif self.rollout.is_split(name):  # a bias
            tensor = tensor.chunk(self.rollout.num_workers)[self.index]
        self.part(name).copy_(tensor)

    def locate(self, target, rows, columns):
        name = f"{target}.weight"
        assert self.rollout.shapes[name] == (rows, columns)
        mine = self.ranges(name)
        return Slice(block=lambda: self.part(name), rows=mine[0], columns=mine[1])

    def sum_over_workers(self, sums):
        if self.rollout.num_workers == 1:
            return sums
        return sum(partial_sums(worker) for worker in self.rollout.workers)


def partial_sums(worker):
    """Checksums of one worker's blocks, from a receiver that thinks it is alone."""
    receiver = worker.receiver
    original, receiver._sum_over_workers = receiver._sum_over_workers, lambda sums: sums
    try:
        return torch.tensor(list(receiver.checksums().values()))
    finally:
        receiver._sum_over_workers = original


def weight_sync_of(model, optimizer):
    return WeightSync(LoGRATrainedModel(model, optimizer), optimizer.num_updates, optimizer.listeners.append)


def send(weight_sync, rollout, optimizer, tamper=None, settings=None):
    """One sync, as the glue does it; returns the session and the plans that it went through.

    ``tamper(worker index, position, name, tensor)`` may return another tensor, None to drop the item, or a list of
    items to deliver instead.
    """
    session = weight_sync.session(optimizer.num_updates)
    plans = []
    for attempt in range(2):
        plans.append(session.open("rollout", rollout.states(), settings or SessionSettings()))
        for worker in rollout.workers:
            worker.receiver.start()
        problems = [""] * rollout.num_workers
        items = list(session.items())
        # All workers but the last get everything first, so that the last one's END sees their final sums.
        for position, (name, tensor) in enumerate(items):
            for i, worker in enumerate(rollout.workers):
                deliver(worker, i, position, name, tensor, tamper if attempt == 0 else None, problems)
        for worker, problem in zip(rollout.workers, problems, strict=True):
            if problem:
                worker.receiver.abandon(problem)
        if session.close([p for p in problems if p]):
            return session, plans
    raise AssertionError("close returned False twice")


def deliver(worker, index, position, name, tensor, tamper, problems):
    if problems[index]:
        return
    items = [(name, tensor)]
    if tamper is not None:
        changed = tamper(index, position, name, tensor)
        items = [] if changed is None else changed if isinstance(changed, list) else [(name, changed)]
    try:
        for name, tensor in items:
            if not worker.receiver.take(name, tensor):
                worker.load(name, tensor)
    except (ValueError, NotImplementedError) as error:
        problems[index] = str(error)


def train(model: nn.Module, optimizer: LoGRA, steps: int = 1, seed: int = 0) -> None:
    for step in range(steps):
        loss_of(model, tokens(seed=100 * seed + step)).backward()
        optimizer.step()
        optimizer.zero_grad()
