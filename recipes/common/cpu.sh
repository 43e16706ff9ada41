# What every CPU recipe shares: the environment and the overrides that let verl's main_ppo run without an accelerator.
# Sourced by recipes/common/recipe.sh; expects RANKS (trainer ranks, each with a vLLM replica) to be set.

export VERL_PLATFORM=cpu
# One core per process: verl runs a trainer and a vLLM worker per rank, and a second thread each only makes them wait.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
# Nothing may be looked up or reported over a network.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
# Some twelve processes import torch: without cached byte code each takes three times as long.
unset PYTHONDONTWRITEBYTECODE
# Ray would start a worker process per logical CPU in advance and most of them idle.
export RAY_prestart_worker_first_driver=0 RAY_enable_worker_prestart=0
export RAY_DEDUP_LOGS=0 HYDRA_FULL_ERROR=1 VERL_LOGGING_LEVEL=${VERL_LOGGING_LEVEL:-WARNING}

CPU_OVERRIDES=(
  trainer.device=cpu trainer.n_gpus_per_node="$RANKS" trainer.nnodes=1
  # The older of verl's two trainers starts faster and does not poll.
  trainer.use_v1=False
  # verl places workers on "GPU" resources; these are logical.
  ray_kwargs.ray_init.num_cpus=16 +ray_kwargs.ray_init.num_gpus="$RANKS"
  # Always a cluster of our own, never one that happens to run on this host.
  +ray_kwargs.ray_init.address=local
  +ray_kwargs.ray_init.include_dashboard=False +ray_kwargs.ray_init.object_store_memory=200000000

  actor_rollout_ref.actor.strategy=fsdp2
  # Flash attention and its padding-free batches need a GPU; compiling costs more than it saves at this size.
  +actor_rollout_ref.model.override_config.attn_implementation=sdpa
  actor_rollout_ref.model.use_remove_padding=False
  actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.actor.fsdp_config.use_torch_compile=False
  # CPUs are slow at bfloat16, and in fp32 trainer and vLLM agree on log-probabilities to 1e-6.
  actor_rollout_ref.actor.fsdp_config.model_dtype=fp32
  +actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32
  +actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32
  +actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype=fp32
  actor_rollout_ref.rollout.dtype=float32

  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=async
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.enforce_eager=True
  # vLLM cannot put its weights to sleep on a CPU, and they would only move within the same memory.
  actor_rollout_ref.rollout.free_cache_engine=False +actor_rollout_ref.rollout.enable_sleep_mode=False
  +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=verl_logra.cpu.vllm_worker.CPUWorkerExtension
  actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=32
  # One process for each of these, instead of eight.
  actor_rollout_ref.rollout.agent.num_workers=1 reward.num_workers=1 data.dataloader_num_workers=0
  transfer_queue.backend.SimpleStorage.num_data_storage_units=1
)
