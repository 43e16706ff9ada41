"""verl's vLLM rollout with the low-rank weight sync: the adapter on the trainer's side and the server.

Both are verl's own classes until ``sync_settings`` says that the sync is on and the weights come from a LoGRA engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Protocol

import ray
import torch
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from verl_logra.integrations.bounded_transfer import BoundedSender
from verl_logra.integrations.sync_settings import SyncSettings, sync_settings
from verl_logra.sync.plan import Plan, ReceiverState, empty_state
from verl_logra.sync.sender import Item
from verl_logra.sync.session import Session

logger = logging.getLogger(__name__)

WORKER_EXTENSION = "verl_logra.integrations.vllm_worker.LoGRAWorkerExtension"
_REPLACED_EXTENSIONS = (
    None,
    "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension",
    "verl_logra.cpu.vllm_worker.CPUWorkerExtension",
    WORKER_EXTENSION,
)


class RemoteSession(Protocol):
    """``sync.session.Session`` as its receivers see it, wherever the trainer is."""

    async def open(self, states: list[ReceiverState]) -> Plan: ...

    def items(self) -> AsyncIterator[Item] | Iterator[Item]: ...

    async def close(self, problems: list[str]) -> bool: ...

    def everything(self) -> AsyncIterator[Item] | Iterator[Item]:
        """All parameters once more, for verification; after ``close`` returned True."""


class ColocatedSession:
    """A session of the trainer in this very process."""

    def __init__(self, session: Session, settings: SyncSettings, bucket_bytes: int) -> None:
        self._session, self._settings = session, settings.session(bucket_bytes)

    async def open(self, states: list[ReceiverState]) -> Plan:
        return self._session.open("colocated", states, self._settings)

    def items(self) -> Iterator[Item]:
        return self._session.items()

    async def close(self, problems: list[str]) -> bool:
        return self._session.close(problems)

    def everything(self) -> Iterator[Item]:
        return iter(self._session)


class LoGRAServerAdapter(ServerAdapter):
    """verl's adapter; hands sessions to workers that can take them."""

    _worker_seconds: Sequence[dict[str, float]] = ()
    """Of the last message, by worker and part."""

    @torch.no_grad()
    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        settings = sync_settings(self.config.checkpoint_engine)
        if isinstance(weights, Session) and settings is not None:
            bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
            session: RemoteSession = ColocatedSession(weights, settings, bucket_bytes)
        elif hasattr(weights, "open") and not isinstance(weights, Session):
            session = weights
        else:
            return await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **kwargs)
        assert settings is not None, "a remote session comes from backend=logra, which switches the sync on"
        start = time.perf_counter()
        plan = await self._sync(session, settings, global_steps, kwargs)
        if settings.verify:
            await self._verify(session, plan, time.perf_counter() - start, global_steps, kwargs)
        return None

    async def _sync(
        self, session: RemoteSession, settings: SyncSettings, global_steps: int | None, kwargs: Any
    ) -> Plan:
        done = False
        while not done:
            plan = await session.open(await self._states(settings))
            if plan.kind == "plain":
                await super().update_weights(session.items(), global_steps=global_steps, **kwargs)
                problems = []
            else:
                problems = await self._deliver(session, plan, settings)
            done = await session.close(problems)
        if self._has_server:
            await self.server_handle.clear_kv_cache.remote()
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)
        return plan

    async def _states(self, settings: SyncSettings) -> list[ReceiverState]:
        """States of the workers of this replica; empty on ranks that do not speak for it."""
        if not self._ensure_server_handle():
            return []
        call = self._execute_method("logra_state", kwargs={"low_half": settings.low_half})
        try:
            return await asyncio.wait_for(call, settings.timeout_seconds)
        except Exception as error:  # the other ranks wait to hear about it
            return [empty_state(problem=f"replica {self.replica_rank} does not answer: {_text(error)}")]

    async def _deliver(self, session: RemoteSession, plan: Plan, settings: SyncSettings) -> list[str]:
        """Sends the message to the worker on this device; returns what went wrong."""
        future = await self._execute_method(
            "logra_receive",
            non_block=True,
            kwargs={
                "full": plan.kind == "full",
                "use_shm": self.use_shm,
                "timeout_seconds": settings.timeout_seconds,
            },
        )
        sender = BoundedSender(
            zmq_handle=self.zmq_handle,
            bucket_size_mb=self.config.checkpoint_engine.update_weights_bucket_megabytes,
            use_shm=self.use_shm,
            seconds=settings.timeout_seconds,
        )
        problems = []
        items = session.items()
        try:
            await sender.async_send_weights(items)
        except Exception as error:
            problems.append(f"sending to a worker of replica {self.replica_rank} failed: {_text(error)}")
            await _drain(items)  # building the message is collective: the other ranks still need this one
        if future is not None:
            try:
                results = await asyncio.wait_for(_awaited(future), settings.timeout_seconds)
                self._worker_seconds = [result["seconds"] for result in results]
                problems += [result["problem"] for result in results if result["problem"]]
            except Exception as error:
                problems.append(f"replica {self.replica_rank} does not answer: {_text(error)}")
        return problems

    async def _verify(
        self, session: RemoteSession, plan: Plan, seconds: float, global_steps: int | None, kwargs: Any
    ) -> None:
        """Sends everything in full by verl's own way and compares what vLLM computed with before and after.

        Raises:
            RuntimeError: a byte differs.
        """
        await self._execute_method("logra_remember")
        start = time.perf_counter()
        await super().update_weights(session.everything(), global_steps=global_steps, **kwargs)
        full_seconds = time.perf_counter() - start
        results = await self._execute_method("logra_compare")
        for worker, result in enumerate(results or []):
            if result["differ"]:
                raise RuntimeError(
                    f"after a {plan}, step {global_steps}: worker {worker} of replica {self.replica_rank} computes "
                    f"with other weights than a full sync gives; bytes that differ: {result['differ']}"
                )
            logger.warning(
                "%s verified at step %s: 0 bytes differ in %d elements of worker %d of replica %d; it took "
                "%.3f s (%s), a full sync by verl alone %.3f s (%s)",
                plan,
                global_steps,
                result["elements"],
                worker,
                self.replica_rank,
                seconds,
                _parts(self._worker_seconds[worker] if worker < len(self._worker_seconds) else {}),
                full_seconds,
                _parts(result["seconds"]),
            )


