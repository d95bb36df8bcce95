"""A policy small enough to list every response, whose gradient is known exactly, under a token budget and an abort.

Four kinds of prompts, four tokens, at most six of them. RL steps are drawn from it as a budget and an abort draw them:
unequal counts, ends by `find_end`, its coin. The driver's and the learner's functions make gradients of them
(`training_sequences`, so `batch_advantages`; `sequence_coefficients`), whose mean is compared with the truth (DUET,
theorem 3, eq. 8, and the remarks after them). What other forms are off by: docs/results/gradient_bias.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import comb
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from actors.data import Prompt
from actors.data.stop_strings import compile_marker
from actors.engine.stopping import find_end, kept
from config.objective import ObjectiveOptions
from contracts.rewards import Grade
from contracts.rollout import Request, Rollout, Sampled, SamplingParams, StopRule
from launch.batch import Pick
from launch.run.groups import Graded, PromptGroup, given_up, training_sequences
from policies.advantages import group_advantages
from policies.objectives import sequence_coefficients
from policies.token_budget.window import LengthWindow

THINK, RIGHT, WRONG, STOP = range(4)
LIMIT = 6
SAMPLING = SamplingParams(max_new_tokens=LIMIT, stop_token_ids=(STOP,))
MARKER = compile_marker([b"!"], [b".", b"right!", b"wrong!", b""])
UNIFORM, UNEVEN = (8, 8, 8, 8), (16, 10, 4, 2)  # responses to each kind of prompt
KEEP = 0.25
Floats = NDArray[np.float64]


def rule(keep: float) -> StopRule:
    """An answer ends a response a token later; after the third token without one it is late."""
    return StopRule(answer=MARKER, poll_from_tokens=2, grace_tokens=1, give_up_at_tokens=3, keep=keep)


def grade(tokens: NDArray[np.int32]) -> float:
    """Of the first answer."""
    answers = tokens[np.isin(tokens, (RIGHT, WRONG))]
    return float(answers.size > 0 and answers[0] == RIGHT)


class Kind:
    """One kind of prompt: a table of logits by state (answered or not, early or late), and every response to it."""

    def __init__(self, index: int, kinds: int, logits: Floats) -> None:
        """`logits` [4, 4]: of each token in each state. `index` of `kinds`: where its part of the gradient lies."""
        prompt = Prompt(prompt_id=index, uid="", text="", tokens=np.array([index], np.int32), record={})
        self.pick = Pick(0, prompt)
        self._log = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        self._index, self._kinds = index, kinds
        self.responses = [np.array(tokens, np.int32) for tokens in _responses(())]
        self.chances = np.exp([self._walk(tokens)[0] for tokens in self.responses])
        self.rewards = np.array([grade(tokens) for tokens in self.responses])

    def score(self, tokens: NDArray[np.int32]) -> Floats:
        """Gradient of the log-probability of `tokens`, [kinds * 16]."""
        return self._walk(tokens)[1]

    @property
    def gradient(self) -> Floats:
        """Of the expected reward, divided as the loss is."""
        scores = np.stack([self.score(tokens) for tokens in self.responses])
        return np.asarray((self.chances * self.rewards) @ scores / LIMIT)

    def _walk(self, tokens: NDArray[np.int32]) -> tuple[float, Floats]:
        total, score, answered = 0.0, np.zeros((self._kinds, 4, 4)), False
        for place, token in enumerate(tokens.tolist()):
            state = 2 * answered + (place >= 3)
            total += float(self._log[state, token])
            score[self._index, state] -= np.exp(self._log[state])
            score[self._index, state, token] += 1.0
            answered |= token in (RIGHT, WRONG)
        return total, score.ravel()


def _responses(begun: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if begun and (begun[-1] == STOP or len(begun) == LIMIT):
        yield begun
        return
    for token in range(4):
        yield from _responses((*begun, token))


def kinds_of(seed: int) -> list[Kind]:
    """Four, from seldom to mostly solved; the harder, the later the answer."""
    rng = np.random.default_rng(seed)
    made = []
    for index, (right, think) in enumerate(((-2.0, 1.5), (-1.0, 1.0), (0.0, 0.5), (1.0, 0.0))):
        logits = rng.normal(0.0, 0.3, (4, 4)) + np.array([think, right, 0.0, -1.0])
        logits[2:, STOP] += 2.0  # it has answered
        made.append(Kind(index, 4, logits))
    return made


class Outcomes:
    """What becomes of the responses to one kind of prompt under a rule, by the coin."""

    def __init__(self, kind: Kind, stop: StopRule | None) -> None:
        self.kind, self._keep = kind, 1.0 if stop is None else stop.keep
        keys = [next(key for key in range(1000) if kept(stop, key) is on) for on in (False, True)] if stop else [0, 0]
        self.members = [[self._member(tokens, key, stop) for key in keys] for tokens in kind.responses]
        self._edges = np.cumsum(kind.chances)

    def draw(self, count: int, rng: np.random.Generator) -> list[Graded]:
        found = np.searchsorted(self._edges, rng.random(count) * self._edges[-1])
        let = rng.random(count) < self._keep
        return [self.members[i][coin] for i, coin in zip(found.tolist(), let.tolist(), strict=True)]

    def each(self) -> Iterator[tuple[float, Graded]]:
        """(probability, what became of it)"""
        for chance, (stopped, went_on) in zip(self.kind.chances.tolist(), self.members, strict=True):
            yield chance * (1 - self._keep), stopped
            yield chance * self._keep, went_on

    def _member(self, tokens: NDArray[np.int32], noise_key: int, stop: StopRule | None) -> Graded:
        request = Request(
            request_id=0,
            prompt_id=self.kind.pick.prompt.prompt_id,
            prompt_tokens=self.kind.pick.prompt.tokens,
            noise_key=noise_key,
            sampling=SAMPLING,
            stop=stop,
        )
        end = find_end(request, tokens, LIMIT)
        assert end is not None  # they end by themselves
        cut = tokens[: end.tokens].copy()  # an array of its own, by which its score is found
        zeros = np.zeros(cut.size, np.float32)
        rollout = Rollout(
            request_id=0,
            sampled=Sampled(cut, zeros, zeros),
            finish_reason=end.reason,
            weights_version=0,
            started_s=0.0,
            finished_s=0.0,
            propensity=end.propensity,
        )
        return Graded(rollout=rollout, grade=Grade(value=grade(cut)), text="")


@dataclass(frozen=True, slots=True)
class Form:
    """A way to make a gradient of an RL step."""

    objective: ObjectiveOptions
    prompts_weighed: bool = True  # by n / n_i, and responses by 1 / propensity
    propensities: bool = True


def _duet(**changes: Any) -> ObjectiveOptions:
    return ObjectiveOptions.model_validate({"name": "duet"} | changes).sized(LIMIT)


FORMS: dict[str, Form] = {
    "duet": Form(_duet()),
    "weights divided by their sum": Form(_duet(aggregation="seq_mean_token_sum_norm")),
    "own reward in the baseline": Form(_duet(baseline="group")),
    "prompts not weighed": Form(_duet(), prompts_weighed=False),
    "kept late ones not weighed": Form(_duet(), propensities=False),
}


class Scores:
    """Of arrays of tokens that outcomes hold."""

    def __init__(self, made: Sequence[Outcomes]) -> None:
        self._of = {
            id(member.rollout.tokens): outcome.kind.score(member.rollout.tokens)
            for outcome in made
            for pair in outcome.members
            for member in pair
        }
        self.size = next(iter(self._of.values())).size

    def gradient(self, form: Form, groups: Sequence[PromptGroup], asked: int) -> Floats:
        """What the loss of one mini-batch would give."""
        if not form.propensities:
            groups = [PromptGroup(group.pick, [_unweighed(m) for m in group.members]) for group in groups]
        objective = form.objective
        sequences, _ = training_sequences(
            groups,
            objective,
            prompts_per_step=len(groups),
            max_new_tokens=LIMIT,
            asked=asked if form.prompts_weighed else None,
        )
        if not sequences:
            return np.zeros(self.size)
        coefficients = sequence_coefficients(
            [s.response_tokens.size for s in sequences],
            [s.weight for s in sequences],
            objective.aggregation,
            objective.sum_divisor,
            asked,
        )
        advantages = np.array([float(np.asarray(s.advantage)) for s in sequences])
        return np.asarray((coefficients * advantages) @ np.stack([self._of[id(s.response_tokens)] for s in sequences]))


def _unweighed(member: Graded) -> Graded:
    return replace(member, rollout=replace(member.rollout, propensity=1.0))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Many gradients of one form, and the truth."""

    drawn: Floats  # [steps, parameters]
    truth: Floats

    @property
    def mean(self) -> Floats:
        return np.asarray(self.drawn.mean(axis=0))

    @property
    def z(self) -> float:
        """How many standard errors the squared bias is above that of an unbiased estimate."""
        covariance = np.cov(self.drawn.T) / len(self.drawn)
        squared = float(((self.mean - self.truth) ** 2).sum())
        return (squared - float(np.trace(covariance))) / float(np.sqrt(2 * (covariance**2).sum()))


