"""Compare several runs: the gain of each technique of a scenario, and sizes. Owns which scenarios are compared."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml

from config.catalogue import TRAINED
from launch.config.issues import ConfigError, Issue
from planner.simulate.costs import costs_of
from planner.simulate.memory import check_learner, kv_tokens_of
from planner.simulate.outcome import Outcome
from planner.simulate.progress import ProgressLine
from planner.simulate.run import simulate
from planner.simulate.scenario import Scenario, with_values

TRAINING = "drafter training"
# The keys that turn each technique off.
_OFF: dict[str, dict[str, Any]] = {
    "speculation": {"speculation.mode": "off"},
    # Untrained for long: at its floor.
    TRAINING: {"speculation.training.enabled": False, "speculation.training.stale": 1.0},
    "token budget": {"budget.share": None, "budget.tokens_per_step": None},
    "abort": {"abort.enabled": False},
    "elastic fleet": {"fleet.min_workers": None},
    "lookahead": {"lookahead.enabled": False},
    "quantised rollouts": {"quantization": "none"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """The gain of one technique in this scenario: the factor by which an RL step is longer without it, and shorter with
    it alone than with none. Drafter training counts alone with speculation, compared with speculation alone."""

    name: str
    without: Outcome
    alone: Outcome
    last: float  # step without it / step with all
    first: float  # step with none / step with it alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    whole: Outcome  # as given
    none: Outcome
    techniques: tuple[Technique, ...]
    fresh: Outcome | None  # all, with a drafter that never ages; None: no drafter is or could be trained

    @property
    def limits(self) -> dict[str, float]:
        """The share of a step that would be saved if this cost nothing: `headroom`, and a drafter that never ages."""
        if self.fresh is None:
            return self.whole.headroom
        return self.whole.headroom | {"the drafter's age": 1 - self.fresh.step_s / self.whole.step_s}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def techniques_of(scenario: Scenario) -> list[str]:
    """Return the techniques that are on."""
    on = {
        "speculation": scenario.speculation.mode != "off",
        TRAINING: scenario.speculation.training.enabled and scenario.speculation.mode != "off",
        "token budget": scenario.budget.on,
        "abort": scenario.abort.enabled,
        "elastic fleet": scenario.fleet.min_workers is not None,
        "lookahead": scenario.lookahead.enabled,
        "quantised rollouts": scenario.quantization != "none",
    }
    return [name for name in _OFF if on[name]]


def ablation(scenario: Scenario, line: ProgressLine | None = None) -> Ablation:
    """Simulate the scenario without each of its techniques in turn. Raises as `simulate`."""
    names = techniques_of(scenario)

    def run(on: Sequence[str], what: str) -> Outcome:
        if line is not None:
            line.say(what)
        off: dict[str, Any] = {}
        for name in names:
            if name not in on:
                off |= _OFF[name]
        return simulate(with_values(scenario, off) if off else scenario)

    whole, none = run(names, "all"), run((), "none")
    found = []
    speculating = none  # and nothing else
    for name in names:
        without = run([other for other in names if other != name], f"all but {name}")
        # Training an unused drafter has no effect, so alone it comes with speculation.
        alone = run(["speculation", name] if name == TRAINING else [name], f"{name} alone")
        found.append(
            Technique(
                name=name,
                without=without,
                alone=alone,
                last=without.step_s / whole.step_s,
                first=(speculating if name == TRAINING else none).step_s / alone.step_s,
            )
        )
        if name == "speculation":
            speculating = alone
    fresh = None
    if "speculation" in names and any(arm.drafter == TRAINED for arm in scenario.speculation.arms):
        if line is not None:
            line.say("a drafter that never ages")
        ageless = {"speculation.training.drift": 0.0, "speculation.training.stale": 0.0}
        fresh = simulate(with_values(scenario, ageless))
    return Ablation(whole=whole, none=none, techniques=tuple(found), fresh=fresh)


_SHORT = {
    "nodes": "fleet.nodes",
    "gpus_per_node": "fleet.gpus_per_node",
    "prompts": "workload.prompts_per_step",
    "steps": "workload.steps",
}


def sweep_values(text: str) -> tuple[str, list[str]]:
    """Parse `nodes=1,2,4`, or any dotted key. Raises ConfigError."""
    key, equals, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    try:
        found = _filled(found)
    except ValueError:
        found = []
    if not equals or not found:
        remedy = "write nodes=1,2,4,...,64 or KEY=VALUE,VALUE"
        raise ConfigError([Issue("--sweep", f"{text!r} is no sweep", remedy=remedy)])
    return _SHORT.get(key.strip(), key.strip()), found


def _filled(values: list[str]) -> list[str]:
    """Expand `1,2,4,...,64` by the initial factor or step. Raises ValueError."""
    if "..." not in values:
        return values
    place = values.index("...")
    before, after = [int(value) for value in values[:place]], [int(value) for value in values[place + 1 :]]
    if len(before) < 2 or len(after) != 1 or not 0 < before[-2] < before[-1] < after[0]:
        raise ValueError
    first, second = before[-2:]
    if second % first and len(before) < 3:
        raise ValueError
    grows = second % first == 0 and (len(before) < 3 or before[-3] * (second // first) == first)
    while before[-1] < after[0]:
        before.append(before[-1] * (second // first) if grows else before[-1] + second - first)
    if before[-1] != after[0]:
        raise ValueError
    return [str(value) for value in before]


def weak(scenario: Scenario, nodes: int) -> Scenario:
    """Return the scenario on `nodes` nodes, with the same prompts per node, and learner nodes in proportion."""
    before = scenario.fleet.nodes
    scale = nodes / before
    prompts = max(round(scenario.workload.prompts_per_step * scale), 1)
    values = {
        "fleet.nodes": nodes,
        "workload.prompts_per_step": prompts,
        "workload.pool": max(scenario.workload.pool, 2 * prompts),
    }
    if scenario.fleet.layout == "disaggregated":
        values["fleet.learner_nodes"] = max(round(scenario.fleet.learner_nodes * scale), 1)
    if scenario.learning.ranks is not None:
        values["learning.ranks"] = max(round(scenario.learning.ranks * scale), 1)
    return with_values(scenario, values)


def sized(scenario: Scenario, key: str, values: Sequence[str], *, scaled: bool) -> list[tuple[str, Scenario]]:
    """Return (value, scenario) of a sweep, all validated. `scaled`: work grows with the nodes. Raises ConfigError,
    which names the wrong value."""
    if scaled and key != "fleet.nodes":
        raise ConfigError([Issue("--weak", f"work grows with the nodes, and this sweep is of {key}")])
    found = []
    for value in values:
        try:
            if not scaled:
                one = with_values(scenario, {key: yaml.safe_load(value)})
            elif value.isdecimal() and int(value):
                one = weak(scenario, int(value))
            else:
                raise ConfigError([Issue(key, f"{value!r} is no number of nodes")])
            costs_of(one)
            kv_tokens_of(one)
            check_learner(one)
        except (ConfigError, yaml.YAMLError) as error:
            raise ConfigError([Issue("--sweep", f"{key}={value}: {error}")]) from None
        found.append((value, one))
    return found
