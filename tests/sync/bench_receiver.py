"""What a low-rank sync costs a receiver at the shapes of SmolLM2-135M, by the dtype of its weights and what it keeps.

    python -m tests.sync.bench_receiver [--rank 64] [--repeats 20] [--threads 1]

Prints medians in milliseconds of one update of all 210 targets, split into applying and checking, the bytes of the
message, and the bytes kept beside the parameters.
"""

import argparse
import platform
import statistics
import time

import torch

from verl_logra.core.factor import AppliedUpdate
from verl_logra.sync.receiver import Receiver, Slice
from verl_logra.sync.sender import MessageSender, TrainedWeight
from verl_logra.sync.wire import Begin, Update

LAYER = {"q": (576, 576), "k": (192, 576), "v": (192, 576), "o": (576, 576)}
LAYER |= {"gate": (1536, 576), "up": (1536, 576), "down": (576, 1536)}
SHAPES = {f"{i}.{name}": shape for i in range(30) for name, shape in LAYER.items()}


def random_update(number, rank, generator):
    factors = [
        (torch.randint(-127, 128, (rows, rank), generator=generator).to(torch.int8), torch.rand(rows) * 1e-7)
        for rows, _ in SHAPES.values()
    ]
    return AppliedUpdate(number, number - 1, 1.0, factors)


def begin(kind, number, rank):
    updates = [Update(number=number, refresh=number - 1, decay=1.0)] if kind == "low_rank" else []
    base = number - len(updates)
    targets = [(name, *shape) for name, shape in SHAPES.items()]
    return Begin(
        kind=kind, history="h", base=base, last=number, seed=1, rank=rank, projection="rademacher", targets=targets,
        updates=updates,
    )  # fmt: skip


def measure(dtype, low_half, rank, repeats):
    generator = torch.Generator().manual_seed(0)
    trained = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in SHAPES.items()}
    rollout = {name: torch.empty(shape, dtype=dtype) for name, shape in SHAPES.items()}

    def locate(name, rows, columns):
        return Slice(block=lambda: rollout[name], rows=range(rows), columns=range(columns))

    receiver = Receiver(locate, low_half=low_half)
    trainer = Receiver(lambda n, r, c: Slice(block=lambda: trained[n], rows=range(r), columns=range(c)))
    weights = [TrainedWeight(name=n, weight=w, low_half=None) for n, w in trained.items()]

    def message(kind, number, updates=()):
        sender = MessageSender(begin(kind, number, rank), weights, torch.device("cpu"), 64 << 20)
        if kind == "low_rank":
            return sender, sender.low_rank(updates, ())
        return sender, sender.full((f"{n}.weight", w) for n, w in trained.items())

    for side in (receiver, trainer):
        for name, tensor in message("full", 0)[1]:
            if not side.take(name, tensor) and side is receiver:
                rollout[name.removesuffix(".weight")].copy_(tensor)
    apply, check, building = [], [], []
    for number in range(1, repeats + 1):
        update = random_update(number, rank, generator)
        for name, tensor in list(message("low_rank", number, [update])[1])[:-1]:
            trainer.take(name, tensor)
        trainer.abandon("")
        trainer.state |= receiver.state  # the trainer's weights stand for those its optimizer left
        start = time.perf_counter()
        sender, items = message("low_rank", number, [update])
        items = list(items)
        building.append(time.perf_counter() - start)
        start = time.perf_counter()
        for item in items[:-1]:
            receiver.take(*item)
        middle = time.perf_counter()
        receiver.take(*items[-1])
        apply.append(middle - start)
        check.append(time.perf_counter() - middle)
        trainer.state |= receiver.state
    columns = zip(("apply", "check", "building the message"), (apply, check, building), strict=True)
    times = "  ".join(f"{what} {1000 * statistics.median(values):7.1f} ms" for what, values in columns)
    print(
        f"{str(dtype).removeprefix('torch.'):9} {low_half:5} {times}  {sender.num_bytes / 2**20:6.1f} MiB sent  "
        f"{receiver.kept_bytes() / 2**20:6.1f} MiB kept",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    num_parameters = sum(r * c for r, c in SHAPES.values())
    print(
        f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {arguments.threads} thread(s), rank "
        f"{arguments.rank}, {num_parameters / 1e6:.1f}M target parameters, median of {arguments.repeats}"
    )
    for dtype, low_half in ((torch.float32, "host"), (torch.bfloat16, "host"), (torch.bfloat16, "fp32")):
        measure(dtype, low_half, arguments.rank, arguments.repeats)


if __name__ == "__main__":
    main()
