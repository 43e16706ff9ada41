"""Predictions against exact KL divergences of dense float64 models."""

import copy
import math

import pytest
import torch

from tests.tiny_models import ARCHITECTURES, loss_of, tiny_model, tokens
from verl_logra import LoGRA
from verl_logra.probe import Probe, ProbeSequence


def sequences(count=2, temperature=1.0, seed=1):
    """Prompts of 4 tokens and responses; one token inside the response is not the policy's."""
    response = torch.arange(10) >= 4
    response[6] = False
    return [ProbeSequence(ids, response, temperature) for ids in tokens(count, 10, seed=seed)]


def proposed(architecture="qwen3", *, dtype=torch.float32, autocast=None, weight_decay=0.0, **settings):
    model = tiny_model(architecture, dtype=dtype)
    optimizer = LoGRA(model, {"rank": 6, "scale": "lr", "kl": {}, **settings}, lr=3e-3, weight_decay=weight_decay)
    with autocast or torch.autocast("cpu", enabled=False):
        loss_of(model, tokens()).backward()
    optimizer.propose()
    return model, optimizer


def dense_kl(model, optimizer, scale, probes):
    """Mean KL in float64 between the weights and the weights after ``scale`` times the proposal, applied densely."""
    before = tiny_model_like(model)
    after = copy.deepcopy(before)
    with torch.no_grad():
        for name, target in optimizer.targets.items():
            weight = after.get_submodule(name).weight
            weight.mul_(1 - scale * optimizer.proposal.decay)
            weight.sub_(scale * target.update.double() @ target.projection().double())
    kls = []
    for probe in probes:
        p, q = (
            torch.distributions.Categorical(
                logits=m(input_ids=probe.input_ids[None]).logits[0, :-1] / probe.temperature
            )
            for m in (before, after)
        )
        kls.append(torch.distributions.kl_divergence(p, q)[probe.response[1:]])
    return float(torch.cat(kls).mean())


