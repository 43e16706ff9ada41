#!/usr/bin/env bash
# GRPO with LoGRA on a CPU: a tiny language model learns arithmetic word questions through verl, Ray, vLLM and FSDP2.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash recipes/quickstart/run.sh [hydra overrides ...]

Sets up an environment (.venv, the first time), warms up a tiny Qwen3 model on arithmetic word questions, trains it by
GRPO through verl's main_ppo, and reports the accuracy on held-out questions before and after. Everything it writes is in
outputs/$OUT: metrics.jsonl (one JSON object per step), summary.json, curves.png and train.log.

Variables (default):
  OPTIM (logra)      the optimizer: logra, adamw, adam8bit, lora, galore, flora or apollo, with the same data and seeds
  STEPS (40)         optimizer updates, each from 16 questions with 8 answers
  SEED (1)           order of the questions and sampling of the answers
  LR                 learning rate (each optimizer has its own; for logra it moves the embeddings and norms)
  RANK (16)          rows of LoGRA's projection; rank of lora, galore, flora and apollo
  UPDATE_RATIO (9e-3)
                     LoGRA moves its targets by this share of their norm in one update
  LR_FACTOR (1)      multiplies LR and UPDATE_RATIO: what does a wrong learning rate do?
  KL_BUDGET (off)    nats per token that one LoGRA update may move the policy; turns the step controller on
  PROBE_SEQUENCES (16) answers that the step controller looks at; they are short
  RANKS (1)          trainer ranks, 1 or 2, each with a vLLM replica
  OUT                name of the run (quickstart-$OPTIM); an earlier run of that name is replaced
  VENV               use this environment instead of making .venv
  STALL_LIMIT (600)  stop when no step was finished for so many seconds
  TIME_LIMIT (3600)  stop after so many seconds of training
Arguments are hydra overrides for verl, for example
  actor_rollout_ref.rollout.n=16
  ++actor_rollout_ref.actor.optim.override_optimizer_config.scale=lr
Options: --help; --print-overrides shows what verl's main_ppo would be given.
HELP
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
RECIPE=quickstart
source "$ROOT/recipes/quickstart/task.sh"
source "$ROOT/recipes/common/recipe.sh"

recipe_overrides() {
  task_overrides
  RECIPE_OVERRIDES=("${TASK_OVERRIDES[@]}")
}

recipe "$@"; exit # the shell reads on while it runs: an edit meanwhile must not matter
