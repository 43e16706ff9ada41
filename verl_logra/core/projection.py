"""Random projections ``A [rank, in]`` with ``E[A^T A] = I``, from a counter-based hash (arXiv 2610.06647, section 3).

``A`` is a wire format: sender and receiver rebuild it from (seed, refresh number, module name), so it must be the
same bits on every device, for ever. Torch's generators differ between CPU and CUDA; integer tensor arithmetic does
not. Element ``[i, j]`` of a Rademacher projection is bit ``j % 64`` of word ``j // 64`` of row ``i``, and word ``w`` of
row ``i`` is output number ``i * ceil(in / 64) + w`` of a SplitMix64 stream (Steele, Lea, Flood: "Fast splittable
pseudorandom number generators", OOPSLA 2014) whose state starts at the key. A set bit is +1.
"""

import hashlib
import math
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float, Int64, Num
from torch import Tensor

Kind = Literal["rademacher", "gaussian"]

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_WORD = 64


def projection_key(seed: int, refresh: int, name: str) -> int:
    """64-bit key of one projection: little-endian BLAKE2b of ``"seed/refresh/name"``, as a signed integer."""
    digest = hashlib.blake2b(f"{seed}/{refresh}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _logical_shift_right(x: Int64[Tensor, "..."], bits: int) -> Int64[Tensor, "..."]:
    """Logical right shift; torch's ``>>`` on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (_WORD - bits)) - 1)


def splitmix64(key: int, count: int, device: torch.device | str | None = None) -> Int64[Tensor, " count"]:
    """The first ``count`` outputs of SplitMix64 from state ``key``, in wrapping int64 arithmetic."""
    x = torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_GOLDEN).add_(key)
    x = (x ^ _logical_shift_right(x, 30)).mul_(_MIX_1)
    x = (x ^ _logical_shift_right(x, 27)).mul_(_MIX_2)
    return x ^ _logical_shift_right(x, 31)


def sign_words(
    key: int, rank: int, in_features: int, device: torch.device | str | None = None
) -> Int64[Tensor, "rank words"]:
    """Packed signs of a Rademacher projection: 1 bit per element, ``words = ceil(in_features / 64)``."""
    words = -(-in_features // _WORD)
    return splitmix64(key, rank * words, device).view(rank, words)


@lru_cache(maxsize=16)
def _byte_signs(dtype: torch.dtype, device: torch.device) -> Num[Tensor, "256 8"]:
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return bits.mul_(2).sub_(1).to(dtype)


def unpack_signs(
    words: Int64[Tensor, "rank words"], in_features: int, dtype: torch.dtype = torch.float32
) -> Num[Tensor, "rank in"]:
    """Packed signs as +1 and -1, exact in every ``dtype``."""
    byte_shifts = torch.arange(0, _WORD, 8, device=words.device)
    index = (words[..., None] >> byte_shifts) & 0xFF
    signs = torch.nn.functional.embedding(index, _byte_signs(dtype, words.device))
    return signs.view(words.shape[0], -1)[:, :in_features]


def gaussian_elements(
    key: int,
    rank: int,
    in_features: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Float[Tensor, "rank in"]:
    """Standard normal elements by Box-Muller, two per hashed word.

    The logarithm and the cosine are not the same bits on every device, so a Gaussian projection is good for training
    but not for exact weight sync.
    """
    pairs = -(-in_features // 2)
    words = splitmix64(key, rank * pairs, device).view(rank, pairs)
    half = 1 << 32
    radius = (_logical_shift_right(words, 32).double() + 1) / half  # (0, 1]
    angle = (words & (half - 1)).double() / half  # [0, 1)
    radius = radius.log_().mul_(-2).sqrt_()
    angle = angle.mul_(2 * math.pi)
    normal = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1)
    return normal.view(rank, -1)[:, :in_features].to(dtype)


def canonical_name(name: str) -> str:
    """Qualified module name without the wrappers that training adds; what the projection's key is made of."""
    wrappers = {"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}
    return ".".join(part for part in name.split(".") if part not in wrappers)
