"""verl's own training step with LoGRA in it: metrics, clipping, checkpoints, exports, offload, critic, refusals."""

import copy
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integrations.engines import batch, build_engine, critic_loss, one_rank, save_model, train
from tests.ranks import run_ranks

SETTINGS = {"rank": 6, "update_ratio": 1e-2}
KL = {"budget": 1e-3, "schedule": "constant", "realized_every": 1, "max_update_ratio": None}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(autouse=True)
def process_group(tmp_path):
    with one_rank(tmp_path):
        yield


def full(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights(engine):
    return {name: full(p) for name, p in engine.module.state_dict().items()}


def test_a_training_step_reports_what_it_did(model_path):
    engine = build_engine(model_path, SETTINGS)
    before = weights(engine)
    metrics = train(engine, batch())
    moved = {n: (p - before[n]).double().norm() for n, p in weights(engine).items()}
    targets = [name + ".weight" for name in engine.optimizer.targets]
    ratio = math.hypot(*(float(moved[n]) for n in targets)) / math.hypot(
        *(float(before[n].double().norm()) for n in targets)
    )
    assert metrics["logra_update_ratio"] == pytest.approx(ratio, rel=1e-2) == pytest.approx(1e-2, rel=2e-2)
    assert metrics["logra_targets"] == 14 and metrics["logra_updates"] == 1 and metrics["logra_applied"] == 1
    assert metrics["logra_state_bytes"] == engine.optimizer.state_bytes()
    assert moved["lm_head.weight"] > 0 and moved["model.layers.0.self_attn.q_proj.bias"] > 0


def test_grad_norm_and_clipping_mean_what_they_meant(model_path):
    """The norm of all sketches and of the rest's gradients, from which everything is scaled down to clip_grad."""
    engine = build_engine(model_path, SETTINGS, clip_grad=1e9)
    unclipped = train(engine, batch())["grad_norm"]
    engine = build_engine(model_path, SETTINGS, clip_grad=unclipped / 4)
    metrics = train(engine, batch())
    assert metrics["grad_norm"] == pytest.approx(unclipped, rel=1e-6)
    engine = build_engine(model_path, {**SETTINGS, "non_target": "frozen"}, clip_grad=unclipped / 4)
    metrics = train(engine, batch())
    assert metrics["logra_sketch_norm"] == pytest.approx(min(unclipped / 4, metrics["grad_norm"]), rel=1e-3)


def test_verl_skips_a_gradient_that_is_not_finite(model_path, capsys):
    engine = build_engine(model_path, SETTINGS)
    train(engine, batch())
    before, state = weights(engine), copy.deepcopy(engine.optimizer.state_dict())
    data = batch(seed=1)
    data["advantages"].values()[0] = math.nan
    metrics = train(engine, data)
    assert "grad_norm is not finite" in capsys.readouterr().out
    assert metrics["logra_applied"] == 0 and metrics["logra_updates"] == 1
    assert all(torch.equal(before[n], p) for n, p in weights(engine).items())
    now = engine.optimizer.state_dict()
    assert now["param_groups"] == state["param_groups"]
    assert all(torch.equal(full(state["state"][i][k]), full(v)) for i, s in now["state"].items() for k, v in s.items())


@pytest.mark.parametrize(
    "options", [{"param_offload": True, "optimizer_offload": True}, {"reshard_after_forward": False}]
)
def test_engine_options_do_not_change_the_result(model_path, options):
    plain, other = build_engine(model_path, SETTINGS), build_engine(model_path, SETTINGS, **options)
    for seed in range(2):
        assert train(plain, batch(seed=seed)).keys() == train(other, batch(seed=seed)).keys()
    assert all(torch.equal(p, weights(other)[n]) for n, p in weights(plain).items())


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_micro_batches_add_up(model_path, micro_batch_size):
    reference, other = build_engine(model_path, SETTINGS), build_engine(model_path, SETTINGS)
    expected = train(reference, batch())
    metrics = train(other, batch(micro_batch_size=micro_batch_size))
    for key in ("grad_norm", "logra_sketch_norm", "logra_update_ratio"):
        assert metrics[key] == pytest.approx(expected[key], rel=1e-4)


def test_a_response_without_tokens_contributes_nothing(model_path):
    engine = build_engine(model_path, {**SETTINGS, "kl": KL})
    data = batch(response_lengths=[4, 3, 5, 4])
    data["response_mask"].values()[4:7] = 0  # all of the second response
    metrics = train(engine, data)
    assert metrics["logra_applied"] == 1
    assert all(math.isfinite(value) for value in metrics.values() if isinstance(value, float))
    assert all(p.isfinite().all() for p in weights(engine).values())


def test_control_in_the_engine(model_path):
    engine = build_engine(model_path, {**SETTINGS, "kl": {**KL, "alpha_max": 100.0}})
    for seed in range(3):
        before = weights(engine)
        metrics = train(engine, batch(seed=seed, temperature=0.8, rollout_shift=1e-4))
        assert metrics["logra_kl_budget"] == pytest.approx(9e-4, rel=1e-2)
        assert metrics["logra_mismatch"] == pytest.approx(1e-4, rel=1e-2)
        assert metrics["logra_alpha"] ** 2 * metrics["logra_predicted_kl"] == pytest.approx(9e-4, rel=1e-2)
        assert metrics["logra_realized_kl"] == pytest.approx(metrics["logra_verified_kl"], rel=5e-3)
        assert metrics["logra_realized_kl"] < 1.5 * metrics["logra_kl_budget"]
        assert torch.equal(before["lm_head.weight"], weights(engine)["lm_head.weight"]), "the rest is frozen"
        assert 0 < metrics["logra_control_share"] < 1
    assert engine.module.training and engine.module.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("settings", [SETTINGS, {**SETTINGS, "kl": KL}])
def test_save_and_resume_continue_bit_for_bit(model_path, settings, tmp_path):
    engine = build_engine(model_path, settings, weight_decay=0.1)
    for seed in range(2):
        train(engine, batch(seed=seed, rollout_shift=1e-4))
        engine.lr_scheduler_step()
    engine.save_checkpoint(str(tmp_path / "checkpoint"), global_step=2)
    resumed = build_engine(model_path, settings, weight_decay=0.1)
    train(resumed, batch(seed=9))  # whatever it was before
    resumed.load_checkpoint(str(tmp_path / "checkpoint"))
    for seed in range(2, 4):
        expected, metrics = train(engine, batch(seed=seed)), train(resumed, batch(seed=seed))
        assert {**metrics, "logra_control_share": 0} == {**expected, "logra_control_share": 0}
    assert all(torch.equal(p, weights(resumed)[n]) for n, p in weights(engine).items())


def test_a_checkpoint_of_other_ranks_is_refused(model_path, tmp_path):
    (tmp_path / "optim_world_size_8_rank_0.pt").touch()
    with pytest.raises(ValueError, match="optim_world_size_8_rank_0.pt.*than the 1 of this run: resume with as many"):
        build_engine(model_path, SETTINGS).load_checkpoint(str(tmp_path))


def test_exports_keep_the_original_names(model_path, tmp_path):
    """verl's full-weight sync, and the Hugging Face model in its checkpoints loads in plain transformers."""
    engine = build_engine(model_path, SETTINGS, checkpoint_contents=("model", "optimizer", "extra", "hf_model"))
    train(engine, batch())
    exported, peft_config = engine.get_per_tensor_param()
    exported = dict(exported)
    original = AutoModelForCausalLM.from_pretrained(model_path)
    assert list(exported) == list(original.state_dict()) and peft_config is None
    engine.save_checkpoint(str(tmp_path), global_step=1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface", dtype=torch.float32)
    assert all(torch.equal(p, exported[n]) for n, p in loaded.state_dict().items())
    assert not torch.equal(loaded.lm_head.weight, original.lm_head.weight)


@pytest.mark.parametrize("refresh, expected", [("sync", 1), ("update", 2), ("never", 0)])
def test_a_weight_sync_refreshes_the_projections(model_path, refresh, expected):
    engine = build_engine(model_path, {**SETTINGS, "refresh": refresh})
    for seed in range(2):
        train(engine, batch(seed=seed))
    engine.get_per_tensor_param()
    assert engine.optimizer.taps.refresh == expected


def test_a_critic_trains_without_control(model_path, caplog):
    engine = build_engine(model_path, {**SETTINGS, "kl": KL}, model_type="value_model")
    assert "the kl settings are off" in caplog.text
    before = weights(engine)
    metrics = [train(engine, batch(), critic_loss()) for _ in range(6)]
    assert metrics[-1]["critic/vf_loss"] < 0.8 * metrics[0]["critic/vf_loss"]
    assert metrics[0]["logra_applied"] == 1 and "logra_predicted_kl" not in metrics[0]
    assert not torch.equal(before["score.weight"], weights(engine)["score.weight"])


def test_other_optimizers_run_as_without_the_plugin(model_path):
    from verl_logra.cpu.engine import CPUEngineWithLMHead

    engine = build_engine(model_path, None, optimizer="AdamW", optimizer_impl="torch.optim")
    assert type(engine).__mro__[2] is CPUEngineWithLMHead and engine.logra_config is None
    metrics = train(engine, batch())
    assert not [key for key in metrics if "logra" in key]
    assert type(engine.optimizer) is torch.optim.AdamW
    assert len(engine.optimizer.param_groups[0]["params"]) == len(list(engine.module.parameters()))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(strategy="fsdp"), "strategy=fsdp flattens parameters.*actor_rollout_ref.actor.strategy=fsdp2"),
        (dict(optimizer="LoGRA", optimizer_impl="torch.optim"), "needs both optim.optimizer_impl=verl_logra and"),
        (dict(optimizer="AdamW", optimizer_impl="verl_logra"), "needs both optim.optimizer_impl=verl_logra and"),
        (dict(model_options={"lora_rank": 8}), "LoRA and LoGRA are both on.*lora_rank=0"),
        (dict(settings={"rnk": 8}), "unknown key 'rnk'; did you mean 'rank'"),
        (dict(settings={"rank": 8, "target_modules": ["c_attn"]}), "matched no nn.Linear"),
        (dict(settings={"rank": 4096}), "rank=4096 exceeds in_features=36"),
        (
            dict(settings={"rank": 8, "non_target": "frozen"}, model_type="value_model"),
            "freeze the critic's new value head",
        ),
        (dict(settings={"rank": 8, "kl": {}}, use_fused_kernels=True), "needs logits, which fused kernels never build"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(model_path, options, message):
    settings = options.pop("settings", SETTINGS)
    with pytest.raises(ValueError, match=message):
        build_engine(model_path, settings, **options)


@pytest.mark.parametrize("strategy", ["megatron", "veomni", "torchtitan"])
def test_engines_of_other_strategies_refuse_by_name(strategy):
    """Their packages are not installed here, so the refusal is tried on an engine that stands in for them."""
    from types import SimpleNamespace

    from verl_logra.integrations.engine import _RefusingEngine

    class Engine:
        def __init__(self, **kwargs):
            pass

    refusing = type("Refusing", (_RefusingEngine, Engine), {})
    with pytest.raises(ValueError, match=f"strategy={strategy} is not supported: LoGRA needs .*strategy=fsdp2"):
        refusing(optimizer_config=SimpleNamespace(optimizer="LoGRA"), engine_config=SimpleNamespace(strategy=strategy))
    refusing(optimizer_config=SimpleNamespace(optimizer="adam"), engine_config=SimpleNamespace(strategy=strategy))


def two_rank_training(rank, model_path, settings):
    """Ranks get different sequences, different lengths, and so different numbers of micro-batches."""
    engine = build_engine(model_path, settings)
    history = []
    for step in range(2):
        lengths = [3, 6, 4, 5] if rank else [2, 3, 2, 2]
        data = batch(seed=2 * step + rank, response_lengths=lengths, use_dynamic_bsz=True, max_token_len_per_gpu=24)
        history.append(train(engine, data))
    state = engine.optimizer.state_bytes()
    updates = sum(p.to_local().numel() * 4 for n, p in engine.module.named_parameters() if n.endswith("logra_update"))
    targets = sum(t.module.in_features * t.module.out_features for t in engine.optimizer.targets.values())
    rows = sum(t.module.out_features for t in engine.optimizer.targets.values())
    return history, weights(engine), (state, updates, targets, rows)


def test_two_ranks_with_different_batches(model_path):
    settings = {**SETTINGS, "kl": KL}
    first, second = run_ranks(2, two_rank_training, model_path, settings)
    assert all(torch.equal(p, second[1][n]) for n, p in first[1].items())
    for mine, other in zip(first[0], second[0], strict=True):
        for key in ("grad_norm", "logra_predicted_kl", "logra_alpha", "logra_verified_kl", "logra_update_ratio"):
            assert mine[key] == other[key] and math.isfinite(mine[key])
        assert mine["logra_realized_kl"] == pytest.approx(mine["logra_verified_kl"], rel=5e-3)
    # Memory per target parameter: state one fp32 a row, sketch and update factor [out, rank] each, all over 2 ranks.
    for state, updates, _, rows in (first[2], second[2]):
        assert state <= 4 * math.ceil(rows / 2) + 4 * 14
        assert updates <= 4 * 6 * (math.ceil(rows / 2) + 14)
