#!/usr/bin/env bash
# DAPO on Qwen2.5-Math-7B with DAPO-Math-17k, AIME 2024 and 2025 held out: one node of 8 GPUs of 80 GB.
# All four parts of DAPO: a higher upper clip, the mean over tokens, a soft penalty for overlong answers, and groups
# whose answers are all right or all wrong are replaced by others.

set -euo pipefail
: "${MODEL_PATH:=Qwen/Qwen2.5-Math-7B}" "${N_GPUS:=8}" "${UPDATES_PER_STEP:=4}" "${OVERLONG_BUFFER:=512}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
: "${TRAIN_FILES:=$DATA_DIR/dapo_math/train.parquet}" "${VAL_FILES:=$DATA_DIR/aime/test.parquet}"

BATCH=256
RECIPE=(
  algorithm.adv_estimator=grpo
  data.train_batch_size=$BATCH actor_rollout_ref.actor.ppo_mini_batch_size=$((BATCH / UPDATES_PER_STEP))
  actor_rollout_ref.rollout.n=16
  actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
  actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.actor.loss_agg_mode=token-mean
  reward.reward_manager.name=dapo
  +reward.reward_kwargs.max_resp_len="$MAX_RESPONSE_LENGTH"
  +reward.reward_kwargs.overlong_buffer_cfg="{enable: True, len: $OVERLONG_BUFFER, penalty_factor: 1.0, log: True}"
  # By accuracy: with the overlong penalty in it, the reward of a group differs although its answers do not.
  algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc

  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
  actor_rollout_ref.rollout.val_kwargs.n=16 actor_rollout_ref.rollout.val_kwargs.do_sample=True
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7
)

main "$@"
