"""verl on the CPU platform; each check in a process of its own, since verl settles its platform once per process."""

import os
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")


def run_python(code: str, **environment: str) -> str:
    """Output of ``code`` in a fresh interpreter; fails with its error output."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_every_abstract_method_of_verls_platform_is_there_and_verl_finds_the_device() -> None:
    output = run_python(
        """
        import torch, verl
        from verl.plugin.platform import get_platform
        from verl.utils.device import get_device_id, get_device_name, get_nccl_backend, get_torch_device
        from verl.utils.profiler.performance import _get_current_mem_info
        platform, device = get_platform(), get_torch_device()
        assert torch.ones(1).to(get_device_id()).device.type == get_device_name() == "cpu"
        assert get_nccl_backend() == "gloo" and not platform.is_ipc_supported()
        assert device == torch.cpu and device.synchronize is torch.cpu.synchronize
        assert _get_current_mem_info() == ("0.00",) * 4  # verl recognises a CPU
        with platform.nvtx_range("x"):
            device.empty_cache()
        print(type(platform).__module__)
        """,
        VERL_PLATFORM="cpu",
    )
    assert output.endswith("verl_logra.cpu.platform")


def test_nothing_of_it_acts_unless_asked() -> None:
    output = run_python(
        """
        import sys
        import verl
        from verl.plugin.platform import PlatformRegistry
        import verl.utils.distributed as distributed
        import verl.workers.engine
        assert PlatformRegistry.get("cpu") is None
        assert not hasattr(distributed.initialize_global_process_group_ray, "uses_valid_cpu_backend")
        print([name for name in sys.modules if name.startswith("verl_logra.cpu")])
        """,
        VERL_PLATFORM="nvidia",
    )
    assert output.endswith("[]")


def test_platform_is_never_detected_only_asked_for() -> None:
    output = run_python(
        """
        import verl
        import verl_logra.cpu.platform
        from verl.plugin.platform.platform_manager import _detect_platform_name
        print(_detect_platform_name())
        """,
        VERL_PLATFORM="",
    )
    assert not output.endswith("cpu")


def test_memory_is_that_of_this_process_and_its_peak_stays() -> None:
    output = run_python(
        """
        import torch
        from verl_logra.cpu.device_module import DEVICE_MODULE as device
        before = device.memory_allocated()
        held = torch.ones(64 * 2**20 // 4)
        grown = device.memory_allocated() - before
        del held
        assert 60 * 2**20 < grown < 80 * 2**20, grown
        assert device.max_memory_allocated() >= before + grown - 2**20
        state = device.get_rng_state()
        a = torch.rand(3)
        device.set_rng_state(state)
        assert torch.equal(a, torch.rand(3))
        print("ok")
        """
    )
    assert output == "ok"


INITIALIZE = """
    import os
    import torch.distributed
    import verl
    import verl.utils.distributed as distributed
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    real = torch.distributed.init_process_group
    distributed.{name}{unwrapped}()
    assert torch.distributed.init_process_group is real, "borrowed, not returned"
    total = torch.ones(2)
    torch.distributed.all_reduce(total)
    print(torch.distributed.get_backend(), total.tolist())
"""


@pytest.mark.parametrize("name", ["initialize_global_process_group", "initialize_global_process_group_ray"])
def test_process_group_of_trainers_starts_on_a_cpu(name: str) -> None:
    output = run_python(INITIALIZE.format(name=name, unwrapped=""), VERL_PLATFORM="cpu")
    assert output.endswith("gloo [1.0, 1.0]")


@pytest.mark.parametrize("name", ["initialize_global_process_group", "initialize_global_process_group_ray"])
def test_verl_alone_still_names_the_cpu_twice(name: str) -> None:
    """When this fails verl has fixed it: delete verl_logra/cpu/process_group.py and its hook in the plugin."""
    with pytest.raises(AssertionError, match="Duplicate|duplicate|Invalid|invalid|cpu:gloo,cpu:gloo"):
        run_python(INITIALIZE.format(name=name, unwrapped=".__wrapped__"), VERL_PLATFORM="cpu")


SHARED = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"


def test_receiving_end_of_a_weight_transfer_is_in_the_runs_own_folder() -> None:
    """verl alone gives two runs on one host the same socket, because each is job 01000000 of its own Ray cluster."""
    pytest.importorskip("vllm")
    output = run_python(
        """
        import inspect, os
        from types import SimpleNamespace
        import verl
        from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
        from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

        assert 'self.zmq_handle = f"ipc:///tmp/' in inspect.getsource(inspect.unwrap(ServerAdapter.__init__))
        assert ServerAdapter.__init__.__module__ and hasattr(ServerAdapter.__init__, "__wrapped__")
        receiver = SimpleNamespace(local_rank=0, model_runner=SimpleNamespace(vllm_config=None))
        for folder in ("", "/tmp/run-one"):
            os.environ["VERL_LOGRA_SOCKET_DIR"] = folder
            print(vLLMColocateWorkerExtension._get_zmq_handle(receiver))
        """,
        VERL_PLATFORM="cpu",
        VERL_RAY_JOB_ID="01000000",
    )
    shared, private = output.splitlines()[-2:]
    assert shared == SHARED, "verl has another name for it now"
    assert private == SHARED.replace("/tmp/", "/tmp/run-one/")


def test_sending_end_is_where_the_receiving_end_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_logra.cpu.sockets import SOCKET_DIR, private_handle, use_private_sockets_in_trainers

    class ServerAdapter:
        def __init__(self, handle: str) -> None:
            self.zmq_handle = handle

    use_private_sockets_in_trainers(SimpleNamespace(ServerAdapter=ServerAdapter))  # type: ignore[arg-type]
    monkeypatch.setenv(SOCKET_DIR, "/tmp/run-one")
    assert ServerAdapter(SHARED).zmq_handle == private_handle(SHARED) == SHARED.replace("/tmp/", "/tmp/run-one/")
    assert private_handle("tcp://127.0.0.1:5") == "tcp://127.0.0.1:5"
    monkeypatch.delenv(SOCKET_DIR)
    assert ServerAdapter(SHARED).zmq_handle == SHARED
