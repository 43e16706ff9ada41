import torch

from verl_logra.core.split_weight import join_weight, split_weight


def some_weights():
    """Random finite bit patterns of every exponent, and all kinds of low halves around the tie."""
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=torch.Generator().manual_seed(0)).int()
    lows = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    highs = torch.randint(-(1 << 15), 1 << 15, (2000, 1), generator=torch.Generator().manual_seed(1)).int() << 16
    weight = torch.cat((bits, (highs | lows).flatten())).view(torch.float32)
    return weight[weight.isfinite() & (weight.abs() < 3e38)]


def test_round_trip_is_exact_but_for_ties():
    weight = some_weights()
    tie = weight.view(torch.int32).bitwise_and(0xFFFF) == 0x8000
    assert tie.sum() > 1000
    joined = join_weight(*split_weight(weight))
    assert torch.equal(joined[~tie].view(torch.int32), weight[~tie].view(torch.int32))
    assert torch.equal(joined[tie].view(torch.int32), weight[tie].view(torch.int32) + 1)


def test_nudged_weights_stay_put():
    joined = join_weight(*split_weight(some_weights()))
    assert torch.equal(join_weight(*split_weight(joined)).view(torch.int32), joined.view(torch.int32))


def test_high_half_is_the_rounded_weight():
    joined = join_weight(*split_weight(some_weights()))
    high, _ = split_weight(joined)
    assert torch.equal(high.view(torch.int16), joined.bfloat16().view(torch.int16))
