"""Signs that a run does not learn, or exceeds its token budget, each with its likely cause and a remedy.

Pure: from the metrics of RL steps, in order. The same rules serve a run in progress (`Watch`) and its summary
(`symptoms`).

Never stops a run. A rule waits until chance is no explanation: PATIENCE_STEPS steps in a row with enough groups or
responses in them, or a trend over the whole run. A finished run is judged by what it has. Only `no_reward` does not
wait, since it only states a fact: nothing was rewarded yet.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeGuard

from config.catalogue import CATALOGUE, FRESH_WEIGHTS, weights_path
from config.tree import Config
from launch.observe.records import Sample
from policies.drafter.silence import Silence

PATIENCE_STEPS = 3
MIN_GROUPS = 32  # if one group in four has different rewards, so many without one have a chance of 1e-4
MIN_RESPONSES = 64
BUDGET_STEPS = 8  # a budget may be exceeded by chance for fewer steps: prompts differ in length
MOSTLY = 0.9  # share of truncated responses
FEW_STEPS = 8  # steps examined for what becomes rare
FEW = 0.25  # share of the groups, or of the initial entropy
FIRST_GROUPS = 8  # groups without any reward
TREND_STEPS = 40  # the trend is tested after this many steps, and at each doubling of their number
TREND_ERRORS = 1.0  # a rise below this many standard errors does not count
NO_REWARD = "no_reward"
_SHOWN = 160  # characters of a response
_LOOK = "look at some responses in samples.jsonl or the report"

READ = frozenset(  # the metrics read, of hundreds per step; a run may have many thousand steps
    (
        *("entropy", "lr", "reward/mean", "reward/std", "rollouts/truncated", "rollouts/truncated_share"),
        *("groups/total", "groups/ungraded", "groups/varied", "budget/planned_tokens", "budget/tokens"),
        *("budget/rollouts_max", "budget/rollouts_mean", "budget/rollouts_min"),
    )
)
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Symptom:
    """One sign. `kind` is the kind of its event."""

    kind: str
    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}"


class Watch:
    """Reports each kind of symptom once. Pass it every RL step's metrics, in order."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._told: set[str] = set()

    def recall(self, row: Row) -> None:
        """Add a step of an earlier part of the run: it counts, but is not judged."""
        self._rows.append({name: row[name] for name in READ if name in row})

    def take(self, row: Row, example: str = "") -> list[Symptom]:
        """Add a step and return the new symptoms that it makes certain. `example`: from its responses, if none was
        rewarded."""
        self.recall(row)
        found = [symptom for symptom in symptoms(self._rows) if symptom.kind not in self._told]
        self._told |= {symptom.kind for symptom in found}
        return [
            replace(symptom, message=f"{symptom.message}{example}") if symptom.kind == NO_REWARD else symptom
            for symptom in found
        ]


def example(samples: Sequence[Sample]) -> str:
    """Describe what most of these responses lack, by the reward's notes, and quote one. Empty if one was rewarded."""
    if not samples or any(sample.reward != 0 for sample in samples):
        return ""
    notes = Counter(note for sample in samples for note in sample.notes)
    most = [(note, count) for note, count in notes.most_common(1) if 2 * count >= len(samples)]
    said = "".join(f" ({note}: {count} of {len(samples)})" for note, count in most)
    text = samples[0].response
    return f"{said}; the first response is {text[:_SHOWN]!r}{' ...' if len(text) > _SHOWN else ''}"


def symptoms(rows: Sequence[Row], *, over: bool = False) -> list[Symptom]:
    """Return the symptoms at the end of `rows`, the metrics of a run's RL steps. over: no more steps will come."""
    no_signal = _no_signal(rows, over) or _little_signal(rows)
    found = [no_signal or _no_reward(rows), _truncated(rows, over)]
    if no_signal is None:  # where nothing is learned, a flat reward is expected
        found.append(_flat_reward(rows, over))
    found.append(_over_budget(rows))
    return [symptom for symptom in found if symptom is not None]


def silent(silence: Silence, config: Config) -> Symptom:
    """Describe a drafter whose drafts are not accepted any more, with the likely cause."""
    path = weights_path(silence.drafter, config.rollout.speculation)
    what = f"{silence.drafter}{f' ({path})' if path else ''}"
    if silence.kind == "fallen":
        message = f"drafts of {what} are accepted {silence.share:.2f} times as often as at first"
        moved = "the model has moved away from the one that it was trained for, and nothing trains it: "
        again = "set drafter.train=true, or fit it again with paceline warmup-drafter"
        if CATALOGUE[silence.drafter].foreign:
            again = f"train it again elsewhere, or unset rollout.speculation.{silence.drafter}.path"
        remedy = moved + again
        return Symptom("drafter_silent", message, remedy)
    message = f"not one of {silence.drafted} tokens drafted by {what} was right, so it only costs time"
    if path is None or path.partition(":")[0] == FRESH_WEIGHTS:
        remedy = "its weights began random: fit it (drafter.offline, paceline warmup-drafter) or leave it out"
    else:
        remedy = (
            "likely a head of another model or another version of it, or one whose layers "
            "(eagle_aux_hidden_state_layer_ids) or vocabulary (d2t) are not those it was trained with: give the right "
            f"one, fit one with paceline warmup-drafter, or unset rollout.speculation.{silence.drafter}.path"
        )
    return Symptom("drafter_silent", message, remedy)


