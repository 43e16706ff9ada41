#!/usr/bin/env bash
# Do all patches apply to the pinned verl, alone and in order, and do their tests pass with them and fail without them?
#   bash patches/check.sh [number ...]      (VENV=... uses an environment as it is)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

if [ -z "${VENV:-}" ]; then
  bash recipes/setup.sh
  VENV=.venv
fi
exec "$VENV/bin/python" patches/check.py "$@"
