#!/usr/bin/env bash
# The study: methods and ablations on the quickstart's task, three seeds each.
#
#   bash recipes/study/run.sh [--jobs 2] [--seeds 1 2 3] [--only adamw logra ...] [--subset]
#
# Runs what has no result in recipes/study/results yet, then renews the tables of recipes/study/README.md and the pictures.
# --subset: two methods, one seed, 10 updates, in minutes, into outputs/study. --help lists the rest.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ -n "${VENV:-}" ] || { bash "$ROOT/recipes/setup.sh"; VENV=$ROOT/.venv; }
export VENV
cd "$ROOT"
"$VENV/bin/python" -m recipes.study.run "$@"
case " $* " in
  *" -h "* | *" --help "*) ;;
  *" --subset "*) "$VENV/bin/python" -m recipes.study.report outputs/study ;;
  *) "$VENV/bin/python" -m recipes.study.report ;;
esac
