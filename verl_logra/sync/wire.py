"""The message of one weight sync, version 1. Little-endian throughout; this file is the specification.

A message is a sequence of items; an item is a name and a tensor, because that is what every transport of a training
framework already carries. Items whose name starts with ``logra_frame/`` are frames (a flat uint8 tensor, this format);
every other item is a whole parameter under its checkpoint name.

    low_rank:  BEGIN  FACTORS*  parameter*  END      parameters besides the targets that may have changed
    full:      BEGIN            parameter*  END      all parameters; the weights of targets in float32

Frame:

    offset  size  field
    0       4     magic, the bytes "LGRA"
    4       2     version = 1
    6       2     kind: 1 BEGIN, 2 FACTORS, 3 END
    8       8     bytes of the whole frame, a multiple of 8
    16      4     number of the frame in its message, from 0
    20      4     checksum (see ``checksum.tensor_checksum``) of the frame with this field set to zero
    24            payload, zero-padded

BEGIN: uint32 n, then n bytes of JSON (``Begin``), numbers as JSON prints a float64 so that they read back exactly.

FACTORS: what ``count`` consecutive updates did to one target.

    0       4     target: index into Begin.targets
    4       4     first: index into Begin.updates
    8       4     count
    12      4     rows, all of the target's
    16      4     rank
    20      4     zero
    24            coefficients, float32 [count, rows], zero-padded to a multiple of 8 bytes
    ...           codes, int8 [count, rows, rank]

The receiver does, for the updates in order, in float32, each operation rounded once:

    I = codes @ signs                         exact: integers below 2^24
    W = W * decay                             skipped if decay == 1
    W = W - coefficient[:, None] * I
    W = next_up_in_magnitude(W) where the low 16 bits of W are exactly 0x8000

``signs [rank, in]`` is the Rademacher projection of (seed, refresh, target name), see ``core.projection``. The last
line keeps W representable as a bf16 and an int16, see ``core.split_weight``; the trainer does the same.

END: uint32 n, then n bytes of JSON (``End``): how many frames there were, and the checksums that the receiver must
arrive at: of the bits of every target's float32 weight after the last update, and of the parameters as they travelled.
"""

import dataclasses
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from jaxtyping import Float32, Int8, UInt8
from torch import Tensor

from verl_logra.sync.checksum import tensor_checksum

VERSION = 1
FRAME = "logra_frame/"
MAGIC = b"LGRA"
BEGIN, FACTORS, END = 1, 2, 3

_HEADER = struct.Struct("<4sHHQII")
_FACTORS = struct.Struct("<IIIIII")
_CHECKSUM_OFFSET = 20
_T = TypeVar("_T", bound="Begin | End")


class WireError(ValueError):
    """The message is not what it should be: corrupted, incomplete, out of order or of another version."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One committed update, as far as it is the same for all targets."""

    number: int
    """Count of updates once this one is applied, from 1."""
    refresh: int
    """Refresh number of the projection that its factors belong to."""
    decay: float
    """What the weights are multiplied by before the factor is subtracted."""


@dataclass(frozen=True, kw_only=True)
class Begin:
    kind: Literal["low_rank", "full"]
    history: str
    """Names the line of weights: another run, or the same one resumed, has another."""
    base: int
    """Updates that the receiver must have applied already; in a full message equal to ``last``."""
    last: int
    """Updates applied once the message is."""
    seed: int
    rank: int
    projection: str
    targets: list[tuple[str, int, int]]
    """(name, out_features, in_features); the weight of a target is the parameter ``name + ".weight"``."""
    updates: list[Update]
    """``base + 1`` to ``last``; empty in a full message."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", [tuple(t) for t in self.targets])
        object.__setattr__(self, "updates", [u if isinstance(u, Update) else Update(**u) for u in self.updates])


@dataclass(frozen=True, kw_only=True)
class End:
    num_frames: int
    """Frames of the message, BEGIN and END included."""
    targets: dict[str, int]
    """Target name -> ``checksum.weight_checksum`` of the whole weight."""
    parameters: dict[str, int]
    """Name of a parameter that travelled in a low-rank message -> ``checksum.tensor_checksum``."""


@dataclass(frozen=True, kw_only=True)
class Factors:
    target: int
    first: int
    coefficients: Float32[Tensor, "count rows"]
    codes: Int8[Tensor, "count rows rank"]


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def factors_frame_bytes(count: int, rows: int, rank: int) -> int:
    """Bytes of a FACTORS frame."""
    return _padded(_HEADER.size + _FACTORS.size + _padded(4 * count * rows) + count * rows * rank)


class FrameWriter:
    """Numbers the frames of one message and builds each as a named flat uint8 tensor on ``device``."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.num_frames = 0

    def begin(self, begin: Begin) -> tuple[str, Tensor]:
        return self._json(BEGIN, begin)

    def end(self, *, targets: dict[str, int], parameters: dict[str, int]) -> tuple[str, Tensor]:
        return self._json(END, End(num_frames=self.num_frames + 1, targets=targets, parameters=parameters))

    def factors(self, factors: Factors) -> tuple[str, Tensor]:
        count, rows, rank = factors.codes.shape
        head = _FACTORS.pack(factors.target, factors.first, count, rows, rank, 0)
        coefficients = factors.coefficients.contiguous().view(torch.uint8).view(-1)
        frame = self._empty(FACTORS, factors_frame_bytes(count, rows, rank))
        start = _HEADER.size
        frame[start : start + len(head)] = _bytes(head, self.device)
        start += len(head)
        frame[start : start + coefficients.numel()] = coefficients
        start += _padded(coefficients.numel())
        frame[start : start + factors.codes.numel()] = factors.codes.contiguous().view(torch.uint8).view(-1)
        return self._sealed(frame)

    def _json(self, kind: int, content: Begin | End) -> tuple[str, Tensor]:
        text = json.dumps(dataclasses.asdict(content)).encode()
        payload = struct.pack("<I", len(text)) + text
        frame = self._empty(kind, _padded(_HEADER.size + len(payload)))
        frame[_HEADER.size : _HEADER.size + len(payload)] = _bytes(payload, self.device)
        return self._sealed(frame)

    def _empty(self, kind: int, size: int) -> UInt8[Tensor, " size"]:
        frame = torch.zeros(size, dtype=torch.uint8, device=self.device)
        header = _HEADER.pack(MAGIC, VERSION, kind, size, self.num_frames, 0)
        frame[: _HEADER.size] = _bytes(header, self.device)
        return frame

    def _sealed(self, frame: Tensor) -> tuple[str, Tensor]:
        frame[_CHECKSUM_OFFSET : _HEADER.size] = _bytes(struct.pack("<I", tensor_checksum(frame)), self.device)
        name = f"{FRAME}{self.num_frames}"
        self.num_frames += 1
        return name, frame


