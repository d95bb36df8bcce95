"""Bursts of unlikely tokens in bad responses: ratios of tokens explode; what TBPO learns from stays in its bands."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from actors.training import trainer as learner
from actors.training.trainer import Trainer
from config.learner import OptimizerOptions
from config.objective import ObjectiveOptions
from contracts.training import Demonstration, StepResult, TrainSequence
from policies.objectives import LossInputs, TokenLosses, token_losses
from tests.learner.tiny import VOCAB, make_sequences, make_trainer

BURST_TOKENS = 8
TBPO_HIGH = 0.07
TBPO = ObjectiveOptions(
    name="tbpo", clip_high=0.04, band_low=0.03, band_high=TBPO_HIGH, sampler_correction={"weights": "none"}
)
ONE_SIDED = ObjectiveOptions(clip_dual=None)  # PPO's minimum alone, as GRPO is defined


def with_bursts(sequences: Sequence[TrainSequence], share: float, vocab_size: int, seed: int) -> list[TrainSequence]:
    """In `share` of the responses with a negative advantage, BURST_TOKENS consecutive tokens drawn uniformly."""
    rng, changed = np.random.default_rng(seed), []
    for sequence in sequences:
        drawn, at = rng.random(), rng.integers(0, max(1, len(sequence.response_tokens) - BURST_TOKENS))
        garbled = rng.integers(0, vocab_size, BURST_TOKENS)
        if np.mean(sequence.advantage) < 0 and drawn < share and len(sequence.response_tokens) > BURST_TOKENS:
            tokens = sequence.response_tokens.copy()
            tokens[at : at + BURST_TOKENS] = garbled
            sequence = replace(sequence, response_tokens=tokens)
        changed.append(sequence)
    return changed


@contextmanager
def weighed() -> Iterator[list[float]]:
    """The largest weight of a token in each micro-batch that is learned from meanwhile."""
    found: list[float] = []

    def watched(inputs: LossInputs, options: ObjectiveOptions) -> TokenLosses:
        losses = token_losses(inputs, options)
        (gradient,) = torch.autograd.grad(losses.loss.sum(), inputs.logprobs, retain_graph=True)
        learns = inputs.advantages != 0
        found.append(float((gradient[learns] / inputs.advantages[learns]).abs().max()))
        return losses

    with patch.object(learner, "token_losses", watched):
        yield found


def peaked(model_dir: Path, objective: ObjectiveOptions) -> Trainer:
    """A policy that is sure of its responses, about to take the four mini-batches of an RL step."""
    trainer = make_trainer(model_dir, objective=objective, mini_batches=4)
    demonstrations = [Demonstration(s.prompt_tokens, s.response_tokens) for s in responses(0.0)]
    for _ in range(60):
        trainer.sft_step(demonstrations)
    trainer.begin(OptimizerOptions(lr=1e-2), 4)
    return trainer


def responses(share: float) -> list[TrainSequence]:
    """Its own, every second one bad."""
    own = make_sequences(24, longest=40)
    own = [replace(s, advantage=1.0 if i % 2 else -1.0, weight=1.0) for i, s in enumerate(own)]
    return with_bursts(own, share, VOCAB, seed=0)


def step(model_dir: Path, objective: ObjectiveOptions, share: float) -> tuple[StepResult, float]:
    trainer = peaked(model_dir, objective)
    with weighed() as weights:
        result = trainer.rl_step(responses(share), temperature=1.0)
    return result, max(weights)


def test_bursts_make_the_ratio_of_a_token_explode_and_leave_tbpo_in_its_bands(model_dir: Path) -> None:
    clean, lightest = step(model_dir, ONE_SIDED, 0.0)
    garbled, weight = step(model_dir, ONE_SIDED, 0.5)
    assert lightest < 1.3
    assert weight > 20  # of one token, where that of a good response's is at most 1 + clip_high
    assert max(garbled.grad_norms) > 10 * max(clean.grad_norms)

    banded, weight = step(model_dir, TBPO, 0.5)
    assert banded.metrics["ratio/token_max"] > 10  # the bursts are no less there
    assert weight <= 1 + TBPO_HIGH
    assert max(banded.grad_norms) < max(garbled.grad_norms) / 10
    left_out = banded.metrics["clip_fraction/band_low"] + banded.metrics["clip_fraction/band_high"]
    assert 0.1 < left_out < 0.5


def test_bursts_are_put_into_bad_responses_only() -> None:
    changed = 0
    for before, after in zip(responses(0.0), responses(0.5), strict=True):
        differs = np.flatnonzero(before.response_tokens != after.response_tokens)
        if differs.size:
            assert before.advantage == -1.0
            assert differs[-1] - differs[0] < BURST_TOKENS
            changed += 1
    assert 0 < changed < 12
