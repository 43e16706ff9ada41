import math

import pytest
import torch

from verl_logra.core.factor import apply_codes_, apply_factor_, int8_codes, row_codes, row_coefficient, row_steps
from verl_logra.core.projection import sign_words, unpack_signs

OUT, RANK, IN = 23, 256, 150


def round_rows_(update):
    """A proposal's rounding: ``update`` becomes ``codes * scale``."""
    scale = row_steps(update.abs().amax(1))
    update.copy_(row_codes(update, scale) * scale[:, None])
    return scale


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUT, IN, generator=generator)
    update = torch.randn(OUT, RANK, generator=generator) * torch.logspace(-9, 2, OUT)[:, None]
    update[4] = 0
    return weight, update, unpack_signs(sign_words(seed, RANK, IN), IN)


def test_rounding_moves_an_entry_by_at_most_half_a_step():
    _, update, _ = problem()
    rounded = update.clone()
    scale = round_rows_(rounded)
    zero = (update == 0).all(1)
    assert torch.equal(scale[~zero], update[~zero].abs().amax(1) / 127) and (rounded[zero] == 0).all()
    assert ((rounded - update).abs() <= 0.5001 * scale[:, None]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_recovered_from_the_rounded_factor(dtype):
    _, update, _ = problem()
    scale = update.abs().amax(1) / 127
    codes = int8_codes(update, scale)
    stored = (codes.float() * scale[:, None]).to(dtype)
    assert torch.equal(int8_codes(stored, scale), codes)
    assert codes.abs().amax() == 127 and codes[4].abs().amax() == 0


def test_entries_below_the_smallest_step_round_to_codes_in_range():
    """127 subnormal steps do not make 200 of them, yet codes may not exceed int8; a row of zeros has a step too."""
    tiny = torch.tensor([[1.4e-45, 2.8e-43], [1.4e-45, -7e-44], [0.0, 0.0]])
    codes = row_codes(tiny, row_steps(tiny.abs().amax(1)))
    assert (codes.abs() <= 127).all() and (codes[2] == 0).all()


def test_update_equals_the_float64_formula():
    weight, update, signs = problem()
    scale = round_rows_(update)
    coefficient = row_coefficient(scale, 0.7, RANK)
    new = weight.clone()
    apply_codes_(new, int8_codes(update, scale), coefficient, signs, decay=0.99)
    expected = 0.99 * weight.double() - 0.7 * update.double() @ (signs.double() / math.sqrt(RANK))
    torch.testing.assert_close(new.double(), expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def test_update_is_bit_equal_under_any_sharding():
    """30 updates on row shards, column shards, another block order and with the product taken in float64."""
    whole, rows, columns, wide = (problem()[0] for _ in range(4))
    for step in range(30):
        _, update, signs = problem(step)
        scale = round_rows_(update.mul_(1e-3))
        codes, c = int8_codes(update, scale), row_coefficient(scale, 1.3, RANK)
        apply_codes_(whole, codes, c, signs, decay=1 - 1e-4)
        for w, q, cc in zip(rows.split(7), codes.split(7), c.split(7), strict=True):
            apply_codes_(w, q, cc, signs, decay=1 - 1e-4)
        for w, s in zip(columns.split(64, dim=1), signs.split(64, dim=1), strict=True):
            shard = w.contiguous()
            apply_codes_(shard, codes, c, s.contiguous(), decay=1 - 1e-4)
            w.copy_(shard)
        integers = (codes.double() @ signs.double()).float()
        wide.mul_(1 - 1e-4).sub_(c[:, None] * integers)
    assert torch.equal(whole, rows) and torch.equal(whole, columns) and torch.equal(whole, wide)


def test_inexact_factor_equals_the_float64_formula():
    weight, update, signs = problem()
    new, projection = weight.clone(), signs / math.sqrt(RANK)
    apply_factor_(new, update, 0.5, projection, decay=0.9)
    expected = 0.9 * weight.double() - 0.5 * update.double() @ projection.double()
    torch.testing.assert_close(new.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
