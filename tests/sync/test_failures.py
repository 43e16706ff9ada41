"""Every failure is noticed before anybody generates, and the full message that follows heals it."""

import pytest
import torch

from tests.sync.rollout import Rollout, deliver, send, train
from tests.sync.test_exact import assert_equal, setup
from verl_logra.sync.session import SessionSettings
from verl_logra.sync.wire import is_frame


def ready(**settings):
    """A trainer one update ahead of a rollout that has had its first sync."""
    model, optimizer, weight_sync = setup(non_target="adamw", **settings)
    rollout = Rollout(model, torch.bfloat16)
    send(weight_sync, rollout, optimizer)
    train(model, optimizer, 1)
    return model, optimizer, weight_sync, rollout


def flip_byte(position_of_item, byte):
    def tamper(worker, position, name, tensor):
        if position == position_of_item:
            tensor = tensor.clone()
            tensor.view(-1).view(torch.uint8)[byte] ^= 1
        return tensor

    return tamper


def items_of(weight_sync, optimizer, rollout):
    session = weight_sync.session(optimizer.num_updates)
    session.open("probe", rollout.states())
    return [(name, tensor.clone()) for name, tensor in session.items()]


def test_a_corrupted_byte_anywhere_is_healed_by_a_full_message():
    model, optimizer, weight_sync, rollout = ready()
    items = items_of(weight_sync, optimizer, rollout)
    for step, position in enumerate(range(0, len(items), 3)):
        size = items[position][1].numel() * items[position][1].element_size()
        _, plans = send(weight_sync, rollout, optimizer, flip_byte(position, (7 * step) % size))
        assert [p.kind for p in plans] == ["low_rank", "full"], items[position][0]
        assert plans[1].reason == "failed sync"
        assert_equal(model, optimizer, rollout)
        train(model, optimizer, 1, seed=step + 1)
    send(weight_sync, rollout, optimizer)
    assert_equal(model, optimizer, rollout)


@pytest.mark.parametrize("lost", ["first factors", "a parameter", "end"])
def test_a_lost_item_is_healed_by_a_full_message(lost):
    model, optimizer, weight_sync, rollout = ready()
    items = items_of(weight_sync, optimizer, rollout)
    parameters = [i for i, (name, _) in enumerate(items) if not is_frame(name)]
    position = {"first factors": 1, "a parameter": parameters[0], "end": len(items) - 1}[lost]
    if lost == "end":  # the sender died: nothing else comes, the worker reports it
        for i, (name, tensor) in enumerate(items[:-1]):
            deliver(rollout.workers[0], 0, i, name, tensor, None, [""])
        assert rollout.states()[0]["problem"] == "a weight sync did not finish"
        _, plans = send(weight_sync, rollout, optimizer)
        assert [p.reason for p in plans] == ["failed sync"]
    else:
        _, plans = send(weight_sync, rollout, optimizer, lambda w, p, n, t: None if p == position else t)
        assert [p.kind for p in plans] == ["low_rank", "full"]
    assert_equal(model, optimizer, rollout)


def test_factors_applied_twice_are_noticed():
    model, optimizer, weight_sync, rollout = ready()

    def twice(worker, position, name, tensor):
        return [(name, tensor), (name, tensor)] if position == 1 else tensor

    _, plans = send(weight_sync, rollout, optimizer, twice)
    assert [p.kind for p in plans] == ["low_rank", "full"]
    assert_equal(model, optimizer, rollout)


def test_a_message_applied_twice_is_refused():
    model, optimizer, weight_sync, rollout = ready()
    items = items_of(weight_sync, optimizer, rollout)
    problems = [""]
    for i, (name, tensor) in enumerate(items + items[:1]):
        deliver(rollout.workers[0], 0, i, name, tensor, None, problems)
    assert "sent twice" in problems[0]
    assert_equal(model, optimizer, rollout)  # and changed nothing


def test_messages_out_of_order_are_refused_and_change_nothing():
    model, optimizer, weight_sync, rollout = ready()
    first = items_of(weight_sync, optimizer, rollout)
    before = {n: rollout.whole(n).clone() for n in rollout.shapes}
    state = {**rollout.states()[0], "update": 1}
    train(model, optimizer, 1, seed=1)
    session = weight_sync.session(optimizer.num_updates)
    session.open("probe", [state])
    second = list(session.items())
    problems = [""]
    for i, (name, tensor) in enumerate(second):
        deliver(rollout.workers[0], 0, i, name, tensor, None, problems)
    assert "missed" in problems[0]
    assert all(torch.equal(before[n], rollout.whole(n)) for n in before)
    for i, (name, tensor) in enumerate(first + second):
        deliver(rollout.workers[0], 0, i, name, tensor, None, [""])
    assert_equal(model, optimizer, rollout)


def test_exchanged_factors_frames_are_noticed():
    model, optimizer, weight_sync, rollout = ready()
    items = items_of(weight_sync, optimizer, rollout)
    exchange = {1: 2, 2: 1}
    _, plans = send(weight_sync, rollout, optimizer, lambda w, p, n, t: items[exchange[p]][1] if p in exchange else t)
    assert [p.kind for p in plans] == ["low_rank", "full"]
    assert_equal(model, optimizer, rollout)


