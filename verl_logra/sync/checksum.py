"""A position-weighted sum of bit patterns, modulo 2^32.

    c(M) = sum_ij  r_i  M_ij  c_j   mod 2^32

``M`` is a matrix of 32-bit words, ``r_i`` and ``c_j`` are odd 32-bit weights: the low 32 bits, with bit 0 set, of word
``i`` (from 0) of the SplitMix64 stream that starts at state 1 for rows and at state 2 for columns. Arithmetic wraps.

- One changed word always changes the sum, because odd weights have inverses modulo 2^32; several changed words go
  unnoticed with probability 2^-32.
- Rows and columns may be cut anywhere: shards add up to the whole, in any order, on any device.
"""

from functools import lru_cache

import torch
from jaxtyping import Float32, Int32, Int64, Shaped
from torch import Tensor

from verl_logra.core.factor import cached_rows
from verl_logra.core.projection import splitmix64

MASK = 0xFFFFFFFF
_ROW_STATE, _COLUMN_STATE = 1, 2
_WIDTH = 1024


@lru_cache(maxsize=64)
def _odd_words(state: int, count: int, device: torch.device) -> Int32[Tensor, " count"]:
    words = splitmix64(state, count, device) & MASK | 1
    return torch.where(words > MASK >> 1, words - (MASK + 1), words).to(torch.int32)


def words_checksum(
    words: Int32[Tensor, "rows columns"], first_row: int = 0, first_column: int = 0
) -> Int64[Tensor, ""]:
    """Partial sum of a block that starts at (``first_row``, ``first_column``) of the whole; add, then ``& MASK``."""
    rows, columns = words.shape
    # Rounded up, so that the many shapes of a model share few cached vectors.
    c = _odd_words(_COLUMN_STATE, _rounded(first_column + columns), words.device)[first_column : first_column + columns]
    r = _odd_words(_ROW_STATE, _rounded(first_row + rows), words.device)[first_row : first_row + rows]
    step = cached_rows(columns, words.device)
    # Sums stay in int32, where they wrap as they should: on a CPU five times faster than sums in int64.
    row_sums = [(block * c).sum(dim=1, dtype=torch.int32) for block in words.split(step)]
    if not row_sums:
        return torch.zeros((), dtype=torch.int64, device=words.device)
    return (torch.cat(row_sums) * r).sum() & MASK


def _rounded(count: int) -> int:
    return 1 << max(12, (count - 1).bit_length())


def weight_checksum(
    weight: Float32[Tensor, "rows columns"], first_row: int = 0, first_column: int = 0
) -> Int64[Tensor, ""]:
    """Partial sum of an fp32 weight's bits, where the word of an element is its 32 bits."""
    return words_checksum(weight.view(torch.int32), first_row, first_column)


def tensor_checksum(tensor: Shaped[Tensor, "..."]) -> int:
    """Checksum of any tensor's bytes: flattened to little-endian 32-bit words, zero-padded, 1024 words a row."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 4))
    elif data.data_ptr() % 4:  # a view into a transport's buffer
        data = data.clone()
    words = data.view(torch.int32)
    whole = words.numel() // _WIDTH
    total = words_checksum(words[: whole * _WIDTH].view(whole, _WIDTH))
    if whole * _WIDTH < words.numel():
        total += words_checksum(words[whole * _WIDTH :].view(1, -1), first_row=whole)
    return int(total) & MASK
