"""``rollout.checkpoint_engine.backend=logra``: the low-rank weight sync between a trainer and rollouts elsewhere.

What the messages travel by is a checkpoint engine of verl's that carries named tensors (nccl, hccl), or on a CPU the
control channel itself. The control channel tells the trainer what the receivers have, the receivers what is coming, and
the trainer how it went.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name

from verl_logra.integrations.control_channel import MasterChannel, ReceiverChannel
from verl_logra.integrations.sync_settings import settings_from
from verl_logra.sync.plan import Plan, ReceiverState, empty_state
from verl_logra.sync.sender import Item
from verl_logra.sync.session import Session

logger = logging.getLogger(__name__)

_TRANSPORTS = {"cpu": "zmq", "cuda": "nccl", "npu": "nccl"}  # verl registers hccl under the name nccl


@CheckpointEngineRegistry.register("logra")
class LoGRACheckpointEngine(CheckpointEngine):
    """Settings: ``sync_settings.SyncSettings``."""

    wire_format = "named_tensors"

    def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
        self.settings = settings_from(settings)
        self.bucket_size, self.is_master = bucket_size, is_master
        self.transport = self.settings.transport or _TRANSPORTS[get_device_name()]
        self._carrier: CheckpointEngine | None = None
        if self.transport != "zmq":
            options = {"multi_sender": False} if self.transport == "nccl" and get_device_name() == "cuda" else {}
            self._carrier = CheckpointEngineRegistry.new(
                self.transport, bucket_size=bucket_size, is_master=is_master, **options
            )
        self._master: MasterChannel | None = None
        self._channel: ReceiverChannel | None = None

    def prepare(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {"transport": self.transport, "master": None, "carrier": None}
        if self.is_master:
            if self._master is None:
                ip = ray.util.get_node_ip_address().strip("[]")
                self._master = MasterChannel(ip, self.settings.timeout_seconds)
            metadata["master"] = (self._master.address, self._master.new_sync())
        if self._carrier is not None:
            metadata["carrier"] = self._carrier.prepare()
        return metadata

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        masters = [m["master"] for m in metadata if m["master"] is not None]
        if len(masters) != 1:
            raise ValueError(
                "checkpoint_engine.backend=logra was asked to sync a trainer with rollouts in its own processes, as "
                "trainer.use_v1=False does: set trainer.use_v1=True, or checkpoint_engine.backend=naive with "
                "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.logra.enable=True"
            )
        carrier: tuple[dict[str, list[Any]], dict[str, list[Any]]] = {}, {}
        transport = metadata[0]["transport"]
        if transport != "zmq":
            carrier = CheckpointEngineRegistry.get(transport).build_topology(
                actor_wg_world_size, rollout_world_size, [m["carrier"] for m in metadata]
            )
        sides = []
        for size, first, arguments in (
            (actor_wg_world_size, None, carrier[0]),
            (rollout_world_size, 0, carrier[1]),
        ):
            sides.append(
                {
                    "master": masters * size,
                    "receiver": list(range(size)) if first is not None else [None] * size,
                    "num_receivers": [rollout_world_size] * size,
                    "carrier": [{key: values[i] for key, values in arguments.items()} for i in range(size)],
                }
            )
        return sides[0], sides[1]

    def init_process_group(
        self, master: tuple[str, str], receiver: int | None, num_receivers: int, carrier: dict[str, Any]
    ) -> None:
        if self._master is not None:
            self._master.expect(num_receivers)
        if receiver is not None:
            # The trainer waits for each receiver in turn and must be the first to give up, or one that died would
            # make those that live give up as well instead of being told.
            self._channel = ReceiverChannel(*master, receiver, 3 * self.settings.timeout_seconds)
        if self._carrier is not None:
            self._carrier.init_process_group(**carrier)

    def finalize(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._carrier is not None:
            self._carrier.finalize()

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Sends one sync; runs on every trainer rank.

        Raises:
            ValueError: the weights do not come from a LoGRA engine.
            RuntimeError: the receivers could not be brought to the trainer's weights.
        """
        if not isinstance(weights, Session):
            raise ValueError(
                "checkpoint_engine.backend=logra sends the updates of LoGRA: set actor.optim.optimizer_impl=verl_logra "
                "and actor.optim.optimizer=LoGRA, or another backend"
            )
        settings = self.settings.session(self.bucket_size)
        done = False
        while not done:
            states = await asyncio.to_thread(self._gather_states)
            plan = weights.open("disaggregated", states, settings)
            if self._master is not None:
                self._master.broadcast(plan)
            problems = await self._send(weights.items())
            if self._master is not None:
                for receiver, problem in (await asyncio.to_thread(self._master.gather)).items():
                    problems += [f"receiver {receiver}: {text}" for text in problem]
                problems += [f"receiver {r} gave no sign of life" for r in sorted(self._master.silent)]
            try:
                done = weights.close(problems)
            except RuntimeError as error:
                if self._master is not None:
                    self._master.broadcast(str(error))
                raise
            if self._master is not None:
                self._master.broadcast(done)
        if self.settings.verify:
            problems = await self._send(iter(weights))
            if problems:
                raise RuntimeError(f"the weights could not be sent for verification: {'; '.join(problems)}")
        return weights.metrics

    def _gather_states(self) -> list[ReceiverState]:
        if self._master is None:
            return []
        states = [state for states in self._master.gather().values() for state in states]
        silent = [empty_state(problem=f"receiver {r} gave no sign of life") for r in sorted(self._master.silent)]
        return states + silent

    async def _send(self, items: Iterator[Item]) -> list[str]:
        """Walks the message to its end on every rank, since building it is collective; sends it from the master."""
        problems: list[str] = []
        try:
            if self._carrier is not None:
                await self._carrier.send_weights(items)
            elif self._master is not None:
                await asyncio.to_thread(self._send_buckets, self._master, items)
        except Exception as error:
            logger.exception("sending a weight sync failed")
            problems.append(f"{type(error).__name__}: {error}")
        for _ in items:
            pass
        return problems

    @torch.no_grad()
    def _send_buckets(self, master: MasterChannel, items: Iterator[Item]) -> None:
        bucket: list[Item] = []
        size = 0
        for name, tensor in items:
            if bucket and size + tensor.nbytes > self.bucket_size:
                self._send_bucket(master, bucket, is_last=False)
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        self._send_bucket(master, bucket, is_last=True)

    def _send_bucket(self, master: MasterChannel, bucket: list[Item], is_last: bool) -> None:
        """One bucket to everybody; returns when all that still answer have it, so that one is in memory at a time."""
        meta = [(name, tensor.dtype, tensor.shape) for name, tensor in bucket]
        data = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8).cpu() for _, t in bucket])
        master.broadcast((meta, is_last), data.numpy())
        master.gather()

    def receive_weights(self, global_steps: int | None = None) -> ReceivingSession:
        assert self._channel is not None, "init_process_group comes first"
        return ReceivingSession(self._channel, self._carrier)


