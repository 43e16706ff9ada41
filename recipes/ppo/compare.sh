#!/usr/bin/env bash
# The critic of PPO under LoGRA and under AdamW, side by side: the same actor (OPTIM, LoGRA), data and seeds.
#
#   bash recipes/ppo/compare.sh [hydra overrides ...]
#
# Runs recipes/ppo/run.sh twice, unless outputs/ppo-critic-adamw and -logra are there, and prints value loss and explained
# variance over the run. Variables as in recipes/ppo/run.sh, but CRITIC_OPTIM and OUT.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
for optim in adamw logra; do
  [ -f "$ROOT/outputs/ppo-critic-$optim/summary.json" ] ||
    CRITIC_OPTIM=$optim OUT=ppo-critic-$optim bash "$ROOT/recipes/ppo/run.sh" "$@"
done
cd "$ROOT" && "${VENV:-.venv}/bin/python" -m recipes.ppo.report outputs/ppo-critic-{adamw,logra}
