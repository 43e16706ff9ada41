"""What ``import verl`` loads (entry point ``verl.plugins``): it registers, and imports nothing heavy.

verl logs a plugin's import errors at DEBUG only, where nobody sees them; here they are printed before they are raised.
"""

import logging
import os
from types import ModuleType

logger = logging.getLogger(__name__)


def _register_engines(_: ModuleType) -> None:
    if _ON_CPU:
        import verl_logra.cpu.engine

        verl_logra.cpu.engine.register_engines()
    import verl_logra.integrations.engine

    verl_logra.integrations.engine.register_engines()


def _register_checkpoint_engine(_: ModuleType) -> None:
    import verl_logra.integrations.checkpoint_engine  # noqa: F401  (registers the backend "logra")


def _register_adapter(rollout_base: ModuleType) -> None:
    rollout_base._ROLLOUT_REGISTRY["vllm", "async"] = "verl_logra.integrations.rollout.LoGRAServerAdapter"
    from verl_logra.integrations.other_rollouts import take_over

    take_over(rollout_base._ROLLOUT_REGISTRY)


def _register_replica(replica: ModuleType) -> None:
    def load() -> type:
        from verl_logra.integrations.rollout import LoGRAReplica

        return LoGRAReplica

    replica.RolloutReplicaRegistry.register("vllm", load)


_ON_CPU = os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"

try:
    from verl_logra.integrations.log_lines import show_log_lines
    from verl_logra.integrations.when_imported import when_imported

    show_log_lines()
    if _ON_CPU:
        import verl_logra.cpu.platform  # noqa: F401  (registers the platform)
        from verl_logra.cpu.process_group import use_valid_cpu_backend
        from verl_logra.cpu.sockets import use_private_sockets_in_trainers, use_private_sockets_in_workers

        when_imported("verl.utils.distributed", use_valid_cpu_backend)
        when_imported("verl.workers.rollout.vllm_rollout.vllm_rollout", use_private_sockets_in_trainers)
        when_imported("verl.workers.rollout.vllm_rollout.utils", use_private_sockets_in_workers)
    when_imported("verl.workers.engine", _register_engines)
    when_imported("verl.checkpoint_engine.base", _register_checkpoint_engine)
    when_imported("verl.workers.rollout.base", _register_adapter)
    when_imported("verl.workers.rollout.replica", _register_replica)
except Exception:
    logger.exception("verl_logra could not register with verl: LoGRA is not available in this process")
    raise
