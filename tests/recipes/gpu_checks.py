"""Checks GPU recipes as far as it goes without a GPU: ``python gpu_checks.py MODEL_DIR OVERRIDES ...``.

A process of its own, since verl chooses its platform once, and here it has to be NVIDIA's. Every OVERRIDES is a file
with one override a line; the last line printed is a JSON object with a result for each.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import hydra
from omegaconf import OmegaConf
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.experimental.reward_loop.reward_loop import migrate_legacy_reward_impl
from verl.tools.tool_registry import load_all_tools
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.engine import EngineRegistry

from verl_logra.integrations.settings import logra_settings
from verl_logra.integrations.sync_settings import sync_settings


def engine(part: Any, model_type: str, model: Any) -> dict[str, Any]:
    """The engine that would train ``part``, and LoGRA's settings as the engine would read them."""
    cls = EngineRegistry.get_engine_cls(model_type, part.strategy)
    object.__setattr__(model, "model_type", model_type)
    settings = logra_settings(model_config=model, engine_config=part.engine, optimizer_config=part.optim)
    return {
        "engine": cls.__name__,
        "rank": settings and settings.rank,
        "update_ratio": settings and settings.update_ratio,
        "non_target": settings and settings.non_target,
        "budget": settings and settings.kl and settings.kl.budget,
        "schedule_updates": settings and settings.kl and settings.kl.schedule_updates,
        "dtype": part.engine.model_dtype,
    }


def check(overrides: list[str], model_dir: str) -> dict[str, Any]:
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=overrides)
    model_path = config.actor_rollout_ref.model.path
    config.actor_rollout_ref.model.path = config.critic.model.path = model_dir  # the named one is on the hub
    config = migrate_legacy_reward_impl(config)
    OmegaConf.resolve(config)
    critic = need_critic(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=critic)
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    omega_conf_to_dataclass(config.algorithm)
    sync = sync_settings(rollout.checkpoint_engine)
    reward = get_custom_reward_fn(config)
    tools = load_all_tools(rollout.multi_turn.tool_config_path, rollout.multi_turn.function_tool_path)
    result = {
        "trainer": type(trainer).__name__,
        "actor": engine(actor, "language_model", omega_conf_to_dataclass(config.actor_rollout_ref.model)),
        "critic": None,
        "sync": None if sync is None else sync.enable,
        "checkpoint_engine": rollout.checkpoint_engine.backend,
        "known_engine": rollout.checkpoint_engine.backend in {*CheckpointEngineRegistry._registry, "naive"},
        "reward_manager": resolve_reward_manager_cls(config).__name__,
        "right": reward(data_source="x", solution_str="\\boxed{0.5}", ground_truth="\\frac12", extra_info={}),
        "wrong": reward(data_source="x", solution_str="\\boxed{0.4}", ground_truth="\\frac12", extra_info={}),
        "tools": {tool.name: asyncio.run(tool.call({"expression": "(3/8 + 1.5) * 16"})) for tool in tools},
        "model": model_path,
        "gpus": config.trainer.nnodes * config.trainer.n_gpus_per_node,
        "tensor_parallel": rollout.tensor_model_parallel_size,
        "rollout_gpus": rollout.nnodes * rollout.n_gpus_per_node,
        "tokens": config.data.max_prompt_length + config.data.max_response_length,
        "tokens_per_micro_batch": actor.ppo_max_token_len_per_gpu,
        "updates": config.trainer.total_training_steps
        * (config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size),
        "filter_groups": trainer._resolve_filter_groups_metric(),
    }
    if critic:
        part = omega_conf_to_dataclass(config.critic)
        result["critic"] = engine(part, "value_model", part.model)
    return result


if __name__ == "__main__":
    model, *files = sys.argv[1:]
    print(json.dumps({Path(file).name: check(Path(file).read_text().splitlines(), model) for file in files}))
