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
  OPTIM (logra)      logra, or adamw: the dense baseline with the same data, order and seeds
  STEPS (40)         optimizer updates, each from 16 questions with 8 answers
  SEED (1)           order of the questions and sampling of the answers
  LR                 learning rate (1e-3 for logra, where it moves the embeddings and norms; 3e-4 for adamw)
  RANK (16)          rows of LoGRA's projection
  UPDATE_RATIO (3e-3)
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
: "${OPTIM:=logra}" "${STEPS:=40}" "${SEED:=1}" "${RANK:=16}" "${UPDATE_RATIO:=3e-3}" "${KL_BUDGET:=}" "${PROBE_SEQUENCES:=16}" "${RANKS:=1}"
[ "$OPTIM" = adamw ] && : "${LR:=3e-4}"
: "${LR:=1e-3}" "${LR_FACTOR:=1}" "${OUT:=$RECIPE-$OPTIM}" "${STALL_LIMIT:=600}" "${TIME_LIMIT:=3600}"
[ "$LR_FACTOR" = 1 ] || read -r LR UPDATE_RATIO < <(awk "BEGIN { print $LR * $LR_FACTOR, $UPDATE_RATIO * $LR_FACTOR }")
source "$ROOT/recipes/common/recipe.sh"

# Once per version of the files that make it: the warm-up takes longer than the training.
prepare() {
  local key data
  key=$(cat "$ROOT"/recipes/quickstart/{prepare,questions}.py | sha256sum | cut -c1-12)
  data=$ROOT/outputs/.quickstart-data-$key
  if [ ! -f "$data/settings.json" ]; then
    rm -rf "$data.partial"
    HF_HUB_OFFLINE=1 "$PYTHON" -m recipes.quickstart.prepare "$data.partial"
    mv "$data.partial" "$data"
  else
    echo "  made by an earlier run: $data"
  fi
  MODEL_DIR=$data/model TRAIN_FILE=$data/train.parquet HELD_OUT_FILE=$data/held_out.parquet
}

recipe_overrides() {
  RECIPE_OVERRIDES=(
    data.train_batch_size=16 actor_rollout_ref.rollout.n=8
    data.max_prompt_length=80 data.max_response_length=8
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    actor_rollout_ref.rollout.max_model_len=88
    actor_rollout_ref.rollout.max_num_seqs=128 actor_rollout_ref.rollout.max_num_batched_tokens=11264
    +actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=134217728
    reward.custom_reward_function.path="$ROOT/recipes/quickstart/reward.py"
    reward.custom_reward_function.name=compute_score
    trainer.test_freq=10
  )
}

recipe "$@"; exit # the shell reads on while it runs: an edit meanwhile must not matter