async def _awaited(future: Any) -> Any:
    return await future


async def _drain(items: Any) -> None:
    if hasattr(items, "__aiter__"):
        async for _ in items:
            pass
    else:
        for _ in items:
            pass


def _parts(seconds: dict[str, float]) -> str:
    """Of one worker."""
    return ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class LoGRAHttpServer(vLLMHttpServer):
    """verl's server, with our worker extension, answers from workers, and weights that outlive a sleep."""

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        configured = engine_kwargs.get("worker_extension_cls")
        if configured not in _REPLACED_EXTENSIONS:
            raise ValueError(
                f"rollout.engine_kwargs.vllm.worker_extension_cls={configured} has no receiver for low-rank weight "
                f"syncs: derive it from {WORKER_EXTENSION} and name {WORKER_EXTENSION} here, or switch the sync off "
                f"(rollout.checkpoint_engine.engine_kwargs.logra.enable=False)"
            )
        engine_kwargs["worker_extension_cls"] = WORKER_EXTENSION

    async def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """As verl's, but hands back what the workers return."""
        return await self.engine.collective_rpc(method=method, timeout=timeout, args=args, kwargs=kwargs)

    def _resolve_sleep_level(self) -> int:
        """Level 2 discards weights, and an update needs those it is about; level 1 keeps them in host memory."""
        return min(1, super()._resolve_sleep_level())


class LoGRAReplica(vLLMReplica):
    """verl's replica, with our server when the low-rank sync is on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if sync_settings(self.config.checkpoint_engine) is not None:
            self.server_class = ray.remote(LoGRAHttpServer)
