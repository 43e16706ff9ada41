import torch

from verl_logra.core.projection import splitmix64
from verl_logra.sync.checksum import MASK, tensor_checksum, weight_checksum, words_checksum


def truth(words):
    """The definition, in Python's integers."""
    rows, columns = len(words), len(words[0])
    r = [(w & MASK) | 1 for w in splitmix64(1, rows).tolist()]
    c = [(w & MASK) | 1 for w in splitmix64(2, columns).tolist()]
    return sum(r[i] * (words[i][j] & MASK) * c[j] for i in range(rows) for j in range(columns)) & MASK


def random_words(*shape):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)


def test_equals_the_definition():
    words = random_words(7, 13)
    assert int(words_checksum(words)) == truth(words.tolist())


def test_a_weight_is_its_bits():
    weight = torch.randn(5, 6)
    assert int(weight_checksum(weight)) == truth(weight.view(torch.int32).tolist())


def test_shards_add_up_whatever_the_cut():
    weight = torch.randn(37, 5001)
    whole = int(weight_checksum(weight))
    for row in (0, 1, 20, 37):
        for column in (0, 1, 4096, 5001):
            parts = [
                weight_checksum(weight[:row, :column]),
                weight_checksum(weight[:row, column:], 0, column),
                weight_checksum(weight[row:, :column], row, 0),
                weight_checksum(weight[row:, column:], row, column),
            ]
            assert int(sum(parts)) & MASK == whole


def test_every_flipped_bit_is_noticed():
    words = random_words(3, 4)
    before = int(words_checksum(words))
    for i in range(3):
        for j in range(4):
            for bit in range(32):
                flipped = words.clone()
                flipped[i, j] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
                assert int(words_checksum(flipped)) != before


def test_exchanged_rows_columns_and_elements_are_noticed():
    words = random_words(4, 4)
    before = int(words_checksum(words))
    assert int(words_checksum(words.flip(0))) != before
    assert int(words_checksum(words.flip(1))) != before
    assert int(words_checksum(words.T)) != before


def test_any_dtype_and_size_is_summed_as_bytes():
    data = random_words(2100, 3).view(torch.uint8).view(-1)
    for size in (0, 1, 4095, 4096, 4097, len(data)):
        padded = torch.zeros(max(1, -(-size // 4096)) * 4096, dtype=torch.uint8)
        padded[:size] = data[:size]
        assert tensor_checksum(data[:size]) == truth(padded.view(torch.int32).view(-1, 1024).tolist())
    half = torch.randn(33).bfloat16()
    assert tensor_checksum(half) == tensor_checksum(half.view(torch.uint8))
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]
    assert tensor_checksum(shifted) == tensor_checksum(data)
