"""Probe sequences and the mismatch out of verl's two layouts: jagged responses (trainer v1) and padded ones (v0)."""

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_logra.integrations.batch import mean_log_prob_difference, probe_sequences

PROMPTS = [[11, 12], [13, 14, 15], [16], [17, 18]]
RESPONSES = [[21, 22, 23], [24], [25, 26], []]
MASKS = [[1, 0, 1], [1], [1, 1], []]  # 22 is a tool's token


def jagged(rows, dtype=torch.int64):
    return torch.nested.as_nested_tensor([torch.tensor(r, dtype=dtype) for r in rows], layout=torch.jagged)


def padded(rows, width, left=False):
    rows = [[0] * (width - len(r)) + list(r) if left else list(r) + [0] * (width - len(r)) for r in rows]
    return torch.tensor(rows)


def make(layout, temperature=1.0):
    rollout = [[float(t) for t in row] for row in RESPONSES]
    trainer = [[t - 0.5 for t in row] for row in rollout]
    fields = {"input_ids": jagged([p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)])}
    if layout == "jagged":
        fields |= {"prompts": jagged(PROMPTS), "responses": jagged(RESPONSES), "response_mask": jagged(MASKS)}
        fields |= {"rollout_log_probs": jagged(rollout, torch.float32)}
        fields |= {"old_log_probs": jagged(trainer, torch.float32)}
    else:
        prompts, responses = padded(PROMPTS, 4, left=True), padded(RESPONSES, 5)
        fields |= {"prompts": prompts, "responses": responses, "response_mask": padded(MASKS, 5)}
        fields |= {"attention_mask": torch.cat((prompts, responses), 1).bool().long()}
        fields |= {"rollout_log_probs": padded(rollout, 5), "old_log_probs": padded(trainer, 5)}
    data = TensorDict(fields, batch_size=[4])
    tu.assign_non_tensor(data, temperature=temperature)
    return data


@pytest.mark.parametrize("layout", ["jagged", "padded"])
def test_sequences_and_which_tokens_are_the_policys(layout):
    found = probe_sequences(make(layout, 0.7), count=8)
    assert [s.input_ids.tolist() for s in found] == [[11, 12, 21, 22, 23], [13, 14, 15, 24], [16, 25, 26]]
    assert [s.response.tolist() for s in found] == [
        [False, False, True, False, True], [False, False, False, True], [False, True, True]
    ]  # fmt: skip
    assert {s.temperature for s in found} == {0.7}


def test_few_sequences_are_spread_over_the_batch():
    found = probe_sequences(make("jagged"), count=2)
    assert [s.input_ids[0].item() for s in found] == [11, 13]
    assert [s.input_ids[0].item() for s in probe_sequences(make("jagged"), count=1)] == [11]


@pytest.mark.parametrize("layout", ["jagged", "padded"])
def test_mismatch_is_the_mean_over_the_policys_tokens(layout):
    assert mean_log_prob_difference(make(layout)) == pytest.approx(0.5)


def test_mismatch_needs_the_rollouts_log_probs():
    data = make("jagged")
    del data["rollout_log_probs"]
    assert mean_log_prob_difference(data) is None


def test_temperature_of_each_sequence_and_from_the_settings():
    data = make("jagged", torch.tensor([0.5, 0.6, 0.7, 0.8]))
    assert [s.temperature for s in probe_sequences(data, count=8)] == pytest.approx([0.5, 0.6, 0.7])
    assert {s.temperature for s in probe_sequences(data, count=8, temperature=1.3)} == {1.3}
    with pytest.raises(ValueError, match="temperature is 0.0: set kl.temperature"):
        probe_sequences(make("jagged", 0.0), count=1)


def test_images_are_refused():
    data = make("jagged")
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", [{}, {}, {}, {}])
    assert len(probe_sequences(data, count=1)) == 1
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", [{}, {"pixel_values": torch.zeros(1)}, {}, {}])
    with pytest.raises(NotImplementedError, match="probes text only"):
        probe_sequences(data, count=1)
