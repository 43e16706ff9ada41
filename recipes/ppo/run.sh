#!/usr/bin/env bash
# PPO with a critic on a CPU: the quickstart's task, actor and critic each with an optimizer of their own.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash recipes/ppo/run.sh [hydra overrides ...]

The quickstart's task and model with PPO instead of GRPO: a critic estimates the value of every token, and advantages
come from generalised advantage estimation. LoGRA trains the critic as it trains the actor. bash recipes/ppo/compare.sh
runs both critics and prints them side by side. Everything it writes is in outputs/$OUT: metrics.jsonl, summary.json,
curves.png and train.log.

Variables (default):
  OPTIM (logra)      the actor's optimizer: logra, adamw, adam8bit, lora, galore, flora or apollo
  CRITIC_OPTIM       the critic's optimizer: any of these but lora (same as OPTIM)
  LR                 learning rate of the actor (each optimizer has its own)
  CRITIC_LR          learning rate of the critic (3e-3 for logra, 1e-3 for the others)
  STEPS (40)         optimizer updates, each from 16 questions with 8 answers
  SEED (1)           order of the questions and sampling of the answers
  RANK (16)          rows of LoGRA's projection; rank of lora, galore, flora and apollo
  UPDATE_RATIO (9e-3)
                     LoGRA moves its targets by this share of their norm in one update
  CRITIC_UPDATE_RATIO (1e-2) the same for the critic
  KL_BUDGET (off)    nats per token that one LoGRA update may move the policy; turns the step controller on
  PROBE_SEQUENCES (16) answers that the step controller looks at; they are short
  RANKS (1)          trainer ranks, 1 or 2, each with a vLLM replica
  OUT                name of the run (ppo-$OPTIM); an earlier run of that name is replaced
  VENV               use this environment instead of making .venv
  STALL_LIMIT (600)  stop when no step was finished for so many seconds
  TIME_LIMIT (3600)  stop after so many seconds of training
Arguments are hydra overrides for verl. Options: --help; --print-overrides shows what main_ppo would be given.
HELP
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
RECIPE=ppo
source "$ROOT/recipes/quickstart/task.sh"
source "$ROOT/recipes/common/recipe.sh"
: "${CRITIC_OPTIM:=$OPTIM}" "${CRITIC_UPDATE_RATIO:=1e-2}"
case $CRITIC_OPTIM in
  lora) die "CRITIC_OPTIM=lora: LoRA freezes the new value head of the critic; choose another CRITIC_OPTIM" ;;
  logra) : "${CRITIC_LR:=3e-3}" ;;
  *) : "${CRITIC_LR:=1e-3}" ;;
esac

recipe_overrides() {
  task_overrides
  UPDATE_RATIO=$CRITIC_UPDATE_RATIO add_optimizer critic.optim "$CRITIC_OPTIM" "$CRITIC_LR"
  RECIPE_OVERRIDES=(
    "${TASK_OVERRIDES[@]}"
    algorithm.adv_estimator=gae algorithm.gamma=1 algorithm.lam=0.95
    critic.strategy=fsdp2 critic.model.path="$MODEL_DIR"
    # As the actor's, see recipes/common/cpu.sh.
    +critic.model.override_config.attn_implementation=sdpa critic.model.use_remove_padding=False
    critic.model.enable_gradient_checkpointing=False critic.fsdp.use_torch_compile=False
    critic.fsdp.model_dtype=fp32 +critic.fsdp.mixed_precision.param_dtype=fp32
    +critic.fsdp.mixed_precision.reduce_dtype=fp32 +critic.fsdp.mixed_precision.buffer_dtype=fp32
    critic.ppo_micro_batch_size_per_gpu=64 critic.data_loader_seed="$SEED"
  )
}

recipe "$@"; exit # the shell reads on while it runs: an edit meanwhile must not matter
