import torch

from verl_logra.core import row_adam
from verl_logra.core.projection import sign_words, unpack_signs


def test_moment_and_direction_equal_the_formula_in_float64():
    generator = torch.Generator().manual_seed(0)
    v, expected_v = torch.zeros(9), torch.zeros(9, dtype=torch.float64)
    for t in range(1, 6):
        sketch = torch.randn(9, 7, generator=generator) * torch.logspace(-4, 1, 9)[:, None]
        v = row_adam.updated_second_moment(v, sketch, 0.95)
        direction = row_adam.direction_(sketch.clone(), row_adam.row_rms(v, 0.95, t), 1e-8)
        expected_v = 0.95 * expected_v + 0.05 * sketch.double().square().mean(1)
        expected = sketch.double() / ((expected_v / (1 - 0.95**t)).sqrt() + 1e-8)[:, None]
        torch.testing.assert_close(v.double(), expected_v, rtol=1e-6, atol=0)
        torch.testing.assert_close(direction.double(), expected, rtol=1e-5, atol=1e-6)


def test_old_moment_is_left_alone():
    v = torch.ones(3)
    row_adam.updated_second_moment(v, torch.randn(3, 4), 0.9)
    assert torch.equal(v, torch.ones(3))


def test_projected_norm_equals_the_dense_product():
    update = torch.randn(11, 16, generator=torch.Generator().manual_seed(0))
    projection = unpack_signs(sign_words(1, 16, 100), 100) / 4
    dense = (update.double() @ projection.double()).square().sum()
    torch.testing.assert_close(row_adam.projected_squared_norm(update, projection), dense, rtol=1e-12, atol=0)


def test_sketch_norm_estimates_the_gradient_norm():
    """Unbiased: the mean of ``||G A^T||^2 / ||G||^2`` over 400 projections of rank 8 is 1 within 5 standard errors."""
    gradient = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).double()
    shares = []
    for key in range(400):
        projection = unpack_signs(sign_words(key, 8, 50), 50, torch.float64) / 8**0.5
        shares.append(row_adam.squared_norm((gradient @ projection.T).float()) / gradient.square().sum())
    shares = torch.stack(shares)
    assert abs(shares.mean() - 1) < 5 * shares.std() / 400**0.5
