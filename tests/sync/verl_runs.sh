#!/usr/bin/env bash
# Real verl runs on a CPU, bfloat16 rollouts. The verified ones send all weights in full as well after every sync, by
# verl's own way, and compare every byte that vLLM computes with. One line per run: syncs, how many were low-rank, rewards.
#
#   bash tests/sync/verl_runs.sh [KIND ...]        # default: colocated disaggregated low_rank full
#
# colocated: verified, 1 and 2 trainer ranks, each with 1 and with 4 updates per sync.
# current: the same under verl's current trainer (trainer.use_v1=True), where backend=logra is the key.
# disaggregated: the same over sockets, rollouts apart from the trainer (separate_async).
# low_rank, full: the colocated runs without verification, with the low-rank sync and without it: after both, their
# rewards are compared step by step.
# smollm2: times of low-rank and full syncs of SmolLM2-135M, side by side in one verified run of 1 rank with answers of
# four tokens; 21 steps, since the first sync is a full one.
# Variables: STEPS (60), RANKS ("1 2"), UPDATES ("1 4"), DTYPE (bfloat16), VENV (.venv as the quickstart recipe makes it).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${STEPS:=60}" "${RANKS:=1 2}" "${UPDATES:=1 4}" "${DTYPE:=bfloat16}"
ENGINE=actor_rollout_ref.rollout.checkpoint_engine
BATCH=16 # questions per step of the recipe

run() { # name, ranks, updates per sync, overrides ...
  local name=sync-$1-$2x$3-$DTYPE ranks=$2 updates=$3
  shift 3
  RANKS=$ranks recipe quickstart "$name" "$STEPS" \
    actor_rollout_ref.actor.ppo_mini_batch_size=$((BATCH / updates)) \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 "$@" # divides 8 answers to 16 / 4 questions on 2 ranks
}

recipe() { # recipe, name, steps, overrides ...
  local recipe=$1 name=$2 steps=$3
  shift 3
  STEPS=$steps OUT=$name bash recipes/"$recipe"/run.sh trainer.test_freq=-1 trainer.val_before_train=False \
    actor_rollout_ref.rollout.dtype="$DTYPE" "$@" >/dev/null 2>&1
  python3 tests/sync/verl_runs.py outputs/"$name" --steps "$steps"
}

low_rank="+$ENGINE.engine_kwargs.logra.enable=True" verify="+$ENGINE.engine_kwargs.logra.verify=True"
# Its answers are drawn without a number of their own, so the recipe's seeded agent loop does not fit.
current=(trainer.use_v1=True "$ENGINE.backend=logra"
  actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent)
failed=0
[ $# -gt 0 ] || set -- colocated disaggregated low_rank full
for what in "$@"; do
  if [ "$what" = smollm2 ]; then
    RANKS=1 recipe smollm2 "sync-smollm2-$DTYPE" 21 "$low_rank" "$verify" data.train_batch_size=2 \
      actor_rollout_ref.rollout.n=2 actor_rollout_ref.actor.ppo_mini_batch_size=2 data.max_response_length=4 \
      actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
      actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 || failed=1
    continue
  fi
  for ranks in $RANKS; do
    for updates in $UPDATES; do
      case $what in
        colocated) run "$what" "$ranks" "$updates" "$low_rank" "$verify" ;;
        current) run "$what" "$ranks" "$updates" "${current[@]}" "$verify" ;;
        low_rank) run "$what" "$ranks" "$updates" "$low_rank" ;;
        full) run "$what" "$ranks" "$updates" ;;
        disaggregated)
          run "$what" "$ranks" "$updates" "${current[@]}" "$verify" \
            trainer.v1.trainer_mode=separate_async actor_rollout_ref.hybrid_engine=False \
            trainer.v1.separate_async.parameter_sync_step="$updates" \
            actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=1 \
            "++ray_kwargs.ray_init.num_gpus=$((ranks + 1))"
          ;;
        *) echo "unknown kind of run: $what" >&2; exit 2 ;;
      esac || failed=1
    done
  done
done
[[ " $* " == *" low_rank "* || " $* " == *" full "* ]] || exit $failed
for ranks in $RANKS; do
  for updates in $UPDATES; do
    pair=(outputs/sync-{low_rank,full}-"${ranks}x$updates-$DTYPE")
    [ -d "${pair[0]}" ] && [ -d "${pair[1]}" ] || continue
    python3 tests/sync/verl_runs.py "${pair[@]}" --steps "$STEPS" || failed=1
  done
done
exit $failed
