import pytest

from verl_logra import KLConfig, LoGRAConfig


@pytest.mark.parametrize(
    "values, message",
    [
        ({"rnak": 8}, "'rnak'; did you mean 'rank'"),
        ({"kl": {"buget": 1e-4}}, "kl: unknown key 'buget'; did you mean 'budget'"),
        ({"adamw": {"learning_rate": 1}}, "adamw: unknown key 'learning_rate'"),
        ({"zzz": 1}, "valid keys: rank, seed"),
        ({"rank": 0}, "rank=0 is out of range: it must be at least 1"),
        ({"rank": "256"}, "rank='256' must be an integer"),
        ({"rank": True}, "rank=True must be an integer"),
        ({"projection": "sparse"}, "projection='sparse' is not one of 'rademacher', 'gaussian'"),
        ({"scale": "LR"}, "scale='LR' is not one of 'ratio', 'lr'"),
        ({"non_target": "sgd"}, "non_target='sgd' is not one of 'adamw', 'frozen'"),
        ({"target_modules": "q_proj"}, r"must be a list of module names, for example \[q_proj"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"update_ratio": float("nan")}, "update_ratio=nan is out of range: it must be positive"),
        ({"beta2": 1.0}, "beta2=1.0 is out of range"),
        ({"kl": {"budget": 0}}, "kl.budget=0 is out of range: it must be positive"),
        ({"kl": {"alpha_min": 5}}, r"kl.alpha_min=5 is out of range: it must be in \[0, alpha_max\)"),
        ({"kl": {"probe": "vjp"}}, "probe='vjp' is not one of 'jvp', 'finite_difference'"),
        ({"kl": {"verify_tolerance": 0.5}}, "kl.verify_tolerance=0.5 is out of range: it must be at least 1"),
        ({"kl": 2e-4}, "kl=0.0002 must be a mapping"),
        ({"adamw": {"betas": [0.9]}}, "adamw.betas=.* must be two numbers"),
    ],
)
def test_bad_settings_say_what_to_set(values, message):
    with pytest.raises(ValueError, match=message):
        LoGRAConfig.from_dict(values)


def test_published_defaults():
    c, kl = LoGRAConfig(), KLConfig()
    assert (c.beta2, c.eps, c.update_ratio, c.projection) == (0.95, 1e-8, 6e-5, "rademacher")
    assert (kl.budget, kl.budget_final, kl.schedule, kl.schedule_updates) == (2e-4, 2e-5, "cosine", 300)
    assert kl.max_update_ratio == 1e-2
    assert (kl.alpha_max, kl.probe_sequences, kl.probe_max_tokens) == (3.0, 2, 4096)
    assert (kl.mismatch_ema, kl.mismatch_floor) == (0.3, 0.5)


def test_rest_is_frozen_under_control_unless_said_otherwise():
    assert LoGRAConfig().non_target == "adamw"
    assert LoGRAConfig(kl=KLConfig()).non_target == "frozen"
    assert LoGRAConfig.from_dict({"kl": {}, "non_target": "adamw"}).non_target == "adamw"


def test_nested_mappings_become_settings():
    c = LoGRAConfig.from_dict({"kl": {"budget": 1e-3}, "adamw": {"betas": [0.8, 0.9]}, "target_modules": ["q_proj"]})
    assert c.kl == KLConfig(budget=1e-3) and c.adamw.betas == (0.8, 0.9) and c.target_modules == ("q_proj",)
