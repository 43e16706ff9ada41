#!/usr/bin/env bash
# Trainer and rollouts apart on a CPU: they run at the same time, and the weights reach vLLM as low-rank factors.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash recipes/disaggregated/run.sh [hydra overrides ...]

The quickstart's task and model under verl's asynchronous trainer (trainer_mode=separate_async): vLLM has workers of its
own that generate while the trainer trains, and gets the int8 factors of each update over a socket instead of all
weights. The step lines of outputs/$OUT/metrics.jsonl have sync/bytes, sync/full_bytes and sync/seconds. With another
optimizer every sync sends all weights. Runs of one seed differ: which weights an answer is drawn with depends on time.

Variables (default):
  OPTIM (logra)      the optimizer: logra, adamw, adam8bit, galore, flora or apollo
  LR                 learning rate (each optimizer has its own)
  STEPS (40)         optimizer updates, each from 16 questions with 8 answers
  SEED (1)           order of the questions and sampling of the answers
  RANK (16)          rows of LoGRA's projection; rank of lora, galore, flora and apollo
  UPDATE_RATIO (9e-3)
                     LoGRA moves its targets by this share of their norm in one update
  KL_BUDGET (off)    nats per token that one LoGRA update may move the policy; turns the step controller on
  PROBE_SEQUENCES (16) answers that the step controller looks at; they are short
  RANKS (1)          trainer ranks, 1 or 2, each with a vLLM replica
  ROLLOUTS (1)       vLLM replicas besides the trainer ranks
  OUT                name of the run (disaggregated-$OPTIM); an earlier run of that name is replaced
  VENV               use this environment instead of making .venv
  STALL_LIMIT (600)  stop when no step was finished for so many seconds
  TIME_LIMIT (3600)  stop after so many seconds of training
Arguments are hydra overrides for verl. Options: --help; --print-overrides shows what main_ppo would be given.
HELP
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
RECIPE=disaggregated
source "$ROOT/recipes/quickstart/task.sh"
source "$ROOT/recipes/common/recipe.sh"
: "${ROLLOUTS:=1}"

recipe_overrides() {
  task_overrides
  RECIPE_OVERRIDES=(
    "${TASK_OVERRIDES[@]}"
    trainer.use_v1=True trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=1
    actor_rollout_ref.hybrid_engine=False
    actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node="$ROLLOUTS"
    ++ray_kwargs.ray_init.num_gpus=$((RANKS + ROLLOUTS))
    actor_rollout_ref.rollout.checkpoint_engine.backend=logra
  )
}

recipe "$@"; exit # the shell reads on while it runs: an edit meanwhile must not matter
