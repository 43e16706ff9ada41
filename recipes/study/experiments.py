"""What the study compares: every experiment is the quickstart with other variables and overrides, nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field

OPTIM = "++actor_rollout_ref.actor.optim.override_optimizer_config"
FOUR_UPDATES = "actor_rollout_ref.actor.ppo_mini_batch_size=4"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One row of the table."""

    name: str
    group: str
    """The comparison it belongs to; the experiments of a group are drawn together."""
    label: str
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of recipes/quickstart/run.sh."""
    overrides: tuple[str, ...] = ()
    """Hydra overrides for verl."""


def _method(optim: str, label: str) -> Experiment:
    return Experiment(name=optim, group="methods", label=label, variables={"OPTIM": optim})


def _logra(name: str, group: str, label: str, *overrides: str, **variables: str) -> Experiment:
    return Experiment(
        name=name, group=group, label=label, variables={"OPTIM": "logra", **variables}, overrides=overrides
    )


METHODS = (
    _method("adamw", "AdamW"),
    _method("logra", "LoGRA, rank 16"),
    _method("lora", "LoRA, rank 16"),
    _method("galore", "GaLore, rank 16"),
    _method("flora", "Flora, rank 16"),
    _method("apollo", "APOLLO, rank 16"),
    _method("adam8bit", "8-bit AdamW"),
)

# The experiment `logra` (rank 16, Rademacher, int8, ratio) is the other member of these groups.
ABLATIONS = (
    # Inputs of a layer are 128 or 384 wide: a rank of 256 would compress nothing.
    _logra("rank-4", "rank", "rank 4", RANK="4"),
    _logra("rank-64", "rank", "rank 64", RANK="64"),
    _logra("gaussian", "projection", "Gaussian projection", f"{OPTIM}.projection=gaussian"),
    _logra("scale-lr", "scale", "scale=lr, learning rate 1e-3", f"{OPTIM}.scale=lr", LR="1e-3"),
    _logra("kl-4e-3", "kl-budget", "KL budget 4e-3", KL_BUDGET="4e-3"),
    _logra("kl-16e-3", "kl-budget", "KL budget 4 times that", KL_BUDGET="16e-3"),
    _logra("kl-1e-3", "kl-budget", "KL budget a quarter of that", KL_BUDGET="1e-3"),
    _logra("bf16-factors", "factors", "bf16 factors", f"{OPTIM}.factor_dtype=bfloat16"),
    _logra("fp32-factors", "factors", "fp32 factors", f"{OPTIM}.factor_dtype=float32"),
    # With one update per sync `update` and `sync` are the same, so here are four, each of half the size.
    *(
        _logra(
            f"refresh-{refresh}",
            "refresh",
            f"refresh={refresh}, 4 updates per sync",
            f"{OPTIM}.refresh={refresh}",
            FOUR_UPDATES,
            LR="1.5e-3",
            UPDATE_RATIO="4.5e-3",
        )
        for refresh in ("update", "sync", "never")
    ),
)

REFERENCE = METHODS[1]
"""LoGRA as the quickstart runs it: what every ablation changes one thing of."""

# Are the learning rates of recipes/quickstart/task.sh good ones? Each method with a third and three times of its own.
LEARNING_RATES = tuple(
    Experiment(
        name=f"{method.name}-lr-x{factor}",
        group="learning-rates",
        label=f"{method.label}, learning rate x {factor}",
        variables={**method.variables, "LR_FACTOR": factor},
    )
    for method in METHODS
    for factor in ("0.33", "3")
)

EXPERIMENTS = {experiment.name: experiment for experiment in (*METHODS, *ABLATIONS, *LEARNING_RATES)}
GROUPS = {
    group: tuple(e.name for e in EXPERIMENTS.values() if e.group == group)
    for group in dict.fromkeys(e.group for e in EXPERIMENTS.values())
}
SUBSET = ("adamw", "logra")
"""What ``--subset`` runs, with one seed and 10 updates: minutes, to see that everything works."""
assert len(EXPERIMENTS) == len((*METHODS, *ABLATIONS, *LEARNING_RATES)), "two experiments have one name"