def _no_reward(rows: Sequence[Row]) -> Symptom | None:
    """No response has had any reward since the run began."""
    if not all(row.get("reward/mean") == 0 == row.get("reward/std") for row in rows):
        return None
    if math.fsum(_number(row, "groups/total") - _number(row, "groups/ungraded") for row in rows) < FIRST_GROUPS:
        return None
    steps = "RL step 1" if len(rows) == 1 else f"RL steps 1 to {len(rows)}"
    cut = 100 * _mean(rows, "rollouts/truncated_share")
    return Symptom(
        NO_REWARD,
        f"all rewards of {steps} are 0, so nothing can be learned",
        "try in this order: "
        + (f"raise rollout.sampling.max_new_tokens ({cut:.0f} % of responses were cut), " if cut >= 50 else "")
        + "lower rollout.sampling.temperature (small models babble at 1.0), say the form of an answer in "
        "data.system_prompt, let the reward read answers in free text (reward.terms: fallback: last_number, "
        "or auto), take easier prompts",
    )


def _no_signal(rows: Sequence[Row], over: bool) -> Symptom | None:
    """No group of the last steps had two different rewards, so nothing could be learned."""
    recent = _trailing(rows, [row.get("groups/varied") == 0 for row in rows])
    groups = round(sum(_number(row, "groups/total") - _number(row, "groups/ungraded") for row in recent))
    whole = over and len(recent) == len(rows)
    if groups == 0 or (not whole and (len(recent) < PATIENCE_STEPS or groups < MIN_GROUPS)):
        return None
    rewards = [_number(row, "reward/mean") for row in recent if _is_number(row.get("reward/mean"))]
    message = f"nothing can be learned from {_steps(recent)}: in each of {groups} groups all rewards were equal"
    if len(set(rewards)) > 1 or any(_number(row, "reward/std") > 0 for row in recent):
        return Symptom(
            "no_signal",
            message,
            "responses to one prompt do not differ: raise rollout.sampling.temperature, or let the reward depend on "
            "the response in finer steps",
        )
    value = f"{rewards[0]:g}" if rewards else "the same"
    if (share := _mean(recent, "rollouts/truncated_share")) >= 0.5:
        remedy = (
            f"{100 * share:.0f} % of responses were cut before they could end: raise rollout.sampling.max_new_tokens, "
            "or begin with a model that knows the format (warmup)"
        )
    elif (share := _mean(recent, "turns/limited_share")) >= 0.5:
        remedy = (
            f"{100 * share:.0f} % of episodes ended at environment.max_turns, before the environment ended them: raise "
            "it, let environment's `step` give rewards on the way, or begin with a model that knows the game (warmup)"
        )
    else:
        remedy = (
            f"{_LOOK}: they never have the format that reward.terms requires, or the reward function or "
            f"data.answer_field is wrong (if {value} is the best reward, the task is solved)"
        )
    return Symptom("no_signal", f"{message} ({value})", remedy)


def _little_signal(rows: Sequence[Row]) -> Symptom | None:
    """Few groups of the last steps had two different rewards: the task is solved, or too hard, or the policy has
    collapsed onto few responses."""
    recent = rows[-FEW_STEPS:]
    groups = math.fsum(_number(row, "groups/total") - _number(row, "groups/ungraded") for row in recent)
    varied = math.fsum(_number(row, "groups/varied") for row in recent)
    if len(recent) < FEW_STEPS or groups < MIN_GROUPS or varied > FEW * groups:
        return None
    message = f"{100 * (1 - varied / groups):.0f} % of groups had equal rewards in {_steps(recent)}"
    rewards = [_number(row, "reward/mean") for row in recent if _is_number(row.get("reward/mean"))]
    if rewards:
        message += f" (mean reward {math.fsum(rewards) / len(rewards):.3g})"
    remedy = "most prompts are always or never solved: set rollout.skip.target, or take harder or easier prompts"
    before, now = (_entropy(part) for part in (rows[:PATIENCE_STEPS], recent))
    if before and now is not None and now <= FEW * before:
        message += f"; entropy fell to {100 * now / before:.0f} % of its start"
        remedy += ". If the held-out reward stands still, the policy has collapsed: a smaller learner.optimizer.lr"
    return Symptom("little_signal", message, remedy)


