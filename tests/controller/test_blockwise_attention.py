"""Blocks of queries against the models' own eager attention, tangents included, and what they save."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tiny_models import ARCHITECTURES, VOCABULARY, tiny_model
from verl_logra import blockwise_attention
from verl_logra.probe import probing


def outputs_and_tangents(model, ids, attended):
    """Logits, and how they move with the embeddings."""
    embeddings = model.get_input_embeddings()(ids)
    moved = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(5), dtype=embeddings.dtype)
    with torch.no_grad(), forward_ad.dual_level():
        out = model(inputs_embeds=forward_ad.make_dual(embeddings, moved), attention_mask=attended, use_cache=False)
        return forward_ad.unpack_dual(out.logits)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_equal_the_models_own_eager_attention(architecture, monkeypatch):
    """Gemma 2 adds a cap on scores and a window of 8 keys; the left of the first sequence is padding."""
    monkeypatch.setattr(blockwise_attention, "BLOCK", 5)
    model = tiny_model(architecture)
    ids = torch.randint(2, VOCABULARY, (2, 23), generator=torch.Generator().manual_seed(0))
    attended = torch.ones_like(ids)
    attended[0, :4] = 0
    expected = outputs_and_tangents(model, ids, attended)
    with probing(model):
        assert model.config._attn_implementation == blockwise_attention.NAME
        got = outputs_and_tangents(model, ids, attended)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours[attended.bool()], theirs[attended.bool()], rtol=1e-5, atol=1e-5)
    assert expected.tangent.abs().max() > 1e-3


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
        return result


def test_no_tensor_has_a_score_of_every_query_and_key():
    """4 heads of 1024 tokens: the mask, which heads share, is the largest tensor."""
    model = tiny_model(num_attention_heads=4, num_key_value_heads=4)
    ids = torch.randint(2, VOCABULARY, (1, 1024))
    with probing(model), _Largest() as seen:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    assert seen.numel <= 1024 * 1024
