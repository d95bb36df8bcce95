"""Theorem 3 of DUET through the driver's and the learner's own code, exactly: summed over everything that can be
sampled, given up or let go on, the trainer's gradient is that of the expected reward.

A model with five tokens and responses of at most three of them: all of them can be listed. A gradient is linear in
its sequences, so one RL step on all that can come, each with the advantage that it has in expectation, gives the
expected gradient; a model written as plainly as the formula gives the true one.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.data.stop_strings import compile_marker
from actors.engine.stopping import find_end, kept
from actors.training.trainer import Trainer
from config.objective import ObjectiveOptions
from contracts.rewards import Grade
from contracts.rollout import FinishReason, Request, Rollout, Sampled, SamplingParams, StopRule
from contracts.training import TrainSequence
from launch.batch import Pick
from launch.run.groups import Graded, PromptGroup, training_sequences
from models.checkpoint import init_model
from models.packed import PackedContext
from tests.launch.graded import prompt_of
from tests.learner.tiny import make_sequences, make_trainer, write_config

THINK, RIGHT, WRONG, STOP = 0, 1, 2, 4
LIMIT, KEEP = 3, 0.25
RULE = StopRule(answer=compile_marker([b"!"], [b".", b"right!", b"wrong!", b",", b""]), give_up_at_tokens=1, keep=KEEP)
COINS = {on: next(key for key in range(1000) if kept(RULE, key) is on) for on in (False, True)}
COUNTS = (2, 3)  # responses to each of two prompts
DUET = ObjectiveOptions(name="duet").sized(LIMIT)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("five tokens"), vocab_size=5)


def responses(begun: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    if begun and (begun[-1] == STOP or len(begun) == LIMIT):
        yield begun
        return
    for token in range(5):
        yield from responses((*begun, token))


RESPONSES = [np.array(tokens, np.int32) for tokens in responses()]


def grade(tokens: np.ndarray) -> float:
    answers = [token for token in tokens.tolist() if token in (RIGHT, WRONG)]
    return float(answers[:1] == [RIGHT])


def logprobs(model: torch.nn.Module, prompt: np.ndarray) -> Tensor:
    """Of every response as a whole, [number of responses]."""
    found = []
    for tokens in RESPONSES:
        together = torch.tensor([*prompt, *tokens])
        table = torch.log_softmax(model.logits(model(together, PackedContext.from_lengths([len(together)]))), -1)
        rows = torch.arange(len(prompt) - 1, len(together) - 1)
        found.append(table[rows, together[rows + 1]].sum())
    return torch.stack(found)


def true_gradient(model_dir: Path, picks: Sequence[Pick]) -> tuple[list[np.ndarray], dict[str, Tensor]]:
    """(chances of the responses to each prompt, gradient of minus the mean of the expected rewards / LIMIT)"""
    model = init_model(model_dir, 5)
    rewards = torch.tensor([grade(tokens) for tokens in RESPONSES])
    chances = [logprobs(model, pick.prompt.tokens).exp() for pick in picks]
    for each in chances:
        assert float(each.detach().sum()) == pytest.approx(1.0, abs=1e-5)
    (-torch.stack([(each * rewards).sum() for each in chances]).mean() / LIMIT).backward()
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [each.detach().double().numpy() for each in chances], gradient


def member(pick: Pick, tokens: np.ndarray, coin: bool, rule: StopRule | None, weighed: bool) -> Graded:
    request = Request(
        request_id=0,
        prompt_id=pick.prompt.prompt_id,
        prompt_tokens=pick.prompt.tokens,
        noise_key=COINS[coin],
        sampling=SamplingParams(max_new_tokens=LIMIT, stop_token_ids=(STOP,)),
        stop=rule,
    )
    end = find_end(request, tokens, LIMIT)
    assert end is not None
    cut = tokens[: end.tokens]
    zeros = np.zeros(cut.size, np.float32)
    rollout = Rollout(
        request_id=0,
        sampled=Sampled(cut, zeros, zeros),
        finish_reason=end.reason,
        weights_version=0,
        started_s=0.0,
        finished_s=0.0,
        propensity=end.propensity if weighed else 1.0,
    )
    return Graded(rollout=rollout, grade=Grade(value=grade(cut)), text="")


def alike(group: Sequence[tuple[float, Graded]]) -> list[tuple[float, Graded]]:
    """Outcomes that the learner cannot tell apart, as one: it knows tokens, grade, propensity and who was given up.
    Which tokens matters for the gradient of oneself only, so those of others are left out."""
    sums, first = defaultdict[tuple[object, ...], float](float), dict[tuple[object, ...], Graded]()
    for chance, each in group:
        given_up = each.rollout.finish_reason is FinishReason.GIVEN_UP
        key = (each.grade.value, each.rollout.propensity, given_up)
        sums[key] += chance
        first.setdefault(key, each)
    return [(chance, first[key]) for key, chance in sums.items()]


def expected(
    picks: Sequence[Pick],
    chances: Sequence[np.ndarray],
    objective: ObjectiveOptions,
    rule: StopRule | None,
    weighed: bool,
) -> list[TrainSequence]:
    """Everything that can be sampled for these prompts, each response with weight times advantage as expected."""
    summed = dict[tuple[int, ...], float]()
    shown = dict[tuple[int, ...], TrainSequence]()
    for index, (pick, count) in enumerate(zip(picks, COUNTS, strict=True)):
        own = [
            (chance * (KEEP if coin else 1 - KEEP), member(pick, tokens, coin, rule, weighed))
            for chance, tokens in zip(chances[index].tolist(), RESPONSES, strict=True)
            for coin in (False, True)
        ]
        others = alike(own)
        for (chance, first), *rest in product(own, *([others] * (count - 1))):
            group = PromptGroup(pick, [first, *(each for _, each in rest)])
            sequences, _ = training_sequences(
                [group, PromptGroup(picks[1 - index], [])],  # what became of the other prompt changes nothing here
                objective,
                prompts_per_step=2,
                max_new_tokens=LIMIT,
                asked=sum(COUNTS),
            )
            mine = [s for s in sequences if s.response_tokens is first.rollout.tokens]
            if mine:
                key = (index, *first.rollout.tokens.tolist())
                shown.setdefault(key, mine[0])
                part = (
                    chance
                    * float(np.prod([p for p, _ in rest]))
                    * mine[0].weight
                    * float(np.asarray(mine[0].advantage))
                )
                summed[key] = summed.get(key, 0.0) + count * part  # each of the `count` is the first once
    return [replace(shown[key], weight=1.0, advantage=value) for key, value in summed.items()]


def gradients(
    model_dir: Path,
    sequences: Sequence[TrainSequence],
    monkeypatch: pytest.MonkeyPatch,
    *,
    asked: int,
    objective: ObjectiveOptions = DUET,
    parts: int = 1,
) -> list[dict[str, Tensor]]:
    """Of each mini-batch, all of them at the first weights."""
    taken: list[dict[str, Tensor]] = []

    def keep(self: Trainer, loss: Tensor) -> tuple[float, float, float]:
        taken.append({name: p.grad.clone() for name, p in self.network.named_parameters() if p.grad is not None})
        self.optimizers.zero_grad()
        return float(loss), 0.0, 0.0

    monkeypatch.setattr(Trainer, "_update", keep)
    make_trainer(model_dir, objective=objective, mini_batches=parts).rl_step(sequences, temperature=1.0, asked=asked)
    return taken


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Relative to b."""
    assert a.keys() == b.keys()
    apart = sum(float((a[name] - b[name]).square().sum()) for name in a)
    return float(np.sqrt(apart / sum(float(value.square().sum()) for value in b.values())))


