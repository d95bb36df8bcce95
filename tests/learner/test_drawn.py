"""Response tokens that the model did not draw: context, and part of nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from config.objective import ObjectiveOptions
from contracts.codec import Codec
from contracts.training import Demonstration, TrainSequence
from tests.learner.tiny import make_sequences, make_trainer

SEQUENCES = Codec(TrainSequence)


def masked(sequence: TrainSequence, seed: int) -> TrainSequence:
    """Of a sequence whose log-probs are of all tokens, those of some."""
    drawn = np.random.default_rng(seed).random(len(sequence.response_tokens)) < 0.6
    drawn[0] = True
    count = int(drawn.sum())
    zeros = np.zeros(count, np.float32)
    return replace(sequence, drawn=drawn, sampler_logprobs=zeros, sampler_logprobs_t1=zeros)


def test_log_probs_are_those_of_the_drawn_tokens(model_dir: Path) -> None:
    trainer, whole = make_trainer(model_dir, micro_batch_tokens=4096), make_sequences(6)
    some = [masked(sequence, i) for i, sequence in enumerate(whole)]
    (every,) = trainer.logprobs(whole, temperature=0.8)
    (drawn,) = trainer.logprobs(some, temperature=0.8)
    # One micro-batch has its sequences in an order of its own, the same for both.
    order = trainer._mini_batch(whole, len(whole)).micro[0].indices
    keep = np.concatenate([some[i].drawn for i in order])
    assert drawn.tolist() == pytest.approx(every[keep].tolist(), abs=1e-6)
    assert drawn.numel() == sum(sequence.drawn_tokens for sequence in some)


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_a_step_is_that_of_the_same_tokens_with_no_weight_on_the_others(model_dir: Path, aggregation: str) -> None:
    """What was observed moves nothing: an advantage of zero for it, and means over the drawn tokens alone, are the
    same step."""
    whole = [replace(sequence, weight=1.0) for sequence in make_sequences(8)]
    some = [masked(sequence, i) for i, sequence in enumerate(whole)]
    scale = sum(len(s.response_tokens) for s in whole) / sum(s.drawn_tokens for s in some)
    counted = []
    for one, part in zip(whole, some, strict=True):
        assert part.drawn is not None
        share = len(one.response_tokens) / part.drawn_tokens
        factor = {"token_mean": scale, "seq_mean_token_mean": share, "seq_mean_token_sum": 1.0}[aggregation]
        counted.append(replace(one, advantage=np.where(part.drawn, float(one.advantage) * factor, 0.0)))
    objective = ObjectiveOptions(aggregation=aggregation)
    results = [
        make_trainer(model_dir, objective=objective).rl_step(sequences, temperature=0.8)
        for sequences in (some, counted)
    ]
    assert results[0].losses == pytest.approx(results[1].losses, rel=1e-5, abs=1e-7)
    assert results[0].grad_norms == pytest.approx(results[1].grad_norms, rel=1e-4)


def test_statistics_are_of_drawn_tokens(model_dir: Path) -> None:
    """Observed tokens may be anything that the model would never say: entropy and gap do not see them."""
    kl = ObjectiveOptions(kl="k3", kl_coef=0.1)
    some = [masked(sequence, i) for i, sequence in enumerate(make_sequences(8))]
    ends = [replace(s, response_tokens=np.append(s.response_tokens, s.response_tokens[-1:])) for s in some]
    ends = [replace(s, drawn=np.append(s.drawn, False)) for s in ends]  # behind the last turn: not even context
    got, expected = (make_trainer(model_dir, objective=kl).rl_step(each, temperature=0.8) for each in (ends, some))
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)


def test_a_demonstration_teaches_its_turns_only(model_dir: Path) -> None:
    prompt, response = np.array([1, 2], np.int32), np.array([3, 4, 5, 6], np.int32)
    drawn = np.array([True, False, False, True])
    trainer = make_trainer(model_dir)
    loss = trainer.sft_step([Demonstration(prompt, response, drawn)]).losses[0]
    whole = TrainSequence(
        prompt_tokens=prompt,
        response_tokens=response,
        sampler_logprobs=np.zeros(4, np.float32),
        sampler_logprobs_t1=None,
        advantage=0.0,
    )
    (logprobs,) = make_trainer(model_dir).logprobs([whole], temperature=1.0)
    assert loss == pytest.approx(-float(logprobs[[0, 3]].mean()), rel=1e-5)


def test_what_is_kept_for_another_learner_group_is_whole(model_dir: Path) -> None:
    sequences = make_sequences(5)
    sequences[1], sequences[3] = masked(sequences[1], 1), masked(sequences[3], 3)
    for got, given in zip(SEQUENCES.unpack(SEQUENCES.pack(sequences)), sequences, strict=True):
        for name in ("prompt_tokens", "response_tokens", "sampler_logprobs", "drawn"):
            assert np.array_equal(getattr(got, name), getattr(given, name)), name


def test_masks_that_fit_nothing_are_refused(model_dir: Path) -> None:
    trainer, sequence = make_trainer(model_dir), masked(make_sequences(1, seed=3)[0], 0)
    assert sequence.drawn is not None
    for drawn in (np.zeros_like(sequence.drawn), sequence.drawn[:-1]):
        with pytest.raises(ValueError, match="response tokens were drawn"):
            trainer.rl_step([replace(sequence, drawn=drawn)], temperature=1.0)
