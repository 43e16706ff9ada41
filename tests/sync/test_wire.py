import json
import struct

import pytest
import torch

from verl_logra.sync.wire import Begin, Factors, FrameReader, FrameWriter, Update, WireError, factors_frame_bytes

QWEN_7B_LAYER = {  # Qwen2.5-7B: out_features, in_features
    "q_proj": (3584, 3584),
    "k_proj": (512, 3584),
    "v_proj": (512, 3584),
    "o_proj": (3584, 3584),
    "gate_proj": (18944, 3584),
    "up_proj": (18944, 3584),
    "down_proj": (3584, 18944),
}
QWEN_7B_PARAMETERS = 7_615_616_512


def begin(**changes):
    values = dict(kind="low_rank", history="h", base=4, last=5, seed=1, rank=3, projection="rademacher")
    values |= dict(targets=[("a", 5, 7)], updates=[Update(number=5, refresh=2, decay=1 - 1e-9 / 3)])
    return Begin(**{**values, **changes})


def factors():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (1, 5, 3), generator=generator).to(torch.int8)
    return Factors(target=0, first=0, coefficients=torch.rand(1, 5, generator=generator), codes=codes)


def message():
    writer = FrameWriter()
    frames = [writer.begin(begin()), writer.factors(factors())]
    frames.append(writer.end(targets={"a": 7}, parameters={"norm": 9}))
    return [tensor for _, tensor in frames]


def test_a_message_reads_back_exactly():
    reader = FrameReader()
    first, second, third = (reader.read(frame) for frame in message())
    assert first == begin()
    assert torch.equal(second.codes, factors().codes) and torch.equal(second.coefficients, factors().coefficients)
    assert (second.target, second.first) == (0, 0)
    assert (third.num_frames, third.targets, third.parameters) == (3, {"a": 7}, {"norm": 9})


def test_the_bytes_are_those_of_the_specification():
    """Decoded here with struct alone, from the text of ``wire``."""
    data = message()[1].numpy().tobytes()
    assert struct.unpack_from("<4sHHQI", data) == (b"LGRA", 1, 2, len(data), 1)
    assert struct.unpack_from("<IIIII", data, 24) == (0, 0, 1, 5, 3)
    assert struct.unpack_from("<5f", data, 48) == tuple(factors().coefficients[0].tolist())
    assert struct.unpack_from("<15b", data, 72) == tuple(factors().codes.flatten().tolist())
    data = message()[0].numpy().tobytes()
    (size,) = struct.unpack_from("<I", data, 24)
    assert json.loads(data[28 : 28 + size])["updates"] == [{"number": 5, "refresh": 2, "decay": 1 - 1e-9 / 3}]


@pytest.mark.parametrize("index", range(3))
def test_every_corrupted_byte_is_noticed(index):
    frames = message()
    for position in range(frames[index].numel()):
        frame = frames[index].clone()
        frame[position] ^= 0x40
        reader = FrameReader()
        reader.num_frames = index
        with pytest.raises(WireError):
            reader.read(frame)


def test_lost_repeated_and_exchanged_frames_are_noticed():
    one, two, three = message()
    for frames in ([one, three], [one, one], [one, two, two], [two], [one, two, three[:-8]]):
        reader = FrameReader()
        with pytest.raises(WireError):
            for frame in frames:
                reader.read(frame)


def test_frames_read_from_any_place_in_a_buffer():
    frame = message()[0]
    buffer = torch.zeros(frame.numel() + 3, dtype=torch.uint8)
    buffer[3:] = frame
    assert FrameReader().read(buffer[3:]) == begin()


@pytest.mark.parametrize("rank, at_least", [(256, 36), (128, 72), (64, 140)])
def test_a_7b_message_is_this_much_smaller_than_a_bf16_full_sync(rank, at_least):
    """Frames of the real encoder, per layer; 28 layers are 28 times the bytes."""
    writer = FrameWriter()
    targets = [(f"model.layers.{i}.self_attn.{n}", *s) for i in range(28) for n, s in QWEN_7B_LAYER.items()]
    total = writer.begin(begin(targets=targets))[1].numel()
    total += writer.end(targets={name: 0xFFFFFFFF for name, _, _ in targets}, parameters={})[1].numel()
    for rows, _ in QWEN_7B_LAYER.values():
        codes = torch.zeros(1, rows, rank, dtype=torch.int8)
        one = Factors(target=0, first=0, coefficients=torch.zeros(1, rows), codes=codes)
        size = writer.factors(one)[1].numel()
        assert size == factors_frame_bytes(1, rows, rank)
        total += 28 * size
    ratio = 2 * QWEN_7B_PARAMETERS / total
    all_rows = 28 * sum(rows for rows, _ in QWEN_7B_LAYER.values())
    assert total == pytest.approx(all_rows * (rank + 4), rel=2e-3)
    assert ratio >= at_least, ratio
