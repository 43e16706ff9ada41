#!/usr/bin/env bash
# GRPO on Qwen2.5-Math-1.5B with MATH, MATH-500 held out: 1 GPU of 80 GB (N_GPUS=1) or more.

set -euo pipefail
: "${MODEL_PATH:=Qwen/Qwen2.5-Math-1.5B}" "${N_GPUS:=1}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
: "${TRAIN_FILES:=$DATA_DIR/math/train.parquet}" "${VAL_FILES:=$DATA_DIR/math/test.parquet}"

RECIPE=(
  algorithm.adv_estimator=grpo
  data.train_batch_size=128 actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.rollout.n=8
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
)

main "$@"
