"""The disaggregated path: verl's checkpoint engine interface, over sockets, without Ray."""

import asyncio
import time

import pytest
import torch

pytest.importorskip("verl")

import verl  # noqa: F401  (registers the platform)
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from tests.sync.rollout import Rollout, deliver, train
from tests.sync.test_exact import assert_equal, setup
from verl_logra.integrations.checkpoint_engine import LoGRACheckpointEngine


def engines(num_receivers, bucket_bytes=1 << 13, **settings):
    settings = {"timeout_seconds": 5.0} | settings
    sender = LoGRACheckpointEngine(bucket_bytes, is_master=True, **settings)
    return sender, [LoGRACheckpointEngine(bucket_bytes, **settings) for _ in range(num_receivers)]


async def receive(engine, worker, tamper=None, stop_at=None):
    """What a rollout worker does: the adapter and its vLLM worker in one."""
    session = engine.receive_weights()
    done, attempt = False, 0
    while not done:
        await session.open([worker.receiver.state])
        worker.receiver.start()
        problems, position = [""], 0
        async for name, tensor in session.items():
            if position == stop_at:
                return  # it died
            deliver(worker, 0, position, name, tensor, tamper if attempt == 0 else None, problems)
            position += 1
        if problems[0]:
            worker.receiver.abandon(problems[0])
        done = await session.close([p for p in problems if p])
        attempt += 1


async def one_sync(sender, receivers, rollouts, session, **options):
    """As verl's CheckpointEngineManager does it; ``options`` are for the first receiver."""
    metadata = [engine.prepare() for engine in [sender, *receivers]]
    mine, theirs = LoGRACheckpointEngine.build_topology(1, len(receivers), metadata)
    sender.init_process_group(**{key: values[0] for key, values in mine.items()})
    for i, engine in enumerate(receivers):
        engine.init_process_group(**{key: values[i] for key, values in theirs.items()})
    tasks = [
        receive(engine, rollout.workers[0], **(options if i == 0 else {}))
        for i, (engine, rollout) in enumerate(zip(receivers, rollouts, strict=True))
    ]
    results = await asyncio.gather(sender.send_weights(session), *tasks, return_exceptions=True)
    for engine in [sender, *receivers]:
        engine.finalize()
    return results


@pytest.mark.parametrize("num_receivers", [1, 3])
def test_rollouts_equal_the_trainer_after_every_sync(num_receivers):
    model, optimizer, weight_sync = setup(non_target="adamw")
    sender, receivers = engines(num_receivers)
    rollouts = [Rollout(model, torch.bfloat16) for _ in receivers]
    for step in range(4):
        session = weight_sync.session(optimizer.num_updates)
        metrics, *rest = asyncio.run(one_sync(sender, receivers, rollouts, session))
        assert rest == [None] * num_receivers
        assert metrics["sync/full"] == (step == 0) and metrics["sync/updates"] == (2 if step else 0)
        for rollout in rollouts:
            assert_equal(model, optimizer, rollout)
        train(model, optimizer, 2, seed=step)


def test_a_corrupted_byte_is_healed_within_the_same_sync():
    model, optimizer, weight_sync = setup()
    sender, receivers = engines(2)
    rollouts = [Rollout(model, torch.bfloat16) for _ in receivers]
    asyncio.run(one_sync(sender, receivers, rollouts, weight_sync.session(0)))
    train(model, optimizer, 1)

    def tamper(worker, position, name, tensor):
        tensor = tensor.clone()
        tensor.view(-1).view(torch.uint8)[-9] ^= 4 * (position == 2)
        return tensor

    session = weight_sync.session(1)
    metrics, *rest = asyncio.run(one_sync(sender, receivers, rollouts, session, tamper=tamper))
    assert rest == [None, None] and metrics["sync/full"] == 1
    for rollout in rollouts:
        assert_equal(model, optimizer, rollout)


