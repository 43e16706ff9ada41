# What every recipe's run.sh shares. A run.sh sets ROOT, RECIPE and the defaults of the variables below, sources this
# file and calls `recipe "$@"`; it provides two functions: `prepare` makes the data and sets MODEL_DIR, TRAIN_FILE,
# HELD_OUT_FILE; `recipe_overrides` sets the array RECIPE_OVERRIDES.

: "${SAVE_EVERY:=}" "${RESUME:=}" # checkpoint after so many updates; 1: continue the run OUT from its last one

die() { echo "error: $*" >&2; exit 1; }

# Sets OPTIMIZER_OVERRIDES from OPTIM and what belongs to it.
optimizer_overrides() {
  [ -z "$KL_BUDGET" ] || [ "$OPTIM" = logra ] || die "KL_BUDGET=$KL_BUDGET needs OPTIM=logra: only LoGRA has a step controller"
  OPTIMIZER_OVERRIDES=()
  add_optimizer actor_rollout_ref.actor.optim "$OPTIM" "$LR"
  [ "$OPTIM" != lora ] || OPTIMIZER_OVERRIDES+=(
    # LoRA is a setting of the model; the factor of two for alpha is the usual one. Merged into the weights for rollouts:
    # vLLM's adapters want the layers that it packs on a CPU.
    actor_rollout_ref.model.lora_rank="$RANK" actor_rollout_ref.model.lora_alpha=$((2 * RANK))
    actor_rollout_ref.model.target_modules="$LORA_TARGETS" actor_rollout_ref.model.lora.merge=True
  )
}

OPTIMIZERS="logra adamw adam8bit lora galore flora apollo"
# LoGRA's default targets.
LORA_TARGETS='[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]'

# Appends to OPTIMIZER_OVERRIDES what verl needs to train with an optimizer: the prefix of its keys, OPTIM, learning rate.
add_optimizer() {
  local keys=$1 optim=$2 class= settings=
  OPTIMIZER_OVERRIDES+=("$keys.lr=$3")
  case $optim in
    adamw | lora) return ;; # verl's default; LoRA's few weights are trained by it too
    adam8bit) class=AdamW8bit ;;
    galore) class=GaLoreAdamW settings="rank: $RANK" ;;
    flora) class=Flora settings="rank: $RANK" ;;
    apollo) class=APOLLOAdamW settings="rank: $RANK" ;;
    logra)
      settings="rank: $RANK, update_ratio: $UPDATE_RATIO"
      # A critic has no policy whose KL could be controlled.
      [ -z "$KL_BUDGET" ] || [[ $keys = critic.* ]] ||
        settings+=", kl: {budget: $KL_BUDGET, budget_final: null, probe_sequences: $PROBE_SEQUENCES, realized_every: 1}"
      OPTIMIZER_OVERRIDES+=("$keys.optimizer_impl=verl_logra" "$keys.optimizer=LoGRA")
      ;;
    *) die "$keys: $optim is none of $OPTIMIZERS" ;;
  esac
  case $optim in
    flora | apollo) [ "$RANKS" = 1 ] || die "RANKS=$RANKS: $optim trains on one rank only, see recipes/baselines" ;;
  esac
  [ -z "$class" ] || OPTIMIZER_OVERRIDES+=("$keys.optimizer_impl=recipes.baselines" "$keys.optimizer=$class")
  [ -z "$settings" ] || OPTIMIZER_OVERRIDES+=("$keys.override_optimizer_config={$settings}")
}

# Makes model and questions once per version of the files that make them, and sets MODEL_DIR, TRAIN_FILE, HELD_OUT_FILE:
# the package under recipes/ with prepare.py and questions.py, then packages whose files it uses.
prepare_once() {
  local name=$1 files=() package key data
  for package in "$@"; do files+=("$ROOT/recipes/$package"/{prepare,questions}.py); done
  key=$(cat "${files[@]}" | sha256sum | cut -c1-12)
  data=$ROOT/outputs/.$name-data-$key
  (
    command -v flock >/dev/null && flock 9 # two runs at once: the second waits for the first
    if [ -d "$data" ]; then
      echo "  made by an earlier run: $data"
    else
      rm -rf "$data.partial"
      HF_HUB_OFFLINE=1 "$PYTHON" -W ignore -m "recipes.$name.prepare" "$data.partial"
      mv "$data.partial" "$data"
    fi
  ) 9>"$ROOT/outputs/.$name.lock"
  MODEL_DIR=$data/model TRAIN_FILE=$data/train.parquet HELD_OUT_FILE=$data/held_out.parquet
}

