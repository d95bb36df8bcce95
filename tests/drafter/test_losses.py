"""Losses that are what rejection accepts: by hand, at their minimum, and where a drafter is too small to be right."""

import math

import pytest
import torch

from config.drafter import DrafterLoss
from drafter.training.losses import divergence_of

P = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.0, 1.0, 0.0, 0.0]])
Q = torch.tensor([[0.2, 0.3, 0.4, 0.1], [0.25, 0.25, 0.25, 0.25]])


def test_values_by_hand() -> None:
    assert divergence_of("tv", P, Q.log()).tolist() == pytest.approx([0.3, 0.75])
    kl = 0.5 * math.log(0.5 / 0.2) + 0.2 * math.log(0.2 / 0.4), math.log(4)
    weights = math.exp(-3 * 0.7), math.exp(-3 * 0.25)
    lk = [w * k + (1 - w) * tv for w, k, tv in zip(weights, kl, (0.3, 0.75), strict=True)]
    assert divergence_of("lk", P, Q.log()).tolist() == pytest.approx(lk)
    entropy = 0.5 * math.log(0.2) + 0.3 * math.log(0.3) + 0.2 * math.log(0.4)
    assert divergence_of("cross_entropy", P, Q.log()).tolist() == pytest.approx([-entropy, math.log(4)])


@pytest.mark.parametrize("loss", ["cross_entropy", "tv", "lk"])
def test_saying_the_same_is_best(loss: DrafterLoss) -> None:
    generator = torch.Generator().manual_seed(1)
    wanted, best = P[:1, :3], P[:1, :3].log()
    least = divergence_of(loss, wanted, best.log_softmax(-1)).item()
    for _ in range(50):
        near = best + 0.1 * torch.randn(1, 3, generator=generator)
        assert divergence_of(loss, wanted, near.log_softmax(-1)).item() > least


def test_of_a_smaller_vocabulary_is_what_can_be_accepted() -> None:
    """The head has tokens 0 and 2 only: at best half and a fifth of the target's drafts stand."""
    assert divergence_of("tv", P[:1, [0, 2]], torch.tensor([[0.7, 0.3]]).log()).item() == pytest.approx(1 - 0.5 - 0.2)


def test_what_is_too_small_is_accepted_more_often_by_tv_than_by_cross_entropy() -> None:
    """One distribution for many targets: cross-entropy takes their mean, tv what overlaps most."""
    generator = torch.Generator().manual_seed(0)
    targets = (torch.randn(64, 12, generator=generator) * 2).softmax(-1)
    accepted = {}
    for loss in ("cross_entropy", "tv", "lk"):
        logits = torch.zeros(12, requires_grad=True)
        optimizer = torch.optim.Adam([logits], lr=0.05)
        for _ in range(400):
            optimizer.zero_grad()
            divergence_of(loss, targets, logits.log_softmax(-1).expand(64, 12)).mean().backward()
            optimizer.step()
        with torch.no_grad():
            accepted[loss] = torch.minimum(targets, logits.softmax(-1)).sum(-1).mean().item()
    assert accepted["tv"] > accepted["cross_entropy"] + 0.002
    assert accepted["lk"] > accepted["cross_entropy"]
