#!/usr/bin/env bash
# Makes the environment that the CPU recipes and the tests use: .venv in the clone, nothing outside of it.
#
#   bash recipes/setup.sh [EXTRA ...]   # extras of pyproject.toml besides cpu, recipes and dev; they stay for later starts
#
# Needs Python 3.10, 3.11 or 3.12 with pip and venv (PYTHON=... names one), an index with the packages, and about 6 GB
# of disk (8 GB where only the general build of torch, with CUDA libraries, is to be had). Your pip settings (indexes,
# find-links, certificate, ...) are used. A second start finds everything in place and takes a second.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
STAMP=$VENV/.verl-logra-setup
NEEDED_GB=8

say() { echo "[setup] $*"; }
die() { echo "[setup] error: $*" >&2; exit 1; }

# What the environment was made from: when any of it changes, it is brought up to date.
fingerprint() {
  cat "$ROOT/pyproject.toml" "$ROOT/recipes/setup.sh" "$ROOT/recipes/common/cpu-overrides.txt" \
    "$ROOT/recipes/common/vllm-alias/pyproject.toml" | sha256sum | cut -d' ' -f1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10 python}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  local seen
  seen=$("${PYTHON:-python3}" -V 2>&1 | head -n 1) || true
  die "no Python 3.10, 3.11 or 3.12 (${PYTHON:-python3} is: ${seen:-missing}). Install one, or set PYTHON=/path/to/python3.11"
}

# The extras asked for now (arguments) or at an earlier start.
wanted_extras() {
  local extra
  for extra in "$@"; do
    grep -q "^$extra = \[" "$ROOT/pyproject.toml" || die "pyproject.toml has no extra $extra"
  done
  printf '%s\n' "$@" $(tail -n +2 "$STAMP" 2>/dev/null) | sort -u | sed '/^$/d'
}

make_venv() {
  local python free_gb
  python=$(find_python)
  free_gb=$(($(df -Pk "$ROOT" | awk 'NR == 2 {print $4}') / 1048576))
  [ "$free_gb" -ge "$NEEDED_GB" ] || die "$free_gb GB free in $ROOT, up to $NEEDED_GB GB are needed"
  say "1/3 isolated environment with $("$python" -V 2>&1) in $VENV"
  "$python" -m venv --clear "$VENV" ||
    die "$python cannot make a virtual environment; Debian and Ubuntu have it in the package python3-venv"
}

install_packages() { # extras
  local python=$VENV/bin/python
  say "2/3 uv, the installer (by pip)"
  "$python" -m pip install --quiet --disable-pip-version-check uv || die "pip could not install uv: see above"
  eval "$("$python" -m pip config list | "$python" "$ROOT/recipes/common/pip_settings.py")"
  say "3/3 verl, vLLM for CPU, torch and the rest, about 230 packages (minutes, most of them the download)"
  export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-300}
  (cd "$ROOT" && "$VENV/bin/uv" pip install --python "$python" --overrides recipes/common/cpu-overrides.txt \
    --editable ".[$(echo cpu recipes dev $1 | tr ' ' ,)]" ./recipes/common/vllm-alias) ||
    die "the packages could not be installed: see above"
}

main() {
  unset PYTHONDONTWRITEBYTECODE # byte code is cached from the first import on: without it every start is 3x slower
  # Two starts at once wait for each other.
  if command -v flock >/dev/null; then
    exec 9>"$ROOT/.venv.lock"
    flock 9
  fi
  local wanted extras
  extras=$(wanted_extras "$@")
  wanted=$(fingerprint; echo "$extras")
  if [ -x "$VENV/bin/python" ] && [ "$(cat "$STAMP" 2>/dev/null)" = "$wanted" ]; then
    say "environment is up to date"
    return
  fi
  local start=$SECONDS
  [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || make_venv
  install_packages "$extras"
  echo "$wanted" >"$STAMP"
  say "done in $((SECONDS - start)) s: $VENV/bin/python"
}

main "$@"
