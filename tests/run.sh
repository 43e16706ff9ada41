#!/usr/bin/env bash
# All tests: bash tests/run.sh [pytest arguments]. Sets up .venv first; VENV=... uses an environment as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE
# Many small processes and two cores: threads of one would only hold up another. Nothing is fetched.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

if [ -z "${VENV:-}" ]; then
  bash recipes/setup.sh
  VENV=.venv
fi
exec "$VENV/bin/python" -m pytest --durations=10 "$@"
