"""One weight sync from the trainer's side, the same on every trainer rank.

    plan = session.open(receivers, states)      what the workers have -> what they will get; collective
    for name, tensor in session.items(): ...    the message; collective
    done = session.close(problems)              what went wrong anywhere; False: go round once more

A session is also a plain iterable of the whole model, so whoever knows nothing of low-rank syncs gets a full one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from verl_logra.sync import wire
from verl_logra.sync.log import UpdateLog
from verl_logra.sync.plan import Plan, ReceiverState, choose
from verl_logra.sync.sender import Item, MessageSender, TrainedWeight

logger = logging.getLogger(__name__)


class TrainedModel(Protocol):
    """What a session needs to know of the model that is trained."""

    @property
    def seed(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def projection(self) -> str: ...

    @property
    def refusal(self) -> str:
        """Why its updates cannot be sent exactly; "" if they can."""

    def weights(self) -> list[TrainedWeight]:
        """The targets, in the order of the logged factors."""

    def parameters(self) -> Iterable[Item]:
        """All parameters, whole, under their checkpoint names; collective."""

    def changed_parameters(self) -> Iterable[Item]:
        """Those besides the targets that updates may have changed; collective."""

    def full_bytes(self) -> int:
        """Bytes of all parameters in bf16."""

    def device(self) -> torch.device: ...


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    full_sync_interval: int | None = None
    frame_bytes: int = 64 << 20
    max_updates: int = 64


class WeightSync:
    """The trainer's side over the whole run. Begins to log updates when the first low-rank session opens."""

    def __init__(self, model: TrainedModel, num_updates: int, listen: Callable[[UpdateLog], None]) -> None:
        self.model = model
        self.log = UpdateLog(num_updates)
        self._listen: Callable[[UpdateLog], None] | None = listen
        self.since_full: dict[str, int] = {}
        self.metrics: dict[str, float] = {}
        """Of the last sync that succeeded."""
        self.warned: set[str] = set()

    def restart(self, num_updates: int, why: str) -> None:
        """The weights changed in a way that no update describes."""
        self.log.restart(num_updates, why)

    def start_listening(self, num_updates: int) -> None:
        if self._listen is not None:
            self.log.restart(num_updates, self.log.why)
            self._listen(self.log)
            self._listen = None

    def session(self, num_updates: int) -> Session:
        return Session(self, num_updates)


class Session:
    """One sync; see the module. Not to be used twice."""

    def __init__(self, sync: WeightSync, num_updates: int) -> None:
        self.sync = sync
        self._num_updates = num_updates
        self._receivers = ""
        self._settings = SessionSettings()
        self._begin: wire.Begin | None = None
        self._message: MessageSender | None = None
        self._attempts = 0
        self._seconds = time.perf_counter()
        self.plan: Plan | None = None
        self.metrics: dict[str, float] = {}

    def __iter__(self) -> Iterator[Item]:
        yield from self.sync.model.parameters()

    def open(
        self, receivers: str, states: Sequence[ReceiverState], settings: SessionSettings = SessionSettings()
    ) -> Plan:
        """Plans the sync.

        Args:
            receivers: name of the group of workers that take part; groups are synced independently of each other.
            states: of the workers that this rank speaks for; other ranks speak for others.
        """
        sync, model = self.sync, self.sync.model
        if not model.refusal:
            sync.start_listening(self._num_updates)
        log, weights = sync.log, model.weights()
        log.max_updates = settings.max_updates
        targets = [(w.name, *w.shape) for w in weights]
        all_states, histories = _merged(list(states), log.history)
        log.history = histories[0]
        self._receivers, self._settings, self._attempts = receivers, settings, self._attempts + 1
        self.plan = choose(
            all_states,
            history=log.history,
            history_began=log.why,
            layout=wire.layout(targets, model.seed, model.rank, model.projection),
            oldest_base=log.oldest_base,
            last=log.last,
            refusal=model.refusal,
            syncs_since_full=sync.since_full.get(receivers, 0),
            full_sync_interval=settings.full_sync_interval,
        )
        self._report(self.plan)
        base = self.plan.base if self.plan.kind == "low_rank" else log.last
        updates = log.since(base) or []
        self._begin = wire.Begin(
            kind="low_rank" if self.plan.kind == "low_rank" else "full",
            history=log.history,
            base=base,
            last=log.last,
            seed=model.seed,
            rank=model.rank,
            projection=model.projection,
            targets=targets,
            updates=[wire.Update(number=u.number, refresh=u.refresh, decay=u.decay) for u in updates],
        )
        self._message = MessageSender(self._begin, weights, model.device(), settings.frame_bytes)
        return self.plan

    def items(self) -> Iterator[Item]:
        """The message. Walk it to the end on every rank, even when nothing is sent from there."""
        assert self.plan is not None and self._begin is not None and self._message is not None, "open comes first"
        log, model, begin = self.sync.log, self.sync.model, self._begin
        if self.plan.kind == "low_rank":
            updates = log.since(begin.base)
            assert updates is not None
            items = self._message.low_rank(updates, model.changed_parameters() if updates else ())
        elif self.plan.kind == "full":
            items = self._message.full(model.parameters())
        else:
            items = iter(model.parameters())
        for item in items:
            if log.last != begin.last:
                raise RuntimeError(
                    f"update {log.last} was committed while the weights of update {begin.last} were being sent: the "
                    f"receivers now hold a mixture and need a full sync"
                )
            yield item

    def close(self, problems: Sequence[str] = ()) -> bool:
        """Ends the attempt; False if it failed and another is due. Workers that were touched report a problem then,
        which makes the next message a full one.

        Args:
            problems: what went wrong at the workers that this rank speaks for, and here.

        Raises:
            RuntimeError: the second attempt failed as well.
        """
        assert self.plan is not None and self._begin is not None and self._message is not None, "open comes first"
        all_problems, _ = _merged(list(problems), "")
        if all_problems:
            if self.plan.kind == "plain" or self._attempts > 1:
                raise RuntimeError(f"{self.plan} failed, the rollout must not generate: {'; '.join(all_problems)}")
            logger.warning("%s failed, another follows: %s", self.plan, "; ".join(all_problems))
            return False
        sync = self.sync
        low_rank = self.plan.kind == "low_rank"
        sync.since_full[self._receivers] = sync.since_full.get(self._receivers, 0) + 1 if low_rank else 0
        full_bytes = sync.model.full_bytes()
        num_bytes = self._message.num_bytes if self.plan.kind != "plain" else full_bytes
        self.metrics = {
            "sync/bytes": float(num_bytes),
            "sync/full_bytes": float(full_bytes),
            "sync/ratio": num_bytes / full_bytes,
            "sync/updates": float(len(self._begin.updates)),
            "sync/log_bytes": float(sync.log.num_bytes()),
            "sync/seconds": time.perf_counter() - self._seconds,
            **self.plan.metrics(),
        }
        sync.metrics = self.metrics
        sync.log.done(self._receivers, self._begin.last)
        return True

    def _report(self, plan: Plan) -> None:
        if plan.kind == "low_rank" or (dist.is_initialized() and dist.get_rank() != 0):
            return
        if plan.kind == "plain" and plan.detail in self.sync.warned:
            return
        self.sync.warned.add(plan.detail)
        logger.warning("%s", plan)


def _merged(mine: list[Any], value: str) -> tuple[list[Any], list[str]]:
    """Lists of all trainer ranks joined, and everybody's value; collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine, [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (mine, value))
    return [item for items, _ in gathered for item in items], [v for _, v in gathered]