def tiny_model_like(model):
    plain = tiny_model(model.config.model_type).double()
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("method", ["jvp", "finite_difference"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prediction_is_the_limit_of_the_dense_kl(architecture, method, temperature):
    model, optimizer = proposed(architecture, weight_decay=0.5)
    probes = sequences(temperature=temperature)
    predicted = Probe(model, probes, method=method).predict(optimizer.proposal.decay)
    exact = dense_kl(model, optimizer, 1e-2, probes) / 1e-4
    assert predicted.num_tokens == 10
    assert predicted.value == pytest.approx(exact, rel=0.02 if method == "jvp" else 0.05)


def test_weight_decay_is_part_of_the_tangent():
    model, optimizer = proposed("qwen2", weight_decay=300.0)
    probe = Probe(model, sequences())
    with_decay, without = probe.predict(optimizer.proposal.decay).value, probe.predict(0.0).value
    exact = dense_kl(model, optimizer, 1e-2, sequences()) / 1e-4
    assert with_decay == pytest.approx(exact, rel=0.03)
    assert abs(without / exact - 1) > 0.2


@pytest.mark.parametrize("method", ["jvp", "finite_difference"])
@pytest.mark.parametrize("how", ["autocast", "stored"])
def test_prediction_in_bfloat16(how, method):
    """The update is the bfloat16 model's own; its dense effect is computed in float64."""
    bf16 = torch.autocast("cpu", dtype=torch.bfloat16)
    if how == "autocast":
        model, optimizer = proposed(autocast=bf16)
        probe = Probe(model, sequences(), method=method, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    else:
        model, optimizer = proposed(dtype=torch.bfloat16)
        probe = Probe(model, sequences(), method=method)
    exact = dense_kl(model, optimizer, 1e-2, sequences()) / 1e-4
    assert probe.predict().value == pytest.approx(exact, rel=0.15)
    probe.remember()
    for scale in (1.0, 0.1):
        with optimizer.trial(scale):
            measured = probe.kl_since_remembered().value
        assert measured == pytest.approx(dense_kl(model, optimizer, scale, sequences()), rel=0.03)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_verified_kl_is_what_the_commit_causes(architecture):
    model, optimizer = proposed(architecture, weight_decay=0.5)
    probe = Probe(model, sequences())
    probe.remember()
    exact = dense_kl(model, optimizer, 0.8, sequences())
    with optimizer.trial(0.8):
        verified = probe.kl_since_remembered().value
    weights = copy.deepcopy(model.state_dict())
    assert verified == pytest.approx(exact, rel=2e-3)
    assert all(torch.equal(weights[n], p) for n, p in model.state_dict().items())
    optimizer.commit(0.8)
    assert probe.kl_since_remembered().value == pytest.approx(verified, rel=2e-3)


def test_a_probe_leaves_no_trace():
    model, optimizer = proposed()
    model.train()
    model.model.layers[0].mlp.eval()
    model.set_attn_implementation("sdpa")
    Probe(model, sequences()).predict()
    assert model.config._attn_implementation == "sdpa"
    assert model.training and model.model.layers[0].self_attn.training and not model.model.layers[0].mlp.training
    assert optimizer.taps.mode == "train" and torch.is_grad_enabled()
    assert all(p.grad is None for n, p in model.named_parameters() if not n.endswith("logra_update"))


def test_everything_is_restored_after_an_error_inside_the_probe():
    model, optimizer = proposed()
    model.train()
    model.set_attn_implementation("sdpa")
    probe = Probe(model, sequences())

    def fail(*_):
        raise KeyError("inside")

    handle = model.model.layers[1].register_forward_hook(fail)
    for measure in (probe.predict, probe.remember):
        with pytest.raises(KeyError, match="inside"):
            measure()
    handle.remove()
    assert model.config._attn_implementation == "sdpa" and model.training
    assert optimizer.taps.mode == "train" and torch.is_grad_enabled()
    probe.predict()


class _NoForwardDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_layer_without_forward_derivative_names_the_other_probe():
    model, optimizer = proposed()
    model.model.norm.register_forward_hook(lambda module, args, output: _NoForwardDerivative.apply(output))
    with pytest.raises(RuntimeError, match="no forward derivative.*set kl.probe=finite_difference"):
        Probe(model, sequences()).predict()
    predicted = Probe(model, sequences(), method="finite_difference").predict().value
    assert predicted == pytest.approx(dense_kl(model, optimizer, 1e-2, sequences()) / 1e-4, rel=0.05)


def test_response_tokens_alone_count():
    """A sequence without response tokens, as a zero-token response or a mask of zeros gives, contributes nothing."""
    model, _ = proposed()
    none = ProbeSequence(tokens(1, 9)[0], torch.zeros(9, dtype=torch.bool))
    alone, both = Probe(model, sequences(1)).predict(), Probe(model, [none, *sequences(1)]).predict()
    assert both.value == pytest.approx(alone.value, rel=1e-6) and both.num_tokens == alone.num_tokens == 5
    empty = Probe(model, [none]).predict()
    assert empty.num_tokens == 0 and not empty.usable


def test_sequences_of_different_lengths_and_temperatures_do_not_mix():
    model, _ = proposed()
    short = ProbeSequence(tokens(1, 6, seed=4)[0], torch.arange(6) >= 3, 0.6)
    long = ProbeSequence(tokens(1, 14, seed=5)[0], torch.arange(14) >= 2, 1.3)
    for method in ("jvp", "finite_difference"):
        alone = [Probe(model, [s], method=method).predict() for s in (short, long)]
        assert [kl.num_tokens for kl in alone] == [3, 12]
        expected = (3 * alone[0].value + 12 * alone[1].value) / 15
        assert Probe(model, [short, long], method=method).predict().value == pytest.approx(expected, rel=1e-3)


def test_long_sequences_keep_their_first_tokens():
    model, _ = proposed()
    whole = Probe(model, sequences(1), max_tokens=6).predict()
    cut = [ProbeSequence(s.input_ids[:6], s.response[:6]) for s in sequences(1)]
    assert whole == Probe(model, cut).predict() and whole.num_tokens == 2


def test_finite_difference_finds_its_scale():
    """Proposals a thousand times too small and too large for a difference of one step."""
    for factor in (1e-3, 1.0, 1e2):
        model, optimizer = proposed()
        with torch.no_grad():
            for target in optimizer.targets.values():
                target.update.mul_(factor)
        jvp = Probe(model, sequences()).predict().value
        difference = Probe(model, sequences(), method="finite_difference").predict().value
        assert difference == pytest.approx(jvp, rel=0.05), factor


def test_a_zero_update_has_no_kl():
    model, optimizer = proposed()
    with torch.no_grad():
        for target in optimizer.targets.values():
            target.update.zero_()
    for method in ("jvp", "finite_difference"):
        kl = Probe(model, sequences(), method=method).predict()
        assert kl.value == 0 and kl.usable and math.isfinite(kl.value)
