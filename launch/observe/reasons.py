"""Reasons for engine steps' choice of decoding: from windows to numbers and a sentence for people. Pure.

The reasons are defined by the policies (`policies.speculation.policy.Reason`). Records of other releases may hold
others.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from contracts.rollout import ReasonUse
from policies.speculation.policy import Reason

_DRAFTED = frozenset({Reason.PAYS_MOST, Reason.TRIAL, Reason.FIXED})  # reasons to speculate
_IN_WORDS: Mapping[str, str] = {
    Reason.PLAIN_IS_FASTER: "plain decoding was faster",
    Reason.TOO_MANY: "more requests ran than rollout.speculation.max_running",
    Reason.NO_DRAFTER: "no drafter was at hand",
    Reason.RESTS: "drafts had saved less than choosing them takes",
    Reason.UNMEASURED: "what steps cost or drafts bring was not known yet",
}
SHOWN_SHARE = 0.05  # of the steps: a smaller share does not explain "why was it off"


Reasons = Mapping[str, ReasonUse]


def reasons_of(record: Mapping[str, Any]) -> dict[str, ReasonUse]:
    """Return the reasons of one record of speculation.jsonl; {} if there are none."""
    found: dict[str, ReasonUse] = {}
    given = record.get("reasons")
    for name, values in (given if isinstance(given, dict) else {}).items():
        try:
            steps, judged, advantage = values
            found[str(name)] = ReasonUse(str(name), int(steps), int(judged), float(advantage))
        except (TypeError, ValueError):
            continue
    return found


def reasons_over_run(records: Iterable[Mapping[str, Any]]) -> dict[str, ReasonUse]:
    """Sum the reasons over records of speculation.jsonl."""
    total: dict[str, ReasonUse] = {}
    for record in records:
        for name, totals in reasons_of(record).items():
            total.setdefault(name, ReasonUse(name)).add(totals)
    return total


def shares(reasons: Reasons) -> dict[str, float]:
    """Return the share of each reason in the engine steps that a policy chose for; the largest first."""
    steps = sum(totals.engine_steps for totals in reasons.values())
    most = sorted(reasons.items(), key=lambda item: (-item[1].engine_steps, item[0]))
    return {name: totals.engine_steps / steps for name, totals in most} if steps else {}


def metrics(reasons: Reasons) -> dict[str, float]:
    """Return shares of the engine steps: `speculation/reason/plain_is_faster` and similar."""
    return {f"speculation/reason/{slug(name)}": share for name, share in shares(reasons).items()}


def slug(reason: str) -> str:
    """Return the reason's name in metrics."""
    return reason.replace(" ", "_")


def off_share(reasons: Reasons) -> float:
    """Return the share of engine steps for which plain decoding was chosen."""
    return sum(share for name, share in shares(reasons).items() if name not in _DRAFTED)


def off_text(reasons: Reasons) -> str:
    """Return `off in 62 % of steps: plain decoding was faster 45 % (drafts predicted at 0.93x), ...`; empty if never
    off."""
    off = {name: share for name, share in shares(reasons).items() if name not in _DRAFTED}
    whole = sum(off.values())
    if not whole:
        return ""
    parts = []
    for name, share in off.items():
        if share >= min(SHOWN_SHARE, max(off.values())):
            speed = reasons[name].mean_advantage
            predicted = f" (drafts predicted at {speed:.2f}x of it)" if speed is not None else ""
            parts.append(f"{_IN_WORDS.get(name, name)}{predicted} {100 * share:.0f} %")
    return f"off in {100 * whole:.0f} % of steps: {', '.join(parts)}"
