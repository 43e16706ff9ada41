# What the GPU recipes share. A run_*.sh sets its defaults and the array RECIPE (its own hydra overrides), sources this
# file and calls `main "$@"`. Every variable below may be set from outside.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
: "${PYTHON:=python3}" "${OPTIM:=logra}" "${RANK:=256}" "${UPDATE_RATIO:=6e-5}" "${KL_BUDGET=2e-4}" "${LR:=1e-6}"
: "${N_GPUS:=8}" "${NNODES:=1}" "${TOTAL_STEPS:=300}" "${N_ROLLOUT_GPUS:=0}" "${UPDATES_PER_STEP:=1}"
: "${MAX_PROMPT_LENGTH:=1024}" "${MAX_RESPONSE_LENGTH:=3072}"
: "${DATA_DIR:=$ROOT/outputs/data}" "${OUT:=$(basename "$0" .sh)-$OPTIM}"
: "${OUT_DIR:=$ROOT/outputs/$OUT}" "${LOGGER:=[console,file]}"
[ "$OPTIM" = logra ] && : "${SYNC:=low_rank}"
: "${SYNC:=full}"

die() { echo "error: $*" >&2; exit 1; }

usage() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
  cat <<HELP
Variables (default): MODEL_PATH ($MODEL_PATH), TRAIN_FILES, VAL_FILES, N_GPUS ($N_GPUS) per node, NNODES ($NNODES),
  OPTIM ($OPTIM; or adamw), RANK ($RANK), UPDATE_RATIO ($UPDATE_RATIO), KL_BUDGET ($KL_BUDGET nats per token; empty: no
  step control), LR ($LR, AdamW's), SYNC ($SYNC; low_rank or full), MAX_PROMPT_LENGTH ($MAX_PROMPT_LENGTH),
  MAX_RESPONSE_LENGTH ($MAX_RESPONSE_LENGTH), TOTAL_STEPS ($TOTAL_STEPS), DATA_DIR, OUT, OUT_DIR, LOGGER, PYTHON
Arguments are hydra overrides for verl. Options: --help; --print-overrides shows what main_ppo would be given.
HELP
}

# The optimizer of $1 (actor_rollout_ref.actor or critic) as an array in OPTIMIZER: LoGRA's settings are $2.
optimizer() {
  OPTIMIZER=("$1.strategy=fsdp2")
  case $OPTIM in
    logra)
      OPTIMIZER+=("$1.optim.optimizer_impl=verl_logra" "$1.optim.optimizer=LoGRA"
        "$1.optim.override_optimizer_config={$2}")
      ;;
    adamw) [ -z "$KL_BUDGET" ] || [ "$KL_BUDGET" = 2e-4 ] || die "KL_BUDGET=$KL_BUDGET needs OPTIM=logra" ;;
    *) die "OPTIM=$OPTIM is neither logra nor adamw" ;;
  esac
}

all_overrides() {
  local engine=actor_rollout_ref.rollout.checkpoint_engine kl=
  # One budget for every update: the schedule falls over as many as the run makes.
  [ -z "$KL_BUDGET" ] || kl=", kl: {budget: $KL_BUDGET, schedule_updates: $((TOTAL_STEPS * UPDATES_PER_STEP))}"
  optimizer actor_rollout_ref.actor "rank: $RANK, update_ratio: $UPDATE_RATIO$kl"
  case $SYNC in
    low_rank)
      [ "$OPTIM" = logra ] || die "SYNC=low_rank needs OPTIM=logra: another optimizer's updates have full rank"
      OPTIMIZER+=("$engine.backend=logra")
      ;;
    full) [ "$N_ROLLOUT_GPUS" = 0 ] || OPTIMIZER+=("$engine.backend=nccl") ;;
    *) die "SYNC=$SYNC is neither low_rank nor full" ;;
  esac
  OVERRIDES=(
    trainer.nnodes="$NNODES" trainer.n_gpus_per_node="$N_GPUS"
    actor_rollout_ref.model.path="$MODEL_PATH"
    data.train_files="$TRAIN_FILES" data.val_files="$VAL_FILES"
    data.max_prompt_length="$MAX_PROMPT_LENGTH" data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.filter_overlong_prompts=True
    reward.custom_reward_function.path=pkg://recipes.data.reward
    # Reward workers import it on every node.
    +ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

    actor_rollout_ref.actor.optim.lr="$LR"
    # Micro-batches by tokens, not by sequences.
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.rollout.name=vllm

    trainer.total_training_steps="$TOTAL_STEPS" trainer.test_freq=25
    trainer.save_freq=50 trainer.max_actor_ckpt_to_keep=2
    trainer.logger="$LOGGER" trainer.project_name=verl-logra trainer.experiment_name="$OUT"
    trainer.default_local_dir="$OUT_DIR/checkpoints" hydra.run.dir="$OUT_DIR/hydra"
    "${RECIPE[@]}"
    "${OPTIMIZER[@]}"
    "$@"
  )
}

main() {
  case ${1:-} in
    -h | --help) usage; exit ;;
    --print-overrides)
      shift
      all_overrides "$@"
      printf '%s\n' "${OVERRIDES[@]}"
      exit
      ;;
    -*) die "unknown option $1; see $(basename "$0") --help" ;;
  esac
  local file
  for file in "$TRAIN_FILES" "$VAL_FILES"; do
    [ -f "$file" ] || die "$file does not exist: make it with recipes/data (recipes/gpu/README.md), or set" \
      "TRAIN_FILES and VAL_FILES"
  done
  all_overrides "$@"
  mkdir -p "$OUT_DIR"
  export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} VERL_FILE_LOGGER_PATH=$OUT_DIR/metrics.jsonl
  # One of verl's INFO lines in its asynchronous trainer is itself an error.
  export VERL_LOGGING_LEVEL=${VERL_LOGGING_LEVEL:-WARNING}
  exec "$PYTHON" -m verl.trainer.main_ppo "${OVERRIDES[@]}"
}