# Sets OVERRIDES: the complete list for verl's main_ppo, the user's own last so that they win.
all_overrides() {
  source "$ROOT/recipes/common/cpu.sh"
  optimizer_overrides
  resume_overrides
  recipe_overrides
  OVERRIDES=(
    "${CPU_OVERRIDES[@]}"
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.entropy_coeff=0
    data.train_files="$TRAIN_FILE" data.val_files="$HELD_OUT_FILE" data.filter_overlong_prompts=False
    actor_rollout_ref.model.path="$MODEL_DIR"
    # Measures gradients and optimizer state, whatever the optimizer.
    actor_rollout_ref.model.external_lib=recipes.common.optimizer_memory
    # One seed for the order of the questions and for every answer that is drawn.
    data.seed="$SEED" actor_rollout_ref.rollout.seed="$SEED" actor_rollout_ref.actor.data_loader_seed="$SEED"
    actor_rollout_ref.rollout.agent.agent_loop_config_path="$ROOT/recipes/common/agent_loop.yaml"
    actor_rollout_ref.rollout.agent.default_agent_loop=seeded_single_turn_agent
    # vLLM's seeded sampling fails on a CPU when a prompt is split, so the longest batch of prompts must fit at once.
    actor_rollout_ref.rollout.enable_chunked_prefill=False
    trainer.total_training_steps="$STEPS" trainer.total_epochs=1000
    trainer.val_before_train=True "${RESUME_OVERRIDES[@]}"
    trainer.logger='["console","file"]' trainer.project_name="$RECIPE" trainer.experiment_name="$OUT"
    trainer.default_local_dir="$OUT_DIR/checkpoints" hydra.run.dir="$OUT_DIR/hydra"
    "${RECIPE_OVERRIDES[@]}"
    "${OPTIMIZER_OVERRIDES[@]}"
    "$@"
  )
}

# Sets RESUME_OVERRIDES from SAVE_EVERY and RESUME.
resume_overrides() {
  RESUME_OVERRIDES=(trainer.save_freq="${SAVE_EVERY:--1}" trainer.resume_mode=disable)
  [ -z "$SAVE_EVERY" ] || RESUME_OVERRIDES+=(
    trainer.max_actor_ckpt_to_keep=1 trainer.max_critic_ckpt_to_keep=1
  )
  [ -z "$RESUME" ] || RESUME_OVERRIDES+=(trainer.resume_mode=auto trainer.val_before_train=False)
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
  [[ $SAVE_EVERY =~ ^([1-9][0-9]*)?$ ]] || die "SAVE_EVERY=$SAVE_EVERY must be a positive number"
  [[ $RESUME =~ ^1?$ ]] || die "RESUME=$RESUME must be 1, or empty for a new run"
  [[ $OUT =~ ^[A-Za-z0-9._-]+$ ]] || die "OUT=$OUT must be a plain name: results go to outputs/\$OUT"

  local start=$SECONDS code=0 class
  use_environment
  OUT_DIR=$ROOT/outputs/$OUT
  if [ -n "$RESUME" ]; then
    local saved=$OUT_DIR/checkpoints/latest_checkpointed_iteration.txt
    [ -f "$saved" ] || die "RESUME=1: outputs/$OUT has no checkpoint; start it with SAVE_EVERY and without RESUME"
    [ "$(<"$saved")" -lt "$STEPS" ] || die "RESUME=1: outputs/$OUT has $(<"$saved") updates; set STEPS to more than that"
  else
    rm -rf "$OUT_DIR"/{checkpoints,metrics.jsonl,earlier.jsonl,run.json}
  fi
  mkdir -p "$OUT_DIR"
  rm -rf "$OUT_DIR"/{optimizer_memory,train.log,summary.json,curves.png}
  echo "[1/3] model and questions"
  prepare
  echo "[2/3] $STEPS updates with $OPTIM, $RANKS trainer rank(s): outputs/$OUT"
  # A short path: Ray's socket names must stay below 108 characters. Its own for every run, so that none meets another.
  RAY_DIR=$(mktemp -d /tmp/ray-XXXXXX)
  trap 'rm -rf "$RAY_DIR"' EXIT
  export VERL_LOGRA_SOCKET_DIR=$RAY_DIR VERL_LOGRA_RUN_FOLDER=$OUT_DIR
  all_overrides +ray_kwargs.ray_init._temp_dir="$RAY_DIR" "$@"
  # A missing package would otherwise show in a worker, a minute later.
  for class in $(printf '%s\n' "${OVERRIDES[@]}" | grep -A1 'optimizer_impl=recipes.baselines$' | sed -n 's/.*optimizer=//p'); do
    "$PYTHON" -W ignore -c "from recipes.baselines import $class" 2>/dev/null ||
      die "$class needs a package: bash $ROOT/recipes/setup.sh baselines"
  done
  "$PYTHON" -m recipes.common.launch --out "$OUT_DIR" ${RESUME:+--resume} \
    --steps "$STEPS" --stall-limit "$STALL_LIMIT" --time-limit "$TIME_LIMIT" -- \
    "$PYTHON" -m verl.trainer.main_ppo "${OVERRIDES[@]}" || code=$?
  [ "$code" = 0 ] || exit "$code"
  echo "[3/3] result"
  "$PYTHON" -m recipes.common.report "$OUT_DIR"
  echo "total $((SECONDS - start)) s; outputs/$OUT has metrics.jsonl, summary.json, curves.png and train.log"
}
