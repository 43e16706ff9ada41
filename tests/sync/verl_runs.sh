#!/usr/bin/env bash
# Real verl runs on a CPU that check every weight sync: after each one all weights are sent in full as well, by verl's own
# way, and every byte that vLLM computes with is compared. One line per run: syncs, how many were low-rank, rewards.
#
#   bash tests/sync/verl_runs.sh [colocated|disaggregated|full ...]
#
# colocated: 1 and 2 trainer ranks, with 1 and with 4 updates per sync. disaggregated: the same, over sockets.
# full: the colocated run of 1 rank and 1 update once more without the low-rank sync, for its rewards.
# Variables: STEPS (60), RANKS ("1 2"), UPDATES ("1 4"), VENV (.venv as the quickstart recipe makes it).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${STEPS:=60}" "${RANKS:=1 2}" "${UPDATES:=1 4}"
ENGINE=actor_rollout_ref.rollout.checkpoint_engine
BATCH=16 # questions per step of the recipe

run() { # name, ranks, updates per sync, overrides ...
  local name=sync-$1-$2x$3 ranks=$2 updates=$3
  shift 3
  local out=outputs/$name
  RANKS=$ranks STEPS=$STEPS OUT=$name bash recipes/quickstart/run.sh trainer.test_freq=-1 trainer.val_before_train=False \
    "$@" >/dev/null 2>&1
  local code=$?
  python3 - "$name" "$code" "$out" <<'PY'
import json, pathlib, re, sys
name, code, out = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
log = (out / "train.log").read_text(errors="replace") if (out / "train.log").exists() else ""
verified = re.findall(r"((?:low-rank|full) weight sync[^\n]*?) verified at step (\d+): 0 bytes differ in (\d+)", log)
low_rank = sum(plan.startswith("low-rank") for plan, _, _ in verified)
steps = [json.loads(line)["data"] for line in (out / "metrics.jsonl").read_text().splitlines()] if log else []
rewards = [s["critic/score/mean"] for s in steps if "critic/score/mean" in s]
print(f"{name}: exit {code}, {len(steps)} steps, {len(verified)} syncs verified ({low_rank} low-rank), "
      f"{'computes with other weights' in log and 'BYTES DIFFER' or '0 bytes differ'}, "
      f"mean reward of the last ten steps {sum(rewards[-10:]) / max(1, len(rewards[-10:])):.4f}")
PY
}

low_rank_sync=("+$ENGINE.engine_kwargs.logra.enable=True" "+$ENGINE.engine_kwargs.logra.verify=True")
for what in "${@:-colocated}"; do
  for ranks in $RANKS; do
    for updates in $UPDATES; do
      batch=actor_rollout_ref.actor.ppo_mini_batch_size
      case $what in
        colocated) run colocated "$ranks" "$updates" $batch=$((BATCH / updates)) "${low_rank_sync[@]}" ;;
        full) run full "$ranks" "$updates" $batch=$((BATCH / updates)) ;;
        disaggregated)
          run disaggregated "$ranks" "$updates" $batch=$((BATCH / updates)) "${low_rank_sync[@]}" $ENGINE.backend=logra \
            trainer.use_v1=True trainer.v1.trainer_mode=separate_async actor_rollout_ref.hybrid_engine=False \
            trainer.v1.separate_async.parameter_sync_step="$updates" \
            actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent \
            actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=1 \
            "++ray_kwargs.ray_init.num_gpus=$((ranks + 1))"
          ;;
        *) echo "unknown kind of run: $what" >&2; exit 2 ;;
      esac
    done
  done
done
