"""The colocated path with verl's and vLLM's own parts: adapter, shared memory, worker extension, packed layers.

Only Ray and the engine around vLLM's worker are stood in for.
"""

import asyncio
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")
pytest.importorskip("verl")

from vllm.platforms import current_platform

from tests.sync.rollout import weight_sync_of
from tests.sync.test_vllm_layout import SHAPES, load
from tests.sync.test_vllm_worker import packed_block
from verl_logra import LoGRA, LoGRAConfig
from verl_logra.integrations.bounded_transfer import BoundedReceiver
from verl_logra.integrations.rollout import LoGRAServerAdapter
from verl_logra.integrations.vllm_worker import LoGRAWorkerExtension, effective_tensors

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the stand-ins are those of a CPU")
SECONDS = 2.0


def trained():
    """A model whose linear layers are those of ``test_vllm_layout.Block``, under LoGRA."""
    torch.manual_seed(0)
    model = nn.Module()
    model.checkpoint = nn.Module()
    for name, (rows, columns) in SHAPES.items():
        group, leaf = name.split(".")
        if not hasattr(model.checkpoint, group):
            setattr(model.checkpoint, group, nn.Module())
        setattr(getattr(model.checkpoint, group), leaf, nn.Linear(columns, rows, bias=False))
    config = LoGRAConfig(rank=4, target_modules=tuple(n.split(".")[1] for n in SHAPES), update_ratio=1e-2)
    optimizer = LoGRA(model, config, lr=1e-2)
    return model, optimizer, weight_sync_of(model, optimizer)


def train(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.randn(parameter.shape)
    optimizer.step()


class Worker(LoGRAWorkerExtension):
    """The extension around a model, as vLLM's worker would be."""

    def __new__(cls, *args):
        return object.__new__(cls)

    def __init__(self, block, handle):
        block.load_weights = lambda weights: [load(block, n.removeprefix("checkpoint.")[:-7], t) for n, t in weights]
        block.compute_logits = lambda hidden: hidden
        block.model = SimpleNamespace(layers=[])  # where verl looks for experts
        parallel = SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1)
        config = SimpleNamespace(
            parallel_config=parallel, lora_config=None, quant_config=None, speculative_config=None,
            model_config=SimpleNamespace(dtype=torch.float32, quantization=None, hf_config=None),
        )  # fmt: skip
        self.model_runner = SimpleNamespace(model=block, vllm_config=config)
        self.device, self.local_rank = torch.device("cpu"), 0
        self._is_qat_model = self._is_modelopt_qat = False
        self._handle = handle

    def _get_zmq_handle(self):
        return self._handle


class Server:
    """Calls the worker in a thread, as vLLM would in its process."""

    def __init__(self, worker):
        self.worker, self.calls, self.dies = worker, [], []
        self.clear_kv_cache = SimpleNamespace(remote=self._nothing)
        self.set_global_steps = SimpleNamespace(remote=self._nothing)
        self.collective_rpc = SimpleNamespace(remote=self._start)

    async def _nothing(self, *args):
        self.calls.append("caches cleared" if not args else "step set")

    def _start(self, method, timeout, args, kwargs):
        """At once: verl's sender blocks the event loop."""
        self.calls.append(method)
        return asyncio.get_running_loop().run_in_executor(None, self._call, method, args, kwargs or {})

    def _call(self, method, args, kwargs):
        if method == "logra_receive" and self.dies:
            self.dies.pop()(self.worker)
            raise RuntimeError("the worker died")
        return [getattr(self.worker, method)(*args, **kwargs)]


@pytest.fixture
def parts(monkeypatch, tmp_path):
    monkeypatch.setattr("verl_logra.integrations.vllm_worker._sum_over_tensor_parallel", lambda sums: sums)
    handle = f"ipc://{tmp_path}/socket"
    server = Server(Worker(packed_block(monkeypatch), handle))
    adapter = object.__new__(LoGRAServerAdapter)
    adapter.config = SimpleNamespace(
        checkpoint_engine=SimpleNamespace(
            backend="logra", engine_kwargs={"logra": {"timeout_seconds": SECONDS}}, update_weights_bucket_megabytes=1
        )
    )
    adapter.server_handle, adapter._has_server = server, True
    adapter.replica_rank = adapter.rollout_rank = 0
    adapter.zmq_handle, adapter.use_shm = handle, True
    adapter._ensure_server_handle = lambda: True
    return adapter, server