def estimates(
    kinds: Sequence[Kind],
    names: Sequence[str],
    *,
    counts: Sequence[int],
    keep: float | None,
    steps: int,
    seed: int,
) -> dict[str, Estimate]:
    """Of each form, from the same `steps` RL steps: a prompt of each kind, `counts[k]` responses to that of kind k;
    with `keep`, under `rule`."""
    rng = np.random.default_rng(seed)
    made = [Outcomes(kind, None if keep is None else rule(keep)) for kind in kinds]
    scores, asked = Scores(made), sum(counts)
    drawn = {name: np.empty((steps, scores.size)) for name in names}
    for step in range(steps):
        groups = [
            PromptGroup(outcome.kind.pick, outcome.draw(count, rng))
            for outcome, count in zip(made, counts, strict=True)
        ]
        for name in names:
            drawn[name][step] = scores.gradient(FORMS[name], groups, asked)
    truth = np.mean([kind.gradient for kind in kinds], axis=0)
    return {name: Estimate(values, truth) for name, values in drawn.items()}


def prompt_weight(
    solved: float, count: int, normalize_std: bool, baseline: Literal["group", "leave_one_out"] = "group"
) -> float:
    """What a prompt that is solved so often counts for with `count` responses and its weight of 1 / count: the factor
    of its true gradient in the expected one. Exact, over how many of them are right."""
    total = 0.0
    for right in range(count + 1):
        chance = comb(count, right) * solved**right * (1 - solved) ** (count - right)
        rewards = [1.0] * right + [0.0] * (count - right)
        made = group_advantages(rewards, normalize_std=normalize_std, baseline=baseline).advantages
        # By `solved`, the log-probability of a reward of 1 has the derivative 1 / solved, of 0 -1 / (1 - solved).
        pull = made[:right].sum() / solved - made[right:].sum() / (1 - solved)
        total += chance * pull / count
    return total


