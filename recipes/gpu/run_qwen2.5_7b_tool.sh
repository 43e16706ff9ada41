#!/usr/bin/env bash
# Multi-turn GRPO on Qwen2.5-7B-Instruct with GSM8K: the model may call a calculator (calculator.py) up to four times
# before it answers. One node of 4 or 8 GPUs of 80 GB (N_GPUS).

set -euo pipefail
: "${MODEL_PATH:=Qwen/Qwen2.5-7B-Instruct}" "${N_GPUS:=4}" "${MAX_RESPONSE_LENGTH:=2048}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
: "${TRAIN_FILES:=$DATA_DIR/gsm8k/train.parquet}" "${VAL_FILES:=$DATA_DIR/gsm8k/test.parquet}"

RECIPE=(
  algorithm.adv_estimator=grpo
  actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
  actor_rollout_ref.rollout.multi_turn.function_tool_path="$ROOT/recipes/gpu/calculator.py"
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5 actor_rollout_ref.rollout.multi_turn.format=hermes
  data.train_batch_size=128 actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.rollout.n=8
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
)

main "$@"
