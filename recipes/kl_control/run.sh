#!/usr/bin/env bash
# What the step controller is for: the quickstart with its learning rate and with 30 times that, by AdamW, by LoGRA
# without control and by LoGRA with control.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash recipes/kl_control/run.sh

Runs the quickstart for every combination of optimizer (adamw, logra, logra with KL_BUDGET), learning rate (1 and 30
times the recipe's) and seed; then prints a table and draws recipes/kl_control's picture into outputs/kl_control.
A run that is finished is not repeated, so the command can be interrupted and called again.

Variables (default):
  SEEDS ("1 2 3")     seeds of the runs
  FACTORS ("1 30")    multiples of the recipe's learning rate and update ratio
  KL_BUDGET (4e-3)    nats per token of one update, constant over the run
  STEPS (40)          updates of every run
  JOBS (1)            runs at a time; two fit 24 GB of memory
HELP
}
[ $# -eq 0 ] || { usage; [ "$1" = --help ] && exit 0 || exit 2; }

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
: "${SEEDS:=1 2 3}" "${FACTORS:=1 30}" "${KL_BUDGET:=4e-3}" "${STEPS:=40}" "${JOBS:=1}"
export STEPS

[ -n "${VENV:-}" ] || { bash "$ROOT/recipes/setup.sh"; VENV=$ROOT/.venv; }
export VENV

# One run, unless outputs/$1 has its summary already.
one() {
  local name=$1 optim=$2 factor=$3 seed=$4 budget=$5
  if [ -f "$ROOT/outputs/$name/summary.json" ]; then
    echo "$name: done earlier"
    return
  fi
  # A cautious update for LoGRA, a third of the quickstart's: the factor says how wrong it gets.
  local rates=()
  [ "$optim" != logra ] || rates=(LR=1e-3 UPDATE_RATIO=3e-3)
  env "${rates[@]}" OUT="$name" OPTIM="$optim" SEED="$seed" KL_BUDGET="$budget" LR_FACTOR="$factor" \
    bash "$ROOT/recipes/quickstart/run.sh" >"$ROOT/outputs/$name.out" 2>&1 ||
    { echo "$name: failed, see outputs/$name.out"; return 1; }
  echo "$name: $(grep 'held-out accuracy after' "$ROOT/outputs/$name.out")"
}

mkdir -p "$ROOT/outputs"
failed=0
for seed in $SEEDS; do
  for factor in $FACTORS; do
    for method in control adamw logra; do
      case $method in
        control) arguments=(logra "$factor" "$seed" "$KL_BUDGET") ;;
        *) arguments=("$method" "$factor" "$seed" "") ;;
      esac
      while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n || failed=1; done
      one "kl_control-$method-x$factor-seed$seed" "${arguments[@]}" &
    done
  done
done
while [ -n "$(jobs -rp)" ]; do wait -n || failed=1; done
wait || failed=1
[ "$failed" = 0 ] || { echo "error: some runs failed, see above" >&2; exit 1; }

cd "$ROOT" && "$VENV/bin/python" -m recipes.kl_control.report outputs
