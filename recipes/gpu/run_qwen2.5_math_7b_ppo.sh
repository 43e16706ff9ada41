#!/usr/bin/env bash
# PPO on Qwen2.5-Math-7B with MATH, MATH-500 held out: actor and critic both with LoGRA on one node of 8 GPUs of 80 GB.
# CRITIC_UPDATE_RATIO (6e-4) is LoGRA's update_ratio of the critic, CRITIC_LR (1e-5) AdamW's, which moves the critic's
# value head, norms and embeddings.

set -euo pipefail
: "${MODEL_PATH:=Qwen/Qwen2.5-Math-7B}" "${N_GPUS:=8}"
# Ten times the actor's, the proportion of verl's default learning rates; not tuned.
: "${CRITIC_UPDATE_RATIO:=6e-4}" "${CRITIC_LR:=1e-5}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
: "${TRAIN_FILES:=$DATA_DIR/math/train.parquet}" "${VAL_FILES:=$DATA_DIR/math/test.parquet}"

optimizer critic "rank: $RANK, update_ratio: $CRITIC_UPDATE_RATIO"
RECIPE=(
  algorithm.adv_estimator=gae
  data.train_batch_size=512 actor_rollout_ref.actor.ppo_mini_batch_size=512
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.5
  critic.model.path="$MODEL_PATH" critic.ppo_max_token_len_per_gpu=8192 critic.optim.lr="$CRITIC_LR"
  trainer.critic_warmup=10 trainer.max_critic_ckpt_to_keep=2
  "${OPTIMIZER[@]}"
)

main "$@"
