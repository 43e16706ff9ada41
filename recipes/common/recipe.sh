# What every recipe's run.sh shares. A run.sh sets ROOT, RECIPE and the defaults of the variables below, sources this
# file and calls `recipe "$@"`; it provides two functions: `prepare` makes the data and sets MODEL_DIR, TRAIN_FILE,
# HELD_OUT_FILE; `recipe_overrides` sets the array RECIPE_OVERRIDES.

die() { echo "error: $*" >&2; exit 1; }

# Echoes the settings of the optimizer as an array in OPTIMIZER_OVERRIDES.
optimizer_overrides() {
  local optim=actor_rollout_ref.actor.optim kl=
  OPTIMIZER_OVERRIDES=("$optim.lr=$LR")
  case $OPTIM in
    adamw)
      [ -z "$KL_BUDGET" ] || die "KL_BUDGET=$KL_BUDGET needs OPTIM=logra: AdamW has no step controller"
      ;;
    logra)
      [ -z "$KL_BUDGET" ] || kl=", kl: {budget: $KL_BUDGET, budget_final: null, probe_sequences: $PROBE_SEQUENCES, realized_every: 1}"
      OPTIMIZER_OVERRIDES+=(
        $optim.optimizer_impl=verl_logra $optim.optimizer=LoGRA
        "$optim.override_optimizer_config={rank: $RANK, update_ratio: $UPDATE_RATIO$kl}"
      )
      ;;
    *) die "OPTIM=$OPTIM is neither logra nor adamw" ;;
  esac
}

# Sets OVERRIDES: the complete list for verl's main_ppo, the user's own last so that they win.
all_overrides() {
  source "$ROOT/recipes/common/cpu.sh"
  optimizer_overrides
  recipe_overrides
  OVERRIDES=(
    "${CPU_OVERRIDES[@]}"
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.entropy_coeff=0
    data.train_files="$TRAIN_FILE" data.val_files="$HELD_OUT_FILE" data.filter_overlong_prompts=False
    actor_rollout_ref.model.path="$MODEL_DIR"
    # One seed for the order of the questions and for every answer that is drawn.
    data.seed="$SEED" actor_rollout_ref.rollout.seed="$SEED" actor_rollout_ref.actor.data_loader_seed="$SEED"
    actor_rollout_ref.rollout.agent.agent_loop_config_path="$ROOT/recipes/common/agent_loop.yaml"
    actor_rollout_ref.rollout.agent.default_agent_loop=seeded_single_turn_agent
    # vLLM's seeded sampling fails on a CPU when a prompt is split, so the longest batch of prompts must fit at once.
    actor_rollout_ref.rollout.enable_chunked_prefill=False
    trainer.total_training_steps="$STEPS" trainer.total_epochs=1000
    trainer.val_before_train=True trainer.save_freq=-1 trainer.resume_mode=disable
    trainer.logger='["console","file"]' trainer.project_name="$RECIPE" trainer.experiment_name="$OUT"
    trainer.default_local_dir="$OUT_DIR/checkpoints" hydra.run.dir="$OUT_DIR/hydra"
    "${RECIPE_OVERRIDES[@]}"
    "${OPTIMIZER_OVERRIDES[@]}"
    "$@"
  )
}

# VENV if the user named one, else .venv, made or brought up to date.
use_environment() {
  if [ -z "${VENV:-}" ]; then
    bash "$ROOT/recipes/setup.sh"
    VENV=$ROOT/.venv
  fi
  [ -x "$VENV/bin/python" ] || die "VENV=$VENV has no bin/python"
  PYTHON=$VENV/bin/python
  export TQDM_DISABLE=1 # progress bars of single seconds would hide the lines that matter
  export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} # the recipes' own modules; workers import them too
}

recipe() {
  case ${1:-} in
    -h | --help) usage && exit ;;
    --print-overrides) # what main_ppo would get, one a line; for tests and the curious
      shift
      MODEL_DIR=model TRAIN_FILE=train.parquet HELD_OUT_FILE=held_out.parquet OUT_DIR=$ROOT/outputs/$OUT
      all_overrides "$@"
      printf '%s\n' "${OVERRIDES[@]}"
      exit
      ;;
    -*) die "unknown option $1; see run.sh --help" ;;
  esac
  [[ $STEPS =~ ^[1-9][0-9]*$ ]] || die "STEPS=$STEPS must be a positive number"
  [[ $RANKS =~ ^[1-9][0-9]*$ ]] || die "RANKS=$RANKS must be a positive number"
  [[ $OUT =~ ^[A-Za-z0-9._-]+$ ]] || die "OUT=$OUT must be a plain name: results go to outputs/\$OUT"

  local start=$SECONDS code=0
  use_environment
  OUT_DIR=$ROOT/outputs/$OUT
  mkdir -p "$OUT_DIR"
  rm -f "$OUT_DIR"/{metrics.jsonl,train.log,run.json,summary.json,curves.png}
  echo "[1/3] model and questions"
  prepare
  echo "[2/3] $STEPS steps of GRPO with $OPTIM, $RANKS trainer rank(s): outputs/$OUT"
  # A short path: Ray's socket names must stay below 108 characters. Its own for every run, so that none meets another.
  RAY_DIR=$(mktemp -d /tmp/ray-XXXXXX)
  trap 'rm -rf "$RAY_DIR"' EXIT
  export VERL_LOGRA_SOCKET_DIR=$RAY_DIR
  all_overrides +ray_kwargs.ray_init._temp_dir="$RAY_DIR" "$@"
  "$PYTHON" -m recipes.common.launch --out "$OUT_DIR" \
    --steps "$STEPS" --stall-limit "$STALL_LIMIT" --time-limit "$TIME_LIMIT" -- \
    "$PYTHON" -m verl.trainer.main_ppo "${OVERRIDES[@]}" || code=$?
  [ "$code" = 0 ] || exit "$code"
  echo "[3/3] result"
  "$PYTHON" -m recipes.common.report "$OUT_DIR"
  echo "total $((SECONDS - start)) s; outputs/$OUT has metrics.jsonl, summary.json, curves.png and train.log"
}