def sync(adapter, weight_sync, optimizer, steps=0):
    return asyncio.run(adapter.update_weights(weight_sync.session(optimizer.num_updates), global_steps=steps))


def assert_equal(model, server):
    state = model.state_dict()
    w = {name: state[f"checkpoint.{name}.weight"] for name in SHAPES}
    effective = dict(effective_tensors(server.worker.model_runner.model))
    truth = {
        "attn.qkv_proj": torch.cat([w["attn.q_proj"], w["attn.k_proj"], w["attn.v_proj"]]),
        "mlp.gate_up": torch.cat([w["mlp.gate_proj"], w["mlp.up_proj"]]),
        **{name: w[name] for name in ("attn.o_proj", "mlp.down_proj", "mlp.column", "mlp.replicated")},
    }
    for name, weight in truth.items():
        assert torch.equal(effective[f"body.{name}.weight (packed)"], weight), name
    assert server.worker.model_runner.model.compute_logits(3) == 3


def test_vllm_computes_with_the_trainers_weights_after_every_sync(parts):
    adapter, server = parts
    model, optimizer, weight_sync = trained()
    for step in range(5):
        sync(adapter, weight_sync, optimizer, step)
        assert weight_sync.metrics["sync/full"] == (step == 0)
        assert_equal(model, server)
        train(optimizer)
        if step % 2:
            train(optimizer)
    assert server.calls == ["logra_state", "logra_receive", "caches cleared", "step set"] * 5


def test_verification_compares_what_vllm_computes_with(parts, caplog):
    adapter, server = parts
    adapter.config.checkpoint_engine.engine_kwargs["logra"]["verify"] = True
    _, optimizer, weight_sync = trained()
    for _ in range(3):
        sync(adapter, weight_sync, optimizer)
        train(optimizer)
    assert sum("0 bytes differ" in record.getMessage() for record in caplog.records) == 3
    honest = Worker.logra_remember

    def tampered(worker):
        honest(worker)
        next(iter(worker._logra.remembered.values()))[0, 0] += 1e-7

    server.worker.logra_remember = lambda: tampered(server.worker)
    with pytest.raises(RuntimeError, match="other weights than a full sync gives"):
        sync(adapter, weight_sync, optimizer)


def dies_after_the_first_bucket(worker):
    """Takes the transfer's first message and is gone: no answer ever comes."""
    receiver = BoundedReceiver(zmq_handle=worker._handle, device=worker.device, use_shm=True, seconds=SECONDS)
    receiver._init_socket()
    receiver._init_buffer()
    receiver.socket.recv_pyobj()
    receiver.socket.close()
    worker._logra = None  # what comes back is a new process


def test_a_worker_that_dies_mid_sync_ends_in_bounded_time_and_the_next_message_heals(parts):
    adapter, server = parts
    model, optimizer, weight_sync = trained()
    sync(adapter, weight_sync, optimizer)
    train(optimizer)
    server.dies = [dies_after_the_first_bucket]
    start = time.monotonic()
    sync(adapter, weight_sync, optimizer)
    assert time.monotonic() - start < 3 * SECONDS
    assert weight_sync.metrics["sync/full"] == 1
    assert_equal(model, server)


def test_a_worker_that_stays_dead_is_an_error_in_bounded_time(parts):
    adapter, server = parts
    _, optimizer, weight_sync = trained()
    sync(adapter, weight_sync, optimizer)
    train(optimizer)
    server.dies = [dies_after_the_first_bucket] * 2
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"must not generate.*the worker died"):
        sync(adapter, weight_sync, optimizer)
    assert time.monotonic() - start < 5 * SECONDS


def test_a_trainer_that_dies_leaves_a_worker_that_refuses_to_generate(parts):
    adapter, server = parts
    model, optimizer, weight_sync = trained()
    sync(adapter, weight_sync, optimizer)
    train(optimizer)
    worker = server.worker
    results = []
    arguments = dict(full=False, use_shm=True, timeout_seconds=SECONDS)
    thread = threading.Thread(target=lambda: results.append(worker.logra_receive(**arguments)))
    thread.start()  # and nobody sends
    thread.join(3 * SECONDS)
    assert "no sign of life" in results[0]["problem"]
    with pytest.raises(RuntimeError, match="half updated"):
        worker.model_runner.model.compute_logits(3)
    sync(adapter, weight_sync, optimizer)
    assert weight_sync.metrics["sync/full"] == 1
    assert_equal(model, server)
