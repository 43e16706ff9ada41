import pytest
import torch

from verl_logra.core import row_adam
from verl_logra.core.projection import sign_words, unpack_signs


def test_moment_and_direction_equal_the_formula_in_float64():
    generator = torch.Generator().manual_seed(0)
    v, expected_v = torch.zeros(9), torch.zeros(9, dtype=torch.float64)
    for t in range(1, 6):
        sketch = torch.randn(9, 7, generator=generator) * torch.logspace(-4, 1, 9)[:, None]
        v = row_adam.updated_second_moment(v, row_adam.row_norms(sketch).square() / 7, 0.95)
        rms = row_adam.row_rms(v, 0.95, t)
        expected_v = 0.95 * expected_v + 0.05 * sketch.double().square().mean(1)
        torch.testing.assert_close(v.double(), expected_v, rtol=1e-6, atol=0)
        torch.testing.assert_close(rms.double(), (expected_v / (1 - 0.95**t)).sqrt(), rtol=1e-6, atol=0)


def test_old_moment_is_left_alone():
    v = torch.ones(3)
    row_adam.updated_second_moment(v, torch.rand(3), 0.9)
    assert torch.equal(v, torch.ones(3))


def test_projected_norms_equal_the_dense_product():
    rows = torch.randn(11, 16, generator=torch.Generator().manual_seed(0))
    signs = unpack_signs(sign_words(1, 16, 100), 100)
    dense = (rows.double() @ signs.double()).square().sum(1)
    torch.testing.assert_close(row_adam.projected_row_squared_norms(rows, signs), dense, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rank, in_features", [(64, 896), (256, 4864), (256, 29568)])
def test_projected_norms_of_codes_do_not_depend_on_the_other_rows(rank, in_features):
    """Sums of integers below 2^24 (29568: the widest layer of a 72B model), so each row alone gives the same bits; the
    one rounding per entry is 2^-24 of it. Codes of 127 throughout are the largest that can be."""
    codes = torch.randint(-127, 128, (40, rank), generator=torch.Generator().manual_seed(0)).float()
    codes[0] = 127
    signs = unpack_signs(sign_words(1, rank, in_features), in_features)
    codes[1] = 127 * torch.sign((signs @ signs.T)[3])
    together = row_adam.projected_code_squared_norms(codes, signs)
    alone = torch.cat([row_adam.projected_code_squared_norms(row, signs) for row in codes.split(1)])
    assert torch.equal(together, alone)
    assert torch.equal(together, row_adam.projected_code_squared_norms(codes, signs.to(torch.int8)))
    dense = (codes.double() @ signs.double()).square().sum(1)
    torch.testing.assert_close(together, dense, rtol=1e-6, atol=0)


def test_sums_over_layers_take_empty_ones():
    rows = torch.arange(12.0, dtype=torch.float64).view(6, 2)
    assert row_adam.layer_sums(rows, [2, 0, 4]).tolist() == [[2, 4], [0, 0], [28, 32]]
    assert row_adam.spread_over_rows(torch.tensor([5.0, 6.0, 7.0]), [2, 0, 1]).tolist() == [5, 5, 7]


def test_sketch_norm_estimates_the_gradient_norm():
    """Unbiased: the mean of ``||G A^T||^2 / ||G||^2`` over 400 projections of rank 8 is 1 within 5 standard errors."""
    gradient = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).double()
    shares = []
    for key in range(400):
        projection = unpack_signs(sign_words(key, 8, 50), 50, torch.float64) / 8**0.5
        shares.append(row_adam.row_norms((gradient @ projection.T).float()).square().sum() / gradient.square().sum())
    shares = torch.stack(shares)
    assert abs(shares.mean() - 1) < 5 * shares.std() / 400**0.5
