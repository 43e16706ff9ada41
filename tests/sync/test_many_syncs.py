"""500 syncs of a tiny model: not one bit differs, and neither side grows."""

import gc

import torch

from tests.sync.rollout import Rollout, send
from tests.sync.test_exact import assert_equal, setup


def tensor_bytes():
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):  # compiled models leave fake ones behind
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def test_500_syncs_differ_in_no_bit_and_memory_is_flat():
    model, optimizer, weight_sync = setup(update_ratio=1e-2)
    rollout = Rollout(model, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    sizes = []
    for step in range(500):
        for _ in range(1 + 3 * (step % 2)):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
            optimizer.zero_grad()
        _, plans = send(weight_sync, rollout, optimizer)
        assert plans[-1].kind == ("low_rank" if step else "full") and len(plans) == 1
        assert_equal(model, optimizer, rollout)
        if step % 100 == 99:
            sizes.append(tensor_bytes())
    assert max(sizes) - min(sizes) < 4096, sizes
