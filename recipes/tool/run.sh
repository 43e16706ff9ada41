#!/usr/bin/env bash
# Multi-turn GRPO with a tool on a CPU: a tiny model learns when to call a calculator.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash recipes/tool/run.sh [hydra overrides ...]

A tiny model answers word questions about products, which it cannot do in its head, and may call a calculator first
(verl's tool agent loop, Hermes format as in Qwen). The warm-up taught it to call the tool in half of the phrasings and
to guess in most others; GRPO teaches it to call the tool always. What the tool returns is in its context and never in the
loss. Everything it writes is in outputs/$OUT: metrics.jsonl, summary.json, curves.png and train.log.

Variables (default):
  OPTIM (logra)      the optimizer: logra, adamw, adam8bit, lora, galore, flora or apollo
  LR                 learning rate (each optimizer has its own)
  STEPS (40)         optimizer updates, each from 16 questions with 8 answers
  SEED (1)           order of the questions and sampling of the answers
  RANK (16)          rows of LoGRA's projection; rank of lora, galore, flora and apollo
  UPDATE_RATIO (9e-3)
                     LoGRA moves its targets by this share of their norm in one update
  KL_BUDGET (off)    nats per token that one LoGRA update may move the policy; turns the step controller on
  PROBE_SEQUENCES (16) answers that the step controller looks at; they are short
  RANKS (1)          trainer ranks, 1 or 2, each with a vLLM replica
  OUT                name of the run (tool-$OPTIM); an earlier run of that name is replaced
  VENV               use this environment instead of making .venv
  STALL_LIMIT (600)  stop when no step was finished for so many seconds
  TIME_LIMIT (3600)  stop after so many seconds of training
Arguments are hydra overrides for verl. Options: --help; --print-overrides shows what main_ppo would be given.
HELP
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
RECIPE=tool
source "$ROOT/recipes/quickstart/task.sh"
source "$ROOT/recipes/common/recipe.sh"

prepare() { prepare_once tool quickstart; }

recipe_overrides() {
  task_overrides
  local length=$((PROMPT_LENGTH + RESPONSE_LENGTH))
  RECIPE_OVERRIDES=(
    "${TASK_OVERRIDES[@]}"
    data.max_prompt_length="$PROMPT_LENGTH" data.max_response_length="$RESPONSE_LENGTH"
    actor_rollout_ref.rollout.max_model_len="$length"
    actor_rollout_ref.rollout.max_num_batched_tokens=$((128 * length))
    actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2
    actor_rollout_ref.rollout.multi_turn.format=hermes
    actor_rollout_ref.rollout.multi_turn.function_tool_path="$ROOT/recipes/tool/calculator.py"
    actor_rollout_ref.rollout.agent.default_agent_loop=seeded_tool_agent
    reward.custom_reward_function.path="$ROOT/recipes/tool/reward.py"
  )
}
PROMPT_LENGTH=80 RESPONSE_LENGTH=88 # in bytes; a call, its result and the answer take about 70

recipe "$@"; exit # the shell reads on while it runs: an edit meanwhile must not matter