def test_weights_that_changed_behind_the_receiver_are_noticed():
    """As after a sleep that discarded them."""
    model, optimizer, weight_sync, rollout = ready()
    rollout.workers[0].part("model.layers.1.mlp.down_proj.weight")[3, 5] += 1e-3
    _, plans = send(weight_sync, rollout, optimizer)
    assert [p.kind for p in plans] == ["low_rank", "full"]
    assert "model.layers.1.mlp.down_proj" in plans[1].detail
    assert_equal(model, optimizer, rollout)


def test_one_bad_worker_of_two_makes_both_full():
    model, optimizer, weight_sync = setup()
    rollout = Rollout(model, torch.bfloat16, num_workers=2)
    send(weight_sync, rollout, optimizer)
    train(model, optimizer, 1)
    _, plans = send(weight_sync, rollout, optimizer, lambda w, p, n, t: None if (w, p) == (1, 2) else t)
    assert [p.kind for p in plans] == ["low_rank", "full"]
    assert_equal(model, optimizer, rollout)


def test_a_new_replica_makes_the_sync_full():
    model, optimizer, weight_sync, rollout = ready()
    rollout.workers[0] = type(rollout.workers[0])(rollout, 0, "host")
    _, plans = send(weight_sync, rollout, optimizer)
    assert [p.reason for p in plans] == ["first sync"]
    assert_equal(model, optimizer, rollout)


def test_a_resumed_run_makes_the_sync_full():
    model, optimizer, weight_sync, rollout = ready()
    weight_sync.restart(optimizer.num_updates, "resumed run")
    _, plans = send(weight_sync, rollout, optimizer)
    assert [p.reason for p in plans] == ["resumed run"]
    assert_equal(model, optimizer, rollout)


def test_changed_targets_make_the_sync_full():
    model, optimizer, weight_sync, rollout = ready()
    model, optimizer, weight_sync = setup(target_modules=["q_proj", "down_proj"], non_target="adamw")
    _, plans = send(weight_sync, rollout, optimizer)
    assert [p.reason for p in plans] == ["changed targets"]
    train(model, optimizer, 2)
    _, plans = send(weight_sync, rollout, optimizer)
    assert [p.kind for p in plans] == ["low_rank"]
    assert_equal(model, optimizer, rollout)


def test_more_updates_than_the_log_holds_make_the_sync_full():
    model, optimizer, weight_sync, rollout = ready()
    weight_sync.log.max_updates = 3
    train(model, optimizer, 4, seed=1)
    _, plans = send(weight_sync, rollout, optimizer)
    assert [p.reason for p in plans] == ["missed update"]
    assert_equal(model, optimizer, rollout)


def test_every_nth_sync_is_full_if_asked():
    model, optimizer, weight_sync, rollout = ready()
    reasons = []
    for step in range(6):
        train(model, optimizer, 1, seed=step)
        _, plans = send(weight_sync, rollout, optimizer, settings=SessionSettings(full_sync_interval=3))
        reasons.append(plans[0].reason)
    assert reasons == ["none", "none", "full_sync_interval"] * 2


def test_a_full_message_that_fails_twice_is_an_error_and_leaves_the_rollout_marked():
    model, optimizer, weight_sync, rollout = ready()
    rollout.workers[0].receiver.abandon("broken")
    session = weight_sync.session(optimizer.num_updates)
    for attempt in range(2):
        session.open("rollout", rollout.states())
        items = list(session.items())
        problems = [""]
        for i, (name, tensor) in enumerate(items[:-3]):
            deliver(rollout.workers[0], 0, i, name, tensor, None, problems)
        rollout.workers[0].receiver.abandon("the connection was lost")
        if attempt == 0:
            assert not session.close(["the connection was lost"])
        else:
            with pytest.raises(RuntimeError, match="must not generate: the connection was lost"):
                session.close(["the connection was lost"])
    assert rollout.states()[0]["problem"] == "the connection was lost"
    _, plans = send(weight_sync, rollout, optimizer)
    assert plans[0].reason == "failed sync"
    assert_equal(model, optimizer, rollout)


def test_two_groups_of_receivers_are_synced_at_their_own_pace():
    model, optimizer, weight_sync, often = ready()
    seldom = Rollout(model, torch.float32)
    session = weight_sync.session(optimizer.num_updates)
    session.open("seldom", seldom.states())
    for name, tensor in session.items():
        if not seldom.workers[0].receiver.take(name, tensor):
            seldom.workers[0].load(name, tensor)
    assert session.close()
    for step in range(3):
        train(model, optimizer, 1, seed=step)
        _, plans = send(weight_sync, often, optimizer)
        assert plans[0].kind == "low_rank"
        assert_equal(model, optimizer, often)
    session = weight_sync.session(optimizer.num_updates)
    assert session.open("seldom", seldom.states()).kind == "low_rank"
    for name, tensor in session.items():
        if not seldom.workers[0].receiver.take(name, tensor):
            seldom.workers[0].load(name, tensor)
    assert session.close() and session.metrics["sync/updates"] == 3
    assert_equal(model, optimizer, seldom)
    assert weight_sync.log.num_bytes() == 0
