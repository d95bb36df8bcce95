"""Lanes of a reward: which terms are called together, with how many responses, and where.

Terms that compute on one response at a time share a lane, and so one trip to a worker. A term that takes several
responses, waits for others or has its own actor is a lane by itself. Owns that division; calls nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from actors.processes.modules import looked_in
from actors.rewards.calling import Traits
from actors.rewards.child import ChildTimeoutError, DeadlineChild
from config.rewards import RewardOptions, RewardTerm
from contracts.rewards import GradingError, RewardConfigError

_IMPORT_S = 120.0
_PLAIN = Traits((), False, False)
BACKOFF_S = 0.5  # before a judge's first retry; doubles with each further one
MOST_BACKOFF_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Terms that are called together."""

    terms: tuple[int, ...]  # positions in reward.terms
    size: int | None = 1  # responses per call; None: all of a prompt
    in_flight: int = 1  # concurrent calls per worker
    hosted: bool = False  # in its own actor, not in a reward worker
    tokens: bool = False  # it reads a response's token ids
    call_s: float = 0.0  # longest answer time for one response, without starts and grace
    each_s: float = 0.0  # added by each further response of the call

    def limit_s(self, responses: int) -> float:
        return self.call_s + self.each_s * (responses - 1)


def lanes_of(options: RewardOptions, traits: Mapping[int, Traits] | None = None) -> tuple[Lane, ...]:
    """Return the lanes in the order of their first terms. `traits`: of the python terms; default: read here.
    RewardConfigError names the key of a function that cannot be imported or called."""
    read = read_traits(options) if traits is None else traits
    shared: list[int] = []
    lanes: list[Lane] = []
    for index, term in enumerate(options.terms):
        if (lane := _own_lane(index, term, read.get(index, _PLAIN))) is None:
            shared.append(index)
        else:
            lanes.append(lane)
    if shared:
        tokens = any("tokens" in read.get(index, _PLAIN).asks for index in shared)
        seconds = sum(options.terms[index].timeout_s for index in shared)
        lanes.append(Lane(terms=tuple(shared), tokens=tokens, call_s=seconds))
    return tuple(sorted(lanes, key=attrgetter("terms")))


def _own_lane(index: int, term: RewardTerm, traits: Traits) -> Lane | None:
    """Return the term's own lane; None: it shares one."""
    if term.kind == "judge":
        waits_s = sum(backoff_s(attempt) for attempt in range(term.retries))
        call_s = term.timeout_s * (term.retries + 1) + waits_s
        return Lane(terms=(index,), in_flight=term.concurrency, hosted=True, call_s=call_s)
    grouped, batched, hosted = "group" in traits.asks, term.batch_size is not None, is_hosted(term, traits)
    if not (grouped or batched or hosted):
        return None
    each_s = term.timeout_s if grouped and not batched else 0.0  # called for each response, one after another
    return Lane(
        terms=(index,),
        size=None if grouped else term.batch_size or 1,
        in_flight=term.concurrency if traits.awaited else 1,
        hosted=hosted,
        tokens=grouped or "tokens" in traits.asks,
        call_s=term.timeout_s + each_s,  # a child may run them twice: all together, then one by one
        each_s=2 * each_s,
    )


def is_hosted(term: RewardTerm, traits: Traits) -> bool:
    """Return whether a python term has its own actor: a class, an awaited function, or one that asks for a device."""
    return traits.made or traits.awaited or term.gpus > 0 or term.cpus > 0


def backoff_s(attempt: int) -> float:
    """Return the seconds before a judge's next request, after `attempt` retries."""
    return float(min(BACKOFF_S * 2**attempt, MOST_BACKOFF_S))


def read_traits(options: RewardOptions) -> dict[int, Traits]:
    """Read the traits of each python term, by its position. Raises RewardConfigError."""
    child = DeadlineChild("signature")
    try:
        return {i: traits_of(child, t, f"reward.terms[{i}]") for i, t in enumerate(options.terms) if t.kind == "python"}
    finally:
        child.close()


def described(term: RewardTerm) -> dict[str, Any]:
    """Return the arguments for UserFunction in a child or an actor."""
    return {"path": term.function, "arguments": term.arguments, "batched": term.batch_size is not None}


def traits_of(child: DeadlineChild, term: RewardTerm, key: str) -> Traits:
    """Read what a python term's function asks for, by a child of the kind "signature". Raises RewardConfigError."""
    if term.function is None or not re.fullmatch(r"[\w.]+:\w+", term.function):
        raise RewardConfigError(f"{key}.function must look like 'package.module:function', not {term.function!r}")
    try:
        said = child.call(described(term), timeout_s=_IMPORT_S)
    except (GradingError, ChildTimeoutError) as error:
        raise unusable(term, key, error) from error
    return Traits(**{**said, "asks": tuple(said["asks"])})


def unusable(term: RewardTerm, key: str, error: Exception) -> RewardConfigError:
    """Return the error of a function or class that cannot be imported, created or called."""
    trace = getattr(error, "trace", None)
    return RewardConfigError(
        f"{key}.function={term.function!r} cannot be used: {error}"
        + looked_in(str(error))
        + (f"\n{trace}" if trace else "")
    )