@pytest.mark.parametrize(
    ("changes", "rule", "weighed", "least", "most"),
    [
        ({}, RULE, True, 0.0, 1e-4),
        ({}, None, True, 0.0, 1e-4),
        ({"loss": "policy_gradient"}, RULE, True, 0.0, 1e-4),
        ({"baseline": "group"}, RULE, True, 0.3, 0.6),  # a half and a third of two prompts' parts are missing
        ({"baseline": "group"}, None, True, 0.3, 0.6),
        ({}, RULE, False, 0.03, 1.0),  # as if what was let go on stood for itself alone
        ({"normalize": "group"}, RULE, True, 0.3, 9.0),
    ],
)
def test_the_expected_gradient_is_that_of_the_expected_reward(
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, str],
    rule: StopRule | None,
    weighed: bool,
    least: float,
    most: float,
) -> None:
    picks = [Pick(0, prompt_of(0)), Pick(0, prompt_of(1))]
    chances, truth = true_gradient(model_dir, picks)
    objective = ObjectiveOptions.model_validate({"name": "duet"} | changes).sized(LIMIT)
    everything, many = expected(picks, chances, objective, rule, weighed), 10**6
    # The loss divides by what was asked for, and more is listed here than two prompts could be asked for.
    scaled = [replace(s, advantage=float(np.asarray(s.advantage)) * many / sum(COUNTS)) for s in everything]
    (found,) = gradients(model_dir, scaled, monkeypatch, asked=many, objective=objective)
    assert least <= distance(found, truth) < most


def test_the_gradients_of_mini_batches_are_in_the_mean_that_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path
) -> None:
    """Also where their sizes differ: 7 sequences of 12 that were asked for, in 3 parts."""
    drawn = make_sequences(7, seed=3)
    sequences = [replace(s, response_tokens=s.response_tokens % 5, prompt_tokens=s.prompt_tokens % 5) for s in drawn]
    objective = ObjectiveOptions(name="duet", sum_divisor=20, entropy_coef=0.1)
    (whole,) = gradients(model_dir, sequences, monkeypatch, asked=12, objective=objective)
    parts = gradients(model_dir, sequences, monkeypatch, asked=12, objective=objective, parts=3)
    assert len(parts) == 3
    mean = {name: torch.stack([part[name] for part in parts]).mean(0) for name in whole}
    assert distance(mean, whole) < 1e-5


def test_more_sequences_than_were_asked_for_are_refused(model_dir: Path) -> None:
    sequences = [
        replace(s, response_tokens=s.response_tokens % 5, prompt_tokens=s.prompt_tokens % 5) for s in make_sequences(3)
    ]
    with pytest.raises(ValueError, match="only 2 responses were asked for"):
        make_trainer(model_dir, objective=DUET).rl_step(sequences, temperature=1.0, asked=2)
    with pytest.raises(ValueError, match="responses asked for"):
        make_trainer(model_dir, objective=DUET).rl_step(sequences, temperature=1.0)