def test_a_receiver_that_dies_is_named_in_bounded_time_and_the_next_sync_heals():
    model, optimizer, weight_sync = setup()
    sender, receivers = engines(2, timeout_seconds=1.0)
    rollouts = [Rollout(model, torch.bfloat16) for _ in receivers]
    asyncio.run(one_sync(sender, receivers, rollouts, weight_sync.session(0)))
    train(model, optimizer, 1)
    start = time.monotonic()
    error, _, other = asyncio.run(one_sync(sender, receivers, rollouts, weight_sync.session(1), stop_at=2))
    assert time.monotonic() - start < 8
    assert isinstance(error, RuntimeError) and "receiver 0 gave no sign of life" in str(error)
    assert isinstance(other, RuntimeError)  # the surviving one knows that it must not generate
    metrics, *rest = asyncio.run(one_sync(sender, receivers, rollouts, weight_sync.session(1)))
    assert rest == [None, None] and metrics["sync/full"] == 1
    for rollout in rollouts:
        assert_equal(model, optimizer, rollout)


def test_a_sender_that_dies_leaves_receivers_with_a_clear_error_in_bounded_time():
    model, optimizer, weight_sync = setup()
    sender, receivers = engines(1, bucket_bytes=512, timeout_seconds=1.0)
    rollouts = [Rollout(model, torch.bfloat16)]
    asyncio.run(one_sync(sender, receivers, rollouts, weight_sync.session(0)))
    train(model, optimizer, 1)

    class Died(BaseException):
        pass

    class DyingSession(type(weight_sync.session(1))):
        def items(self):
            for i, item in enumerate(super().items()):
                if i == 8:
                    raise Died
                yield item

    start = time.monotonic()
    died, late = asyncio.run(one_sync(sender, receivers, rollouts, DyingSession(weight_sync, 1)))
    assert time.monotonic() - start < 8
    assert isinstance(died, Died)
    assert isinstance(late, TimeoutError) and "timeout_seconds" in str(late)
    assert rollouts[0].states()[0]["problem"] == "a weight sync did not finish"
    metrics, *rest = asyncio.run(one_sync(sender, receivers, rollouts, weight_sync.session(1)))
    assert rest == [None] and metrics["sync/full"] == 1
    assert_equal(model, optimizer, rollouts[0])


def test_weights_without_logra_are_refused():
    sender, _ = engines(0)
    with pytest.raises(ValueError, match="optimizer_impl=verl_logra"):
        asyncio.run(sender.send_weights(iter([("w", torch.zeros(1))])))


def test_the_older_trainers_colocated_use_is_refused_with_the_key_to_set():
    sender, _ = engines(0)
    metadata = [sender.prepare(), sender.prepare()]  # the same worker as actor and as rollout
    with pytest.raises(ValueError, match=r"engine_kwargs\.logra\.enable=True"):
        LoGRACheckpointEngine.build_topology(1, 1, metadata)


def test_unknown_settings_are_refused_with_the_closest_name():
    with pytest.raises(ValueError, match="did you mean 'low_half'"):
        LoGRACheckpointEngine(1, lowhalf="host")


@CheckpointEngineRegistry.register("queue_of_named_tensors")
class QueueEngine(CheckpointEngine):
    """Stands for verl's nccl engine: one way, named tensors, a group set up from every worker's metadata."""

    queues: list = []  # noqa: RUF012

    def __init__(self, bucket_size, is_master=False):
        self.is_master = is_master

    def prepare(self):
        return {"master": self.is_master}

    @classmethod
    def build_topology(cls, actors, rollouts, metadata):
        assert [m["master"] for m in metadata] == [True] + [False] * (actors + rollouts - 1)
        cls.queues = [asyncio.Queue() for _ in range(rollouts)]
        return {"rank": list(range(actors))}, {"rank": list(range(rollouts))}

    def init_process_group(self, rank):
        self.rank = rank

    def finalize(self):
        del self.rank

    async def send_weights(self, weights, global_steps=None):
        for item in weights:
            for queue in self.queues:
                queue.put_nowait(item)
        for queue in self.queues:
            queue.put_nowait(None)

    async def receive_weights(self, global_steps=None):
        while (item := await self.queues[self.rank].get()) is not None:
            yield item


def test_messages_travel_by_any_engine_of_verl_that_carries_named_tensors():
    model, optimizer, weight_sync = setup()
    sender, receivers = engines(2, transport="queue_of_named_tensors")
    rollouts = [Rollout(model, torch.float32) for _ in receivers]
    for step in range(3):
        session = weight_sync.session(optimizer.num_updates)
        metrics, *rest = asyncio.run(one_sync(sender, receivers, rollouts, session))
        assert rest == [None, None] and metrics["sync/full"] == (step == 0)
        for rollout in rollouts:
            assert_equal(model, optimizer, rollout)
        train(model, optimizer, 1, seed=step)
