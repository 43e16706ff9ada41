#!/usr/bin/env bash
# The benchmarks of recipes/bench/run.py, whose --help lists what can be chosen. Sets up .venv first, with the packages of
# every method; VENV=... uses an environment as it is.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [ -z "${VENV:-}" ]; then
  bash "$ROOT/recipes/setup.sh" bench
  VENV=$ROOT/.venv
fi
cd "$ROOT" && exec "$VENV/bin/python" -W ignore -m recipes.bench.run "$@"
