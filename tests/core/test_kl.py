import math

import pytest
import torch

from verl_logra.config import KLConfig
from verl_logra.core import kl as maths


def logits(tokens=7, vocabulary=30, seed=0, dtype=torch.float64):
    return torch.randn(tokens, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_exact_kl_equals_torch_distributions(temperature):
    z, changed = logits(), logits() + 0.1 * logits(seed=1)
    p, q = (torch.distributions.Categorical(logits=x / temperature) for x in (z, changed))
    torch.testing.assert_close(
        maths.exact_kl(z, changed, temperature), torch.distributions.kl_divergence(p, q), rtol=1e-4, atol=1e-7
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_second_order_kl_is_the_limit_of_the_exact_one(temperature):
    z, dz = logits(), logits(seed=1)
    predicted = maths.second_order_kl(z, dz, temperature)
    for scale, tolerance in ((1e-2, 1e-1), (1e-3, 1e-2)):
        p, q = (torch.distributions.Categorical(logits=x / temperature) for x in (z, z + scale * dz))
        exact = torch.distributions.kl_divergence(p, q)
        torch.testing.assert_close(predicted * scale**2, exact, rtol=tolerance, atol=1e-15)


def test_exact_kl_keeps_its_digits_in_float32():
    """At 1e-6 nats, where ``sum p (log p - log q)`` in float32 is mostly rounding."""
    z = logits(vocabulary=5000, dtype=torch.float32)
    changed = z + 1.5e-3 * logits(vocabulary=5000, seed=1, dtype=torch.float32)
    p, q = (torch.distributions.Categorical(logits=x.double()) for x in (z, changed))
    exact = torch.distributions.kl_divergence(p, q)
    assert exact.max() < 1e-4
    torch.testing.assert_close(maths.exact_kl(z, changed), exact, rtol=2e-2, atol=0)


def test_chunks_change_nothing(monkeypatch):
    z, dz = logits(), logits(seed=1)
    whole = maths.second_order_kl(z, dz), maths.exact_kl(z, z + dz)
    monkeypatch.setattr(maths, "_CHUNK_ELEMENTS", 61)  # two tokens at a time
    assert torch.equal(maths.second_order_kl(z, dz), whole[0]) and torch.equal(maths.exact_kl(z, z + dz), whole[1])


def test_no_tokens_give_no_kl():
    empty = torch.zeros(0, 30)
    assert maths.second_order_kl(empty, empty).shape == (0,) and maths.exact_kl(empty, empty).shape == (0,)


def test_scaled_step_meets_the_budget_to_second_order():
    for predicted in (1e-5, 1e-3, 10.0):
        alpha = maths.step_scale(predicted, 2e-4, 3.0)
        assert alpha == pytest.approx(min(3.0, math.sqrt(2e-4 / predicted)))
    assert maths.step_scale(0.0, 2e-4, 3.0) == 3.0


def test_published_schedule_endpoints():
    c = KLConfig()
    at = [maths.budget_at(t, c.budget, c.budget_final, c.schedule_updates, c.schedule) for t in (0, 150, 300, 1000)]
    assert at == [pytest.approx(2e-4), pytest.approx(1.1e-4), pytest.approx(2e-5), pytest.approx(2e-5)]


def test_linear_and_constant_schedules():
    assert maths.budget_at(25, 1.0, 0.2, 100, "linear") == pytest.approx(0.8)
    assert maths.budget_at(25, 1.0, 0.2, 100, "constant") == 1.0


def test_mismatch_average_and_its_floor():
    average = maths.mismatch_average(None, 4e-5, 0.3)
    average = maths.mismatch_average(average, -1.0, 0.3)  # a negative observation counts as none
    assert average == pytest.approx(0.7 * 4e-5)
    assert maths.budget_after_mismatch(2e-4, 4e-5, 0.5) == pytest.approx(1.6e-4)
    assert maths.budget_after_mismatch(2e-4, 3e-4, 0.5) == pytest.approx(1e-4)


def test_calibration_is_a_geometric_mean():
    average = maths.calibration_average(None, 4.0)
    assert maths.calibration_average(average, 1.0) == pytest.approx(2.0)
    assert maths.calibration_average(None, 1e9) == 1e3