class ReceivingSession:
    """A session of a trainer elsewhere; see ``rollout.RemoteSession``. Iterated plainly it asks for a full sync."""

    def __init__(self, channel: ReceiverChannel, carrier: CheckpointEngine | None) -> None:
        self._channel, self._carrier = channel, carrier

    async def open(self, states: list[ReceiverState]) -> Plan:
        self._channel.send(states)
        plan, _ = await asyncio.to_thread(self._channel.receive)
        return plan

    def items(self) -> AsyncIterator[Item]:
        if self._carrier is not None:
            return self._carrier.receive_weights()
        return self._receive_buckets()

    async def _receive_buckets(self) -> AsyncIterator[Item]:
        is_last = False
        while not is_last:
            (meta, is_last), buffer = await asyncio.to_thread(self._channel.receive)
            data = torch.frombuffer(bytearray(buffer), dtype=torch.uint8)
            offset = 0
            for name, dtype, shape in meta:
                size = shape.numel() * dtype.itemsize
                yield name, data[offset : offset + size].clone().view(dtype).view(shape)
                offset += size
            self._channel.send("next")

    async def close(self, problems: list[str]) -> bool:
        self._channel.send(problems)
        done, _ = await asyncio.to_thread(self._channel.receive)
        if isinstance(done, str):
            raise RuntimeError(done)
        return done

    def everything(self) -> AsyncIterator[Item]:
        return self.items()

    async def __aiter__(self) -> AsyncIterator[Item]:
        await self.open([empty_state(refusal="the rollout engine has no receiver for low-rank updates; use vllm")])
        async for item in self.items():
            yield item
        await self.close([])