def second_moment(kind: Kind, keep: float) -> dict[str, float]:
    """Of one response's contribution, exactly: without a rule, with it, and what eq. 8 allows it to grow by. The
    baseline is the prompt's mean reward."""
    baseline = float(kind.chances @ kind.rewards)

    def square(member: Graded) -> float:
        return float(((member.grade.value - baseline) ** 2) * (kind.score(member.rollout.tokens) ** 2).sum())

    natural, with_rule = Outcomes(kind, None), Outcomes(kind, rule(keep))
    late = [member.rollout.propensity < 1 or given_up(member) for _, member in with_rule.each()][1::2]
    squares = np.array([square(went_on) for _, went_on in natural.members])
    before = float(kind.chances @ squares)
    after = sum(p * square(m) / m.rollout.propensity**2 for p, m in with_rule.each() if not given_up(m))
    marked = 1.0 - float(kind.chances @ np.array(late))
    late_moment = float((kind.chances * np.array(late)) @ squares)  # (1 - marked) times the second moment of the late
    return {
        "solved": baseline,
        "late_share": 1 - marked,
        "natural": before,
        "with_rule": after,
        "surcharge": after / before - 1,
        "allowed": (1 / keep - 1) * late_moment / before,
    }


def thresholds(seed: int, *, weighed: bool, steps: int = 40, responses: int = 128, q: float = 0.8) -> list[float]:
    """The share of natural lengths below the threshold of each RL step: it should stay `q`. Lengths are lognormal and
    do not change; whoever is longer than the threshold goes on with probability 0.1. `weighed`: each kept response
    stands for 1 / propensity of them in the window, else for itself."""
    rng, window, keep = np.random.default_rng(seed), LengthWindow(1024), 0.1
    natural = np.sort(rng.lognormal(4.6, 0.6, 100_000))
    found = []
    for _ in range(steps):
        threshold = window.quantile(q)
        found.append(1.0 if threshold is None else float(np.searchsorted(natural, threshold)) / natural.size)
        for tokens in rng.lognormal(4.6, 0.6, responses):
            late = threshold is not None and tokens > threshold
            if not late or rng.random() < keep:
                window.add(int(tokens), 1 / keep if late and weighed else 1.0)
    return found[1:]
