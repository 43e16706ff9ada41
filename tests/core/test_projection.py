import math

import pytest
import torch

from verl_logra.core.projection import (
    canonical_name,
    gaussian_elements,
    projection_key,
    sign_words,
    splitmix64,
    unpack_signs,
)

MASK = (1 << 64) - 1


def splitmix64_in_python(state, count):
    """The published algorithm on unsigned Python integers."""
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


@pytest.mark.parametrize("key", [0, 1, -1, 123456789, -(1 << 63), (1 << 63) - 1])
def test_hash_is_splitmix64(key):
    words = [w & MASK for w in splitmix64(key, 50).tolist()]
    assert words == splitmix64_in_python(key & MASK, 50)


def test_known_splitmix64_outputs():
    """The first outputs for state 1234567, as published with the reference implementation."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [w & MASK for w in splitmix64(1234567, 4).tolist()] == published


def test_golden_projection():
    """The wire format, for ever: first signs of one projection, worked out bit by bit from the hash in Python."""
    key = projection_key(42, 3, "model.layers.0.self_attn.q_proj")
    assert key == -1553782130798162159
    signs = unpack_signs(sign_words(key, 2, 70), 70)
    words = splitmix64_in_python(key & MASK, 4)
    for row in range(2):
        for column in range(70):
            bit = words[2 * row + column // 64] >> (column % 64) & 1
            assert signs[row, column] == (1 if bit else -1)
    assert signs[0, :16].tolist() == [-1, -1, -1, 1, -1, 1, -1, -1, 1, 1, -1, -1, -1, -1, 1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_signs_are_the_same_in_every_dtype(dtype):
    words = sign_words(7, 5, 130)
    assert torch.equal(unpack_signs(words, 130, dtype).double(), unpack_signs(words, 130, torch.float64))


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_expected_gram_is_the_identity(kind):
    """``E[A^T A] = I``: over 4000 rows the mean of a product of two entries has a standard deviation of 0.016."""
    rank, size = 4000, 20
    elements = (
        unpack_signs(sign_words(5, rank, size), size) if kind == "rademacher" else gaussian_elements(5, rank, size)
    )
    gram = elements.T.double() @ elements.double() / rank
    assert (gram - torch.eye(size)).abs().max() < 6 / math.sqrt(rank)


def test_gaussian_elements_have_the_moments_of_a_normal():
    x = gaussian_elements(11, 500, 401, torch.float64).flatten()
    moments = [x.mean(), x.square().mean(), x.pow(3).mean(), x.pow(4).mean()]
    for moment, expected, spread in zip(
        moments, [0, 1, 0, 3], [1, math.sqrt(2), math.sqrt(15), math.sqrt(96)], strict=True
    ):
        assert abs(moment - expected) < 5 * spread / math.sqrt(len(x))


def test_keys_differ_by_seed_refresh_and_name():
    keys = {projection_key(s, r, n) for s in (1, 2) for r in (0, 1) for n in ("a", "b")}
    assert len(keys) == 8


def test_wrappers_do_not_change_a_name():
    wrapped = "_orig_mod.model.layers.0._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.up_proj"
    assert canonical_name(wrapped) == "model.layers.0.mlp.up_proj"
