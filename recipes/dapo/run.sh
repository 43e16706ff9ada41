#!/usr/bin/env bash
# DAPO on a CPU: the quickstart's task with clip-higher, token-mean loss, overlong shaping and dynamic sampling.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash recipes/dapo/run.sh [hydra overrides ...]

The quickstart's task and model with the four parts of DAPO, each a key of verl's: a higher upper clip, a loss that is
the mean over tokens, a penalty on answers that use up their length, and groups whose answers are all right or all wrong
replaced by others (dynamic sampling, which verl's current trainer has). Everything it writes is in outputs/$OUT:
metrics.jsonl, summary.json, curves.png and train.log. Answers are seeded, but the order in which groups arrive is not,
so two runs with one seed differ.

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
  OUT                name of the run (dapo-$OPTIM); an earlier run of that name is replaced
  VENV               use this environment instead of making .venv
  STALL_LIMIT (600)  stop when no step was finished for so many seconds
  TIME_LIMIT (3600)  stop after so many seconds of training
Arguments are hydra overrides for verl. Options: --help; --print-overrides shows what main_ppo would be given.
HELP
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
RECIPE=dapo
source "$ROOT/recipes/quickstart/task.sh"
source "$ROOT/recipes/common/recipe.sh"

recipe_overrides() {
  task_overrides
  RECIPE_OVERRIDES=(
    "${TASK_OVERRIDES[@]}"
    trainer.use_v1=True # the older trainer has no dynamic sampling
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
    actor_rollout_ref.actor.clip_ratio_c=10
    actor_rollout_ref.actor.loss_agg_mode=token-mean
    algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc
    # Answers that use the last 4 of their 8 tokens lose up to the whole reward.
    reward.reward_manager.name=dapo +reward.reward_kwargs.max_resp_len=8
    +reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=4
    +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 +reward.reward_kwargs.overlong_buffer_cfg.log=False
  )
}

recipe "$@"; exit # the shell reads on while it runs: an edit meanwhile must not matter
