"""What the controller decides, and that the policy moves as decided."""

import copy
import logging
import math

import pytest
import torch

from tests.controller.test_probe import sequences
from tests.tiny_models import VOCABULARY, loss_of, tiny_model, tokens
from verl_logra import LoGRA
from verl_logra.controller import KLController
from verl_logra.probe import MeanKL, Probe


def controlled(kl, *, model=None, lr=3e-3, weight_decay=0.0, **settings):
    model = model or tiny_model()
    kl = {"max_update_ratio": None, **kl}
    settings = {"rank": 6, "scale": "lr", "kl": kl, **settings}
    optimizer = LoGRA(model, settings, lr=lr, weight_decay=weight_decay)
    return model, optimizer, KLController(optimizer, optimizer.config.kl)


def step(model, optimizer, controller, seed=0):
    loss_of(model, tokens(seed=seed)).backward()
    controller.probe = Probe(model, sequences(), method=controller.config.probe)
    optimizer.step()
    optimizer.zero_grad()
    return controller.last


def policy_kl(before, model):
    """Mean KL of the probe's response tokens between two models, in float64, by torch.distributions."""
    kls = []
    for s in sequences():
        p, q = (
            torch.distributions.Categorical(logits=m.double()(input_ids=s.input_ids[None]).logits[0, :-1])
            for m in (copy.deepcopy(before), copy.deepcopy(model))
        )
        kls.append(torch.distributions.kl_divergence(p, q)[s.response[1:]])
    return float(torch.cat(kls).mean())


CONSTANT = {"schedule": "constant", "realized_every": 1}


@pytest.mark.parametrize("probe", ["jvp", "finite_difference"])
@pytest.mark.parametrize("lr", [3e-3, 1e-1])
def test_the_policy_moves_by_the_budget(lr, probe):
    model, optimizer, controller = controlled({"budget": 1e-4, "probe": probe, "alpha_max": 1e9, **CONSTANT}, lr=lr)
    for seed in range(3):
        before = copy.deepcopy(model)
        decision = step(model, optimizer, controller, seed)
        realized = policy_kl(before, model)
        assert realized == pytest.approx(1e-4, rel=0.1)
        assert decision.verified_kl == pytest.approx(realized, rel=5e-3)
        assert decision.realized_kl == pytest.approx(realized, rel=5e-3)
        assert decision.alpha**2 * decision.predicted_kl == pytest.approx(1e-4, rel=1e-6)


def test_small_steps_are_stretched_at_most_by_alpha_max():
    model, optimizer, controller = controlled({"budget": 1.0, "alpha_max": 2.0, **CONSTANT}, lr=1e-5)
    assert step(model, optimizer, controller).alpha == 2.0


