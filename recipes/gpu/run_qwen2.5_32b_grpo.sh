#!/usr/bin/env bash
# GRPO on Qwen2.5-32B with DAPO-Math-17k, AIME 2024 and 2025 held out: one node of 8 GPUs of 80 GB.
# MODEL_PATH=Qwen/Qwen3-32B trains that model with the same settings.

set -euo pipefail
: "${MODEL_PATH:=Qwen/Qwen2.5-32B}" "${N_GPUS:=8}" "${MAX_RESPONSE_LENGTH:=7168}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
: "${TRAIN_FILES:=$DATA_DIR/dapo_math/train.parquet}" "${VAL_FILES:=$DATA_DIR/aime/test.parquet}"

RECIPE=(
  algorithm.adv_estimator=grpo
  data.train_batch_size=128 actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.rollout.n=8
  # One sequence of the longest kind at a time.
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
  # Two replicas of vLLM, each on four GPUs.
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
  actor_rollout_ref.rollout.val_kwargs.n=16 actor_rollout_ref.rollout.val_kwargs.do_sample=True
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7
)

main "$@"