def _bytes(data: bytes, device: torch.device) -> UInt8[Tensor, " size"]:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


class FrameReader:
    """Checks and decodes the frames of one message in order."""

    def __init__(self) -> None:
        self.num_frames = 0

    def read(self, frame: UInt8[Tensor, " size"]) -> Begin | Factors | End:
        """Decodes the next frame.

        Raises:
            WireError: the frame is corrupted, cut short, not the next one, or of another version.
        """
        if frame.dtype != torch.uint8 or frame.dim() != 1 or frame.numel() < _HEADER.size or frame.numel() % 8:
            raise WireError(f"frame {self.num_frames} is cut short: {tuple(frame.shape)} of {frame.dtype}")
        frame = frame.clone()  # aligned, and ours: a transport reuses its buffer
        magic, version, kind, size, number, checksum = _HEADER.unpack(_host(frame[: _HEADER.size]))
        if magic != MAGIC or size != frame.numel():
            raise WireError(f"frame {self.num_frames} is corrupted: its header reads {magic!r}, {size} bytes")
        if version != VERSION:
            raise WireError(
                f"the message has version {version}, this side reads {VERSION}: install the same verl-logra"
            )
        frame[_CHECKSUM_OFFSET : _HEADER.size] = 0
        if tensor_checksum(frame) != checksum:
            raise WireError(f"frame {self.num_frames} is corrupted: its checksum does not match")
        if number != self.num_frames:
            raise WireError(f"frame {number} came where frame {self.num_frames} was due")
        self.num_frames += 1
        payload = frame[_HEADER.size :]
        if kind == FACTORS:
            return _read_factors(payload)
        if kind == BEGIN:
            return _read_json(payload, Begin)
        if kind == END:
            end = _read_json(payload, End)
            if end.num_frames != self.num_frames:
                raise WireError(f"{self.num_frames} of {end.num_frames} frames arrived")
            return end
        raise WireError(f"frame {number} has the unknown kind {kind}")


def _host(data: Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def _read_json(payload: Tensor, cls: type[_T]) -> _T:
    (size,) = struct.unpack("<I", _host(payload[:4]))
    return cls(**json.loads(_host(payload[4 : 4 + size])))


def _read_factors(payload: Tensor) -> Factors:
    target, first, count, rows, rank, _ = _FACTORS.unpack(_host(payload[: _FACTORS.size]))
    start = _FACTORS.size
    size = 4 * count * rows
    coefficients = payload[start : start + size].view(torch.float32).view(count, rows)
    start += _padded(size)
    codes = payload[start : start + count * rows * rank].view(torch.int8).view(count, rows, rank)
    return Factors(target=target, first=first, coefficients=coefficients, codes=codes)


def is_frame(name: str) -> bool:
    return name.startswith(FRAME)


def layout(targets: Sequence[tuple[str, int, int]], seed: int, rank: int, projection: str) -> str:
    """What must not change between two messages for the second to be low-rank."""
    text = json.dumps([[list(t) for t in targets], seed, rank, projection])
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return f"{len(targets)} targets, rank {rank}, {projection}, {tensor_checksum(data):08x}"
