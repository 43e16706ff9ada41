# The quickstart's task for every recipe that trains on it: arithmetic word questions and a tiny warmed-up model.
# Sourced by a run.sh; sets the defaults of its variables and provides `prepare` and TASK_OVERRIDES.

: "${OPTIM:=logra}" "${STEPS:=40}" "${SEED:=1}" "${RANK:=16}" "${UPDATE_RATIO:=9e-3}" "${KL_BUDGET:=}"
: "${PROBE_SEQUENCES:=16}" "${RANKS:=1}" "${LR_FACTOR:=1}" "${OUT:=$RECIPE-$OPTIM}"
: "${STALL_LIMIT:=600}" "${TIME_LIMIT:=3600}"

# The best of the learning rates that recipes/study compares for each method; UPDATE_RATIO is LoGRA's other one.
default_lr() {
  case $1 in
    adamw | adam8bit | apollo) echo 3e-4 ;;
    lora | galore | logra) echo 3e-3 ;;
    flora) echo 1e-3 ;;
    *) echo 1e-3 ;; # an unknown method is refused where its keys are made
  esac
}
: "${LR:=$(default_lr "$OPTIM")}"
[ "$LR_FACTOR" = 1 ] || read -r LR UPDATE_RATIO < <(awk "BEGIN { print $LR * $LR_FACTOR, $UPDATE_RATIO * $LR_FACTOR }")

prepare() { prepare_once quickstart; } # the warm-up takes longer than the training

# A function, because ROOT's files are named by it.
task_overrides() {
  TASK_OVERRIDES=(
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
