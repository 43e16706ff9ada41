import pytest
import torch

from verl_logra.core.factor import apply_codes_, integer_product


@pytest.mark.parametrize("rows, rank, columns", [(1, 1, 1), (3, 5, 7), (64, 16, 48), (33, 256, 129), (0, 4, 8)])
def test_int8_and_float_products_are_the_integers(rows, rank, columns):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (rows, rank), generator=generator).to(torch.int8)
    codes[: rows // 2] = 127  # the largest sums there are
    signs = torch.randint(0, 2, (rank, columns + 9), generator=generator) * 2 - 1
    signs[:, ::2] = 1
    signs = signs[:, 4 : columns + 4]  # a slice, as a row-parallel shard takes
    truth = codes.long() @ signs
    for dtype in (torch.int8, torch.float32):
        cut = torch.empty(rank, columns + 9, dtype=dtype)[:, 4 : columns + 4].copy_(signs)
        assert torch.equal(integer_product(codes, cut).long(), truth)


def test_weights_do_not_depend_on_the_dtype_of_signs():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (50, 32), generator=generator).to(torch.int8)
    signs = torch.randint(0, 2, (32, 70), generator=generator) * 2 - 1
    coefficient, start = torch.rand(50, generator=generator), torch.randn(50, 70, generator=generator)
    results = []
    for dtype in (torch.int8, torch.float32):
        results.append(start.clone())
        apply_codes_(results[-1], codes, coefficient, signs.to(dtype), decay=0.999)
    assert torch.equal(*results)
