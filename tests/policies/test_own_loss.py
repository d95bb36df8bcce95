"""A loss of the user's own: it is composed as the built-in ones are, and its mistakes are named."""

from pathlib import Path

import pytest
import torch

from config.import_path import OwnCodeError
from config.objective import ObjectiveOptions
from policies.objectives import LossInputs, TokenLosses, token_losses
from policies.objectives.own import own_loss, try_loss
from tests.policies.objectives import inputs

MODULE = """
import torch
from policies.objectives import TokenLosses
from policies.objectives.ratios import log_ratio

def reinforce(inputs, scale=1.0):
    return TokenLosses(-scale * inputs.advantages * inputs.logprobs, {"twice": 2 * inputs.logprobs})

def ppo(inputs):
    ratio = log_ratio(inputs.logprobs, inputs.old_logprobs).exp()
    clipped = ratio.clamp(0.8, 1.28)
    return TokenLosses(-torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages), {})

def summed(inputs):
    return TokenLosses(-(inputs.advantages * inputs.logprobs).sum(), {})

def wide(inputs):
    return TokenLosses(inputs.logprobs.double(), {})

def constant(inputs):
    return TokenLosses(-inputs.advantages, {})

def endless(inputs):
    return TokenLosses(inputs.logprobs / 0, {})

def tensor(inputs):
    return inputs.logprobs

def broken(inputs):
    return inputs.nothing

def metrics(inputs):
    return TokenLosses(inputs.logprobs, {"mean": inputs.logprobs.mean()})

calls = 0

def changing(inputs):
    global calls
    calls += 1
    return TokenLosses(inputs.logprobs, {f"call{calls}": inputs.logprobs})

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_losses.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    own_loss.cache_clear()


def given() -> LossInputs:
    """Five tokens of two responses."""
    return inputs(
        torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0], requires_grad=True),
        torch.tensor([-0.9, -1.0, -1.5, -0.1, -2.5]),
        torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5]),
        lengths=[3, 2],
    )


def losses(name: str, **keys: object) -> TokenLosses:
    options = ObjectiveOptions.model_validate({"loss": f"user_losses:{name}", **keys})
    return token_losses(given(), options)


def test_it_is_the_surrogate_and_its_metrics_have_a_name_of_their_own() -> None:
    made = losses("reinforce", loss_arguments={"scale": 2.0})
    built_in = token_losses(given(), ObjectiveOptions.model_validate({"loss": "policy_gradient"}))
    assert torch.equal(made.loss, 2 * built_in.loss)
    assert made.metrics["own_loss/twice"].tolist() == [-1.0, -2.0, -4.0, pytest.approx(-0.2), -6.0]
    assert not made.metrics["own_loss/twice"].requires_grad
    assert {"kl_old", "logprob_gap/k1"} <= made.metrics.keys()


def test_a_users_clip_is_the_built_in_one_with_its_gradient_bit_for_bit() -> None:
    found = []
    for keys in ({"loss": "user_losses:ppo"}, {"loss": "clip", "clip_high": 0.28, "clip_dual": None}):
        tokens = given()
        made = token_losses(tokens, ObjectiveOptions.model_validate(keys))
        made.loss.sum().backward()
        found.append((made.loss.detach(), tokens.logprobs.grad))
    assert all(torch.equal(own, ours) for own, ours in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("summed", r"returned a loss of shape \[\]; it must have one entry per response token, \[5\]"),
        ("wide", "returned a loss in torch.float64 on cpu, not torch.float32"),
        ("constant", "returned a loss without gradient"),
        ("endless", "returned -inf for token 0 of 5"),
        ("tensor", "returned Tensor, not TokenLosses"),
        ("broken", r"raised AttributeError: .*nothing.* \(.*user_losses\.py:\d+\)"),
        ("metrics", r"returned a metric 'mean' of \[\]"),
        ("number", "is not callable, it is int"),
        ("missing", r"user_losses \(.*\) has no 'missing'"),
    ],
)
def test_what_is_wrong_with_it_is_said(name: str, said: str) -> None:
    with pytest.raises(OwnCodeError, match=f"objective.loss: .*{said}"):
        losses(name)
    with pytest.raises(OwnCodeError, match=said):
        try_loss(f"user_losses:{name}", {})


def test_metrics_that_depend_on_the_data_and_arguments_that_do_not_fit_are_named() -> None:
    losses("changing")
    with pytest.raises(OwnCodeError, match=r"other metrics than in its first call \(call1, call2\)"):
        losses("changing")
    with pytest.raises(OwnCodeError, match="unexpected keyword argument 'scales'"):
        losses("reinforce", loss_arguments={"scales": 2.0})
    with pytest.raises(OwnCodeError, match="ModuleNotFoundError: No module named 'user_loss'"):
        try_loss("user_loss:reinforce", {})
