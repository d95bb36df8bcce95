"""Faults of `rollout.abort` beside other keys: a response that ends early must keep its reward, and what is learned of
it must not read its length. Owns what an answer looks like by the reward's terms.
"""

from collections.abc import Iterator

from config.rewards import RewardTerm
from config.token_budget import AnswerMarker
from config.tree import Config
from launch.config.issues import Issue

KEY = "rollout.abort"
_OFF = f"{KEY}={{}}"  # enabled=false would leave the other keys of the section, which are then ignored
_MARKERS: dict[str, AnswerMarker] = {"math": "boxed", "code": "fence"}  # by the kind of a reward's term


def markers_of(config: Config) -> list[AnswerMarker]:
    """What the reward's terms read; a python term says nothing about it."""
    return sorted({_MARKERS[term.kind] for term in config.reward.terms if term.kind in _MARKERS})


def abort_issues(c: Config) -> Iterator[Issue]:
    """What would be ignored, where it is off; rewards and objectives that do not go with it, where it is on."""
    abort = c.rollout.abort
    if not abort.enabled:
        for name, field in type(abort).model_fields.items():
            if getattr(abort, name) != field.default:
                yield Issue(
                    f"{KEY}.{name}", f"is set, but {KEY} is off", remedy=f"set {KEY}.enabled=true, or all of {_OFF}"
                )
        return
    if abort.keep != "auto" and abort.min_keep != type(abort).model_fields["min_keep"].default:
        said = f"is only used with keep: auto, and {KEY}.keep={abort.keep:g}"
        yield Issue(f"{KEY}.min_keep", said, remedy="leave one of them out")
    for index, term in enumerate(c.reward.terms):
        yield from _term(f"reward.terms.{index}", term)
    read = markers_of(c)
    if len(read) > 1:
        yield Issue(
            "reward.terms",
            f"read answers of {len(read)} kinds ({' and '.join(read)}), and {KEY} ends responses by one",
            remedy=f"use terms of one kind, or set {_OFF}",
        )
    elif abort.marker is None:
        said = "is not written, and no term of the reward says what an answer looks like"
        yield Issue(f"{KEY}.marker", said, remedy="set it to boxed, fence or answer_tag, as the function reads answers")
    elif read and abort.marker != read[0]:
        said = f"{abort.marker}, but the reward reads {read[0]}: a response could end before its answer"
        yield Issue(f"{KEY}.marker", said, remedy="leave it out")
    if abort.poll_quantile >= abort.abort_quantile:
        said = f"{abort.poll_quantile:g} is not below abort_quantile = {abort.abort_quantile:g}"
        yield Issue(f"{KEY}.poll_quantile", said, remedy="lower it, or raise the other")
    if c.objective.overlong.buffer_tokens != 0:
        yield Issue(
            "objective.overlong.buffer_tokens",
            f"takes reward from long responses, whose lengths {KEY} cuts",
            remedy=f"set it to 0, or {_OFF}",
        )
    if c.objective.length_penalty > 0:
        yield Issue(
            "objective.length_penalty",
            f"compares lengths of whole responses, which {KEY} ends at different places",
            remedy=f"set it to 0, or {_OFF}",
        )
    if c.objective.mask_truncated:
        yield Issue(
            "objective.mask_truncated",
            f"leaves out responses by how they end, and {KEY} ends some that would have been cut off",
            remedy=f"set it to false, or {_OFF}",
        )


def _term(key: str, term: RewardTerm) -> Iterator[Issue]:
    """A term that needs more of a response than its answer."""
    if term.kind in ("format", "judge", "reasoning_gym"):
        said = f"{term.kind} reads the whole response, and {KEY} ends it behind the answer"
        yield Issue(f"{key}.kind", said, remedy=f"leave the term out, or set {_OFF}")
    elif term.kind == "python" and not term.prefix_sufficient:
        yield Issue(
            f"{key}.prefix_sufficient",
            f"false: the function may read the whole response, and {KEY} ends it behind the answer",
            remedy=f"set it to true if what follows the first complete answer never counts, or set {_OFF}",
        )
    elif term.kind == "math" and term.fallback != "none":
        said = f"{term.fallback} reads the end of a response without a box, and {KEY} gives such responses up"
        yield Issue(f"{key}.fallback", said, remedy=f"set it to none, or {_OFF}")
    if term.kind in _MARKERS and term.answer == "last":
        said = f"last, but {KEY} ends responses behind their first answer: what is last could change by that"
        yield Issue(f"{key}.answer", said, remedy=f"leave it out (first), or set {_OFF}")