def _entropy(rows: Sequence[Row]) -> float | None:
    """Return the mean over the steps that trained; None if none did."""
    found = [_number(row, "entropy") for row in rows if _is_number(row.get("entropy"))]
    return math.fsum(found) / len(found) if found else None


def _truncated(rows: Sequence[Row], over: bool) -> Symptom | None:
    """Nearly all responses of the last steps reached the length limit."""
    recent = _trailing(rows, [_number(row, "rollouts/truncated_share") >= MOSTLY for row in rows])
    cut = sum(_number(row, "rollouts/truncated") for row in recent)
    whole = over and len(recent) == len(rows)
    if not recent or (not whole and (len(recent) < PATIENCE_STEPS or cut < MOSTLY * MIN_RESPONSES)):
        return None
    share = 100 * _mean(recent, "rollouts/truncated_share")
    return Symptom(
        "truncated",
        f"{share:.0f} % of the responses of {_steps(recent)} were cut at the length limit",
        "raise rollout.sampling.max_new_tokens; if that does not help, the model never samples a stop token: "
        "check rollout.sampling.stop_token_ids and data.template",
    )


def _flat_reward(rows: Sequence[Row], over: bool) -> Symptom | None:
    """The reward's trend over the whole run does not exceed its noise."""
    rewards = [_number(row, "reward/mean") for row in rows if _is_number(row.get("reward/mean"))]
    looked_at = len(rewards) / TREND_STEPS
    if looked_at < 1 or not (over or math.log2(looked_at).is_integer()):
        return None
    rise, error = trend(rewards)
    if rise > TREND_ERRORS * error:
        return None
    rates = [_number(row, "lr") for row in rows if _is_number(row.get("lr"))]
    if rates and max(rates) == 0:
        remedy = "the learning rate was 0 throughout: check learner.optimizer.lr, warmup_steps and schedule"
    else:
        rate = f" (now {rates[-1]:.1e})" if rates else ""
        remedy = (
            f"raise learner.optimizer.lr{rate}, or rollout.prompts_per_step for less noise; {_LOOK}: does the reward "
            "tell good ones from bad?"
        )
    return Symptom(
        "flat_reward", f"the reward does not rise in {len(rewards)} RL steps: {rise:+.3f} +- {error:.3f}", remedy
    )


def _over_budget(rows: Sequence[Row]) -> Symptom | None:
    """What every prompt gets at least costs more than the budget, by more than whole responses can be off."""
    recent = _trailing(rows, [_exceeds_budget(row) for row in rows])
    if len(recent) < BUDGET_STEPS:
        return None
    times = _mean(recent, "budget/planned_tokens") / _mean(recent, "budget/tokens")
    return Symptom(
        "budget_exceeded",
        f"in {_steps(recent)} rollout.budget.min_rollouts alone took {times:.2f} times the token budget",
        "raise rollout.budget.share or tokens_per_step, whichever is written, or lower rollout.budget.min_rollouts",
    )


def _exceeds_budget(row: Row) -> bool:
    planned, tokens = _number(row, "budget/planned_tokens"), _number(row, "budget/tokens")
    responses = _number(row, "budget/rollouts_mean") * _number(row, "groups/total")
    all_equal = row.get("budget/rollouts_min") == row.get("budget/rollouts_max")
    return all_equal and tokens > 0 and responses > 0 and planned - tokens > 0.5 * planned / responses


def trend(values: Sequence[float]) -> tuple[float, float]:
    """Return the rise of the least-squares line from the first value to the last, and its standard error. Needs at
    least 3 values."""
    n = len(values)
    middle, mean = (n - 1) / 2, math.fsum(values) / n
    spread = math.fsum((i - middle) ** 2 for i in range(n))
    slope = math.fsum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread
    residual = math.fsum((value - mean - slope * (i - middle)) ** 2 for i, value in enumerate(values))
    return slope * (n - 1), math.sqrt(residual / (n - 2) / spread) * (n - 1)


def _trailing(rows: Sequence[Row], held: Sequence[bool]) -> list[Row]:
    """The last rows that are `held`, without a gap."""
    count = len(list(takewhile(bool, reversed(held))))
    return list(rows[len(rows) - count :])


def _steps(rows: Sequence[Row]) -> str:
    return f"the last {len(rows)} RL steps" if len(rows) > 1 else "the last RL step"


def _mean(rows: Sequence[Row], name: str) -> float:
    return math.fsum(_number(row, name) for row in rows) / len(rows)


def _number(row: Row, name: str) -> float:
    value = row.get(name)
    return float(value) if _is_number(value) else 0.0


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
