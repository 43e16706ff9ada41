"""``verl-logra plan``: does my model fit, and what does a weight sync cost? Asked before any machine is rented."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_logra.planner import text
from verl_logra.planner.memory import Setting
from verl_logra.planner.models import load, shipped
from verl_logra.planner.plan import Plan, Rollout

_BYTES = {"float32": 4, "bfloat16": 2}


def _positive(value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} must be a positive integer")
    return int(value)


def _gib(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{value!r} must be a positive number of GiB (80 GB are 74.5)")
    return number


def _share(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{value!r} must be a share in (0, 1]")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl-logra", description=__doc__)
    plan = parser.add_subparsers(dest="command", required=True).add_parser(
        "plan",
        help="memory per rank and bytes of a weight sync",
        description="Memory per training rank under verl's fsdp2 strategy, and bytes of a weight sync, from a model's "
        "shapes. Without --model: all shipped models against --device-memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = plan.add_argument
    add("--model", help="name on the Hugging Face hub of a shipped model, or a directory or file with a configuration")
    add("--ranks", type=_positive, required=True, help="GPUs that the trainer is sharded over")
    add("--rank", type=_positive, default=256, help="of sketches, adapters and projected gradients")
    add("--seq-len", type=_positive, required=True, help="tokens of a sequence, prompt included")
    add("--micro-batch", type=_positive, default=1, help="sequences in a micro-batch of one rank")
    add("--num-micro-batches", type=_positive, default=1, help="per update and rank")
    add(
        "--reduce-every-micro-batch",
        action="store_true",
        help="verl's use_no_sync_for_gradient_accumulation=False; by default unsharded fp32 gradients are kept until "
        "the last micro-batch",
    )
    add("--no-checkpointing", action="store_true", help="keep all activations")
    add("--non-target", choices=("adamw", "frozen"), default="adamw", help="LoGRA: the rest of the model")
    add(
        "--kl",
        action=argparse.BooleanOptionalAction,
        help="LoGRA's step controller; as in its configuration it is on where the rest is frozen",
    )
    add("--prompt-len", type=int, default=0, help="tokens of --seq-len that need no logits in the controller's probe")
    add("--probe-sequences", type=_positive, default=2, help="of the controller's probe")
    add("--storage-dtype", choices=_BYTES, default="float32", help="verl's model_dtype")
    add("--compute-dtype", choices=_BYTES, default="bfloat16", help="of verl's mixed precision")
    add("--critic", action="store_true", help="a value model of the same shape beside the actor (PPO)")
    add("--sync", choices=("low_rank", "full", "none"), default="low_rank", help="LoGRA's weight sync")
    add("--density", type=_share, default=0.01, help="share of elements in a sparse delta")
    add("--updates-per-sync", type=_positive, default=1, help="optimizer updates between two syncs")
    add("--rollout-share", type=_share, help="rollouts share the device: their gpu_memory_utilization")
    add("--rollout-tp", type=_positive, default=1, help="tensor parallel size of the rollout")
    add("--offload", action="store_true", help="the trainer is in host memory during generation")
    add("--low-halves", choices=("host", "device"), default="host", help="where receivers of low-rank syncs keep them")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: as torch allocates there, to validate")
    add("--device-memory", type=_gib, metavar="GIB", help="what must be enough; 80 GB are 74.5 GiB")
    add("--moments", action="store_true", help="show the step moment by moment")
    add("--picture", type=Path, metavar="FILE.png", help="also draw it (needs matplotlib)")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def _plan(args: argparse.Namespace, name: str) -> Plan:
    setting = Setting(
        ranks=args.ranks,
        rank=args.rank,
        seq_len=args.seq_len,
        micro_batch=args.micro_batch,
        num_micro_batches=args.num_micro_batches,
        reduce_every_micro_batch=args.reduce_every_micro_batch,
        checkpointing=not args.no_checkpointing,
        non_target=args.non_target,
        kl=args.non_target == "frozen" if args.kl is None else args.kl,
        prompt_len=args.prompt_len,
        probe_sequences=args.probe_sequences,
        storage_bytes=_BYTES[args.storage_dtype],
        compute_bytes=_BYTES[args.compute_dtype],
        critic=args.critic,
        sync=args.sync,
        device=args.device,
    )
    rollout = None
    if args.rollout_share is not None:
        rollout = Rollout(
            memory_share=args.rollout_share,
            tensor_parallel=args.rollout_tp,
            offload=args.offload,
            low_halves=args.low_halves,
        )
    model = load(name)
    narrowest = min(p.shape[1] for p in model.targets)
    if args.rank > narrowest:
        raise ValueError(f"--rank {args.rank} exceeds the narrowest target of {model.name}, {narrowest} features")
    return Plan(
        model=model,
        setting=setting,
        device_gib=args.device_memory,
        rollout=rollout,
        density=args.density,
        updates_per_sync=args.updates_per_sync,
    )


def _check(args: argparse.Namespace) -> None:
    if args.model is None and args.device_memory is None:
        raise ValueError("give --model, or --device-memory to see which of the shipped models fit")
    if not 0 <= args.prompt_len < args.seq_len:
        raise ValueError(f"--prompt-len {args.prompt_len} must be at least 0 and below --seq-len {args.seq_len}")
    if args.rollout_share is None:
        for given, option in ((args.offload, "--offload"), (args.low_halves == "device", "--low-halves device")):
            if given:
                raise ValueError(f"{option} is about rollouts on the trainer's device: give --rollout-share too")
    elif args.device_memory is None:
        raise ValueError("--rollout-share is a share of --device-memory: give that too")
    if args.picture is not None and args.model is None:
        raise ValueError("--picture draws one model: give --model")


def _all_that_fit(args: argparse.Namespace) -> list[Plan]:
    """Every shipped shape once, under its first name; narrower ones than the rank are left out."""
    plans: dict[object, Plan] = {}
    for name, model in shipped().items():
        if min(p.shape[1] for p in model.targets) >= args.rank:
            plans.setdefault(model.parameters, _plan(args, name))
    return list(plans.values())


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        _check(args)
        plans = _all_that_fit(args) if args.model is None else [_plan(args, args.model)]
    except ValueError as error:
        print(f"verl-logra plan: {error}", file=sys.stderr)
        return 2
    results = [plan.as_dict() for plan in plans]
    if args.picture is not None:
        from verl_logra.planner.picture import draw

        draw(results[0], args.picture)
    if args.json:
        print(json.dumps(results if args.model is None else results[0], indent=1))
    elif args.model is None:
        print(text.fits_table(results))
    else:
        shown = [text.heading(results[0]), text.method_table(results[0]), text.sync_table(results[0])]
        if args.moments:
            shown += [text.moment_table(results[0], method) for method in ("adamw", "logra")]
        print("\n\n".join(shown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
