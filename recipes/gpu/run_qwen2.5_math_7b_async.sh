#!/usr/bin/env bash
# Asynchronous GRPO on Qwen2.5-Math-7B with MATH, MATH-500 held out: one node of 8 GPUs of 80 GB, N_GPUS (4) of them
# train and N_ROLLOUT_GPUS (4) generate all the time. After every UPDATES_PER_STEP (4) updates the rollouts get the
# factors of these updates over NCCL, instead of all weights.

set -euo pipefail
: "${MODEL_PATH:=Qwen/Qwen2.5-Math-7B}" "${N_GPUS:=4}" "${N_ROLLOUT_GPUS:=4}" "${UPDATES_PER_STEP:=4}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
: "${TRAIN_FILES:=$DATA_DIR/math/train.parquet}" "${VAL_FILES:=$DATA_DIR/math/test.parquet}"

MINI_BATCH=64
RECIPE=(
  trainer.v1.trainer_mode=separate_async actor_rollout_ref.hybrid_engine=False
  trainer.v1.separate_async.parameter_sync_step="$UPDATES_PER_STEP"
  # Answers that were begun more than this many syncs ago are dropped.
  trainer.v1.sampler.max_off_policy_threshold=2
  actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node="$N_ROLLOUT_GPUS"
  # Answers come from older policies: weights of their tokens, truncated at 2.
  algorithm.rollout_correction.rollout_is=token

  algorithm.adv_estimator=grpo
  data.train_batch_size=$((MINI_BATCH * UPDATES_PER_STEP)) actor_rollout_ref.actor.ppo_mini_batch_size=$MINI_BATCH
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.85
)

main "$@"
