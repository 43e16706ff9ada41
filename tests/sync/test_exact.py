"""The rollout's weights against a full sync: bf16(W) or W of the trainer, bit for bit."""

import pytest
import torch

from tests.sync.rollout import Rollout, send, train, weight_sync_of
from tests.tiny_models import loss_of, tiny_model, tokens
from verl_logra import LoGRA, LoGRAConfig

SIZES = dict(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=68)


def setup(*, dtype=torch.float32, weight_decay=0.1, architecture="qwen2", seed=0, **settings):
    model = tiny_model(architecture, dtype=dtype, seed=seed, **SIZES)
    settings = dict(rank=4, scale="ratio", update_ratio=1e-3, non_target="frozen") | settings
    optimizer = LoGRA(model, LoGRAConfig(**settings), lr=1e-2, weight_decay=weight_decay)
    return model, optimizer, weight_sync_of(model, optimizer)


def assert_equal(model, optimizer, rollout):
    """Against the state dict, except that a bf16 trainer's targets are joined with their low halves."""
    masters = {f"{name}.weight": (w, low) for name, w, low in optimizer.target_weights()}
    for name, parameter in model.state_dict().items():
        truth = parameter.detach()
        if name in masters and masters[name][1] is not None and rollout.dtype == torch.float32:
            high, low = masters[name]
            bits = high.view(torch.int16).long() * 65536 + low.long()
            truth = bits.to(torch.int32).view(torch.float32)
        assert torch.equal(rollout.whole(name), truth.to(rollout.dtype)), name


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("low_half", ["host", "device", "fp32"])
@pytest.mark.parametrize("rollout_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trainer_dtype", [torch.float32, torch.bfloat16])
def test_receiver_equals_trainer_after_every_sync(trainer_dtype, rollout_dtype, low_half, num_workers):
    model, optimizer, weight_sync = setup(dtype=trainer_dtype)
    rollout = Rollout(model, rollout_dtype, num_workers, low_half)
    kinds = []
    for step, num_updates in enumerate([0, 1, 4, 0, 1, 2]):
        train(model, optimizer, num_updates, seed=step)
        session, plans = send(weight_sync, rollout, optimizer)
        kinds.append(plans[0].kind)
        assert len(plans) == 1
        assert_equal(model, optimizer, rollout)
        assert session.metrics["sync/updates"] == (num_updates if step else 0)
    assert kinds == ["full"] + 5 * ["low_rank"]
    changed = model.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    start = tiny_model("qwen2", dtype=trainer_dtype, **SIZES).state_dict()["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(changed, start)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gemma2"])
@pytest.mark.parametrize("refresh", ["update", "sync", "never"])
def test_what_adamw_trains_travels_in_full(architecture, refresh):
    model, optimizer, weight_sync = setup(architecture=architecture, refresh=refresh, non_target="adamw")
    rollout = Rollout(model, torch.bfloat16)
    for step in range(4):
        train(model, optimizer, 2, seed=step)
        send(weight_sync, rollout, optimizer)
        if refresh == "sync":
            optimizer.refresh_projections()
        assert_equal(model, optimizer, rollout)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_embeddings_travel_once(tied):
    model = tiny_model("llama", tie_word_embeddings=tied, **SIZES)
    optimizer = LoGRA(model, LoGRAConfig(rank=4, update_ratio=1e-3), lr=1e-2)
    weight_sync, rollout = weight_sync_of(model, optimizer), Rollout(model, torch.bfloat16)
    before = model.model.embed_tokens.weight.detach().clone()
    send(weight_sync, rollout, optimizer)
    train(model, optimizer, 1)
    session = weight_sync.session(optimizer.num_updates)
    session.open("rollout", rollout.states())
    names = [name for name, _ in session.items()]
    assert ("lm_head.weight" in names) is not tied and names.count("model.embed_tokens.weight") == 1
    send(weight_sync, rollout, optimizer)
    after = model.model.embed_tokens.weight.detach()
    assert not torch.equal(before, after)
    assert torch.equal(rollout.whole("model.embed_tokens.weight"), after.bfloat16())


def test_fp32_weights_on_ties_of_the_rounding_are_exact_too():
    """Half of all elements have a low half of exactly 0x8000, where bf16 rounds to even."""
    model, optimizer, weight_sync = setup()
    with torch.no_grad():
        for _, weight, _ in optimizer.target_weights():
            bits = weight.view(torch.int32)
            bits[:, ::2] = (bits[:, ::2] & ~0xFFFF) | 0x8000
    rollout = Rollout(model, torch.bfloat16)
    for step in range(3):
        send(weight_sync, rollout, optimizer)
        assert_equal(model, optimizer, rollout)
        train(model, optimizer, 1, seed=step)


def test_factors_are_those_of_committed_updates_when_the_message_is_consumed_late():
    model, optimizer, weight_sync = setup()
    rollout = Rollout(model, torch.bfloat16)
    send(weight_sync, rollout, optimizer)
    train(model, optimizer, 1, seed=1)
    session = weight_sync.session(optimizer.num_updates)  # created here, consumed two updates and a proposal later
    train(model, optimizer, 2, seed=2)
    loss_of(model, tokens()).backward()
    optimizer.propose()
    assert session.open("rollout", rollout.states()).kind == "low_rank"
    for name, tensor in session.items():
        if not rollout.workers[0].receiver.take(name, tensor):
            rollout.workers[0].load(name, tensor)
    assert session.close() and session.metrics["sync/updates"] == 3
    assert_equal(model, optimizer, rollout)


def test_an_update_committed_while_a_message_is_being_sent_is_an_error():
    model, optimizer, weight_sync = setup()
    rollout = Rollout(model, torch.bfloat16)
    send(weight_sync, rollout, optimizer)
    train(model, optimizer, 1)
    session = weight_sync.session(optimizer.num_updates)
    session.open("rollout", rollout.states())
    items = session.items()
    next(items)
    train(model, optimizer, 1, seed=1)
    with pytest.raises(RuntimeError, match="update 2 was committed while the weights of update 1"):
        list(items)


def test_a_plain_consumer_gets_every_parameter():
    model, optimizer, weight_sync = setup()
    train(model, optimizer, 1)
    weights = dict(weight_sync.session(optimizer.num_updates))
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[n], p) for n, p in model.state_dict().items())


def test_nothing_is_kept_when_nobody_listens():
    model, optimizer, weight_sync = setup()
    train(model, optimizer, 3)
    list(weight_sync.session(optimizer.num_updates))
    assert not optimizer.listeners and weight_sync.log.num_bytes() == 0


@pytest.mark.parametrize("settings", [dict(projection="gaussian"), dict(factor_dtype="bfloat16")])
def test_inexact_updates_are_a_plain_full_sync_with_the_reason(settings, caplog):
    model, optimizer, weight_sync = setup(**settings)
    rollout = Rollout(model, torch.float32)
    for step in range(2):
        train(model, optimizer, 1, seed=step)
        session = weight_sync.session(optimizer.num_updates)
        plan = session.open("rollout", rollout.states())
        assert plan.kind == "plain" and next(iter(settings.values())) in plan.detail
        for name, tensor in session.items():
            rollout.workers[0].load(name, tensor)
        assert session.close()
        assert_equal(model, optimizer, rollout)
    assert len(caplog.records) == 1 and weight_sync.log.num_bytes() == 0