def test_where_the_prediction_fails_the_measurement_shrinks_the_step():
    """A nearly deterministic policy: its Fisher information vanishes, the prediction with it, the step does not."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    sure_of_5 = 25 * torch.nn.functional.one_hot(torch.tensor(5), VOCABULARY)
    model.lm_head.register_forward_hook(lambda module, args, output: output + sure_of_5)
    before = copy.deepcopy(model)
    model, optimizer, controller = controlled({"budget": 1e-2, "alpha_max": 1e6, **CONSTANT}, model=model)
    decision = step(model, optimizer, controller)
    assert decision.verifications > 1 and decision.refusal is None
    assert decision.alpha < 0.8 * math.sqrt(1e-2 / decision.predicted_kl)
    assert policy_kl(before, model) <= 1.5e-2 * 1.01


def test_the_bound_on_the_weights_holds_and_is_reported():
    model, optimizer, controller = controlled({"budget": 1.0, "max_update_ratio": 1e-4, **CONSTANT}, weight_decay=0.1)
    before = copy.deepcopy(model)
    assert step(model, optimizer, controller).capped
    names = [name + ".weight" for name in optimizer.targets]
    moved = sum((model.get_parameter(n) - before.get_parameter(n)).double().square().sum() for n in names)
    size = sum(before.get_parameter(n).double().square().sum() for n in names)
    assert 0.5e-4 < float((moved / size).sqrt()) <= 1.0001e-4
    assert controller.metrics()["capped"] == 1.0


def test_a_probe_of_few_tokens_is_mentioned_once(caplog):
    model, optimizer, controller = controlled({"budget": 1e-4})
    for seed in range(2):
        step(model, optimizer, controller, seed)
    assert caplog.text.count("the KL probe sees 10 response tokens") == 1
    assert "raise kl.probe_sequences=2" in caplog.text


def test_budget_follows_the_schedule_and_the_mismatch():
    kl = {"budget": 2e-4, "budget_final": 1e-4, "schedule": "linear", "schedule_updates": 2}
    model, optimizer, controller = controlled(kl)
    budgets = [step(model, optimizer, controller, seed).budget for seed in range(3)]
    assert budgets == pytest.approx([2e-4, 1.5e-4, 1e-4])
    controller.observe_mismatch(3e-5)
    assert controller.budget() == pytest.approx(7e-5)
    controller.observe_mismatch(1.0)
    assert controller.budget() == pytest.approx(5e-5)
    off = controlled({**kl, "mismatch": False})[2]
    off.observe_mismatch(3e-5)
    assert off.budget() == pytest.approx(2e-4)


class _Answers:
    """A probe that measures what it is told."""

    remembers = True

    def __init__(self, predicted, measured=(0.0,)):
        self.predicted, self.measured, self.scales, self.taps = predicted, list(measured), [], None

    def predict(self, decay):
        return self.predicted

    def remember(self):
        pass

    def kl_since_remembered(self):
        self.scales.append(self.taps.scale)
        return MeanKL(self.measured.pop(0) if len(self.measured) > 1 else self.measured[0], 5)


def answered(answers, kl=None):
    model, optimizer, controller = controlled({"budget": 1e-3, "schedule": "constant", **(kl or {})})
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    loss_of(model, tokens()).backward()
    controller.probe, answers.taps = answers, optimizer.taps
    optimizer.step()
    unchanged = all(torch.equal(weights[n], p) for n, p in model.state_dict().items())
    now = optimizer.state_dict()["state"]
    unchanged &= (
        all(torch.equal(state[i][k], now[i][k]) for i in state for k in state[i]) and optimizer.num_updates == 0
    )
    return controller.last, unchanged


@pytest.mark.parametrize(
    "answers, kl, refusal",
    [
        (_Answers(MeanKL(math.nan, 5)), {}, "the predicted KL is nan"),
        (_Answers(MeanKL(math.inf, 5)), {}, "the predicted KL is inf"),
        (_Answers(MeanKL(-1e-3, 5)), {}, "the predicted KL is -0.001"),
        (_Answers(MeanKL(0.0, 0)), {}, "no probe sequence has a response token"),
        (_Answers(MeanKL(1e-3, 5), [1.0]), {}, "still causes 1 nats, budget 0.001"),
        (_Answers(MeanKL(1e-3, 5), [math.nan]), {}, "still causes nan nats"),
        (_Answers(MeanKL(1e3, 5)), {"alpha_min": 0.1}, "its scale 0.001 is below kl.alpha_min=0.1"),
    ],
)
def test_a_refused_step_changes_nothing(answers, kl, refusal, caplog):
    with caplog.at_level(logging.WARNING):
        decision, unchanged = answered(answers, kl)
    assert refusal in decision.refusal and decision.alpha is None and unchanged
    assert caplog.text.count("LoGRA refuses update 1") == 1


def test_shrinking_goes_by_the_square_root_of_the_excess_six_times():
    answers = _Answers(MeanKL(1e-3, 5), [1e-2, 9e-3, 4e-3, 2.5e-3, 1.6e-3, 1.4e-3])
    decision, unchanged = answered(answers)
    assert decision.verifications == 6 and not unchanged
    ratios = [b / a for a, b in zip(answers.scales, answers.scales[1:], strict=False)]
    assert ratios == pytest.approx([math.sqrt(1e-3 / kl) for kl in (1e-2, 9e-3, 4e-3, 2.5e-3, 1.6e-3)])
    assert decision.alpha == answers.scales[-1]


def test_three_refusals_in_a_row_are_an_error():
    model, optimizer, controller = controlled({"budget": 1e-3})
    for attempt in range(3):
        loss_of(model, tokens()).backward()
        controller.probe = _Answers(MeanKL(math.nan, 5))
        if attempt < 2:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match="3 updates in a row were refused.*Lower the learning rate"):
                optimizer.step()
        optimizer.zero_grad()
    assert controller.state.refused == 3 and optimizer.num_updates == 0
    assert all((t.update == 0).all() for t in optimizer.targets.values())


def test_a_good_step_forgives_refusals():
    model, optimizer, controller = controlled({"budget": 1e-3})
    for answers in (MeanKL(math.nan, 5), MeanKL(1e-3, 5)) * 3:
        loss_of(model, tokens()).backward()
        controller.probe = _Answers(answers)
        controller.probe.taps = optimizer.taps
        optimizer.step()
        optimizer.zero_grad()
    assert controller.state.refused == 3 and controller.state.refused_in_a_row == 0 and optimizer.num_updates == 3


def test_a_step_without_a_probe_is_an_error():
    model, optimizer, _ = controlled({})
    loss_of(model, tokens()).backward()
    with pytest.raises(RuntimeError, match="has no probe for this step"):
        optimizer.step()


@pytest.mark.parametrize("verify", [True, False])
def test_the_rest_under_adamw_is_controlled_too(verify):
    """AdamW on embeddings and head moves the policy a thousand times further than the targets do."""
    kl = {"budget": 1e-3, "schedule": "constant", "verify": verify}
    model, optimizer, controller = controlled(
        kl, non_target="adamw", lr=3e-2, scale="ratio", update_ratio=1e-3, adamw={"lr": 3e-2 if verify else 1e-3}
    )
    assert controller.calibrates
    realized = []
    for seed in range(10):
        before = copy.deepcopy(model)
        decision = step(model, optimizer, controller, seed)
        realized.append(policy_kl(before, model))
        measured = decision.verified_kl if verify else decision.realized_kl
        assert measured == pytest.approx(realized[-1], rel=5e-3)
    assert controller.state.calibration > 10
    assert max(realized) <= 1.5e-3 * 1.01


def test_showing_a_trial_leaves_no_trace():
    model, optimizer, _ = controlled({}, non_target="adamw")
    optimizer.step_scale = None
    for seed in range(2):  # the second time AdamW has moments
        loss_of(model, tokens(seed=seed)).backward()
        optimizer.propose()
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        with optimizer.trial(0.5):
            shown = model(input_ids=tokens()).logits
        assert all(torch.equal(weights[n], p) for n, p in model.state_dict().items())
        now = optimizer.state_dict()["state"]
        assert all(torch.equal(state["state"][i][k], now[i][k]) for i in state["state"] for k in state["state"][i])
        optimizer.commit(0.5)
        optimizer.zero_grad()
        torch.testing.assert_close(model(input_ids=tokens()).logits, shown, rtol=1e-4, atol=1e-5)


def test_controller_state_is_resumed():
    kl = {"budget": 1e-4, "alpha_max": 1e9}
    model, optimizer, controller = controlled(kl, non_target="adamw")
    controller.observe_mismatch(2e-5)
    for seed in range(2):
        step(model, optimizer, controller, seed)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed, resumed_optimizer, resumed_controller = controlled(kl, model=tiny_model(seed=5), non_target="adamw")
    resumed.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(saved[1])
    assert resumed_controller.state == controller.state
    for a in ((model, optimizer, controller), (resumed, resumed_optimizer, resumed_controller)):
        step(*a, seed=7)
    assert controller.last == resumed_controller.last
    assert all(torch.equal(p, resumed.state_dict()[n]) for n, p in model.state_dict().items())


def test_a_checkpoint_from_before_the_control_resumes():
    model = tiny_model()
    plain = LoGRA(model, {"rank": 6, "scale": "lr", "non_target": "frozen"}, lr=3e-3)
    loss_of(model, tokens()).backward()
    plain.step()
    model2, optimizer, controller = controlled({"budget": 1e-4})
    optimizer.load_state_dict(plain.state_dict())
    assert step(model2, optimizer, controller).refusal is None
