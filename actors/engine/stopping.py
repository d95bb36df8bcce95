"""When a response ends, as a function of its tokens. Engines, requests with a prefix, and the driver share these rules,
so a response ends at the same token wherever it is sampled or continued. No torch, no state.

A response ends with the first token at which one of these holds; at the same token, the first in this order applies:

  STOP      it is a stop token, or it completes one of the rule's stop strings
  ANSWERED  the answer was found at least `grace_tokens` ago, counted from `poll_from_tokens` at the earliest
  LENGTH    it is the last token that fits
  GIVEN_UP  it is number `give_up_at_tokens`, the answer is not complete, and the random draw decides so
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from contracts.rollout import FinishReason, Marker, Request, StopRule
from models.philox import KEEP, uniform

_ORDER = (FinishReason.STOP, FinishReason.ANSWERED, FinishReason.LENGTH, FinishReason.GIVEN_UP)
NOWHERE = 1 << 62  # later than any token


@dataclass(frozen=True, slots=True)
class End:
    """A response of `tokens` tokens, the last one included."""

    tokens: int
    reason: FinishReason
    propensity: float = 1.0  # see Rollout


@dataclass(frozen=True, slots=True)
class Found:
    """Number of tokens that completed each marker of a rule; NOWHERE: not complete."""

    strings: int = NOWHERE
    answer: int = NOWHERE


def find_end(request: Request, tokens: NDArray[np.int32], max_tokens: int) -> End | None:
    """Return how a response that starts with `tokens` ended within them; None if it did not. `max_tokens`: limit of the
    response, at most sampling.max_new_tokens."""
    stops = np.flatnonzero(np.isin(tokens, request.sampling.stop_token_ids))
    natural = End(int(stops[0]) + 1, FinishReason.STOP) if len(stops) else None
    if len(tokens) >= max_tokens and (natural is None or natural.tokens > max_tokens):
        natural = End(max_tokens, FinishReason.LENGTH)
    rule = request.stop
    if rule is None:
        return natural
    found = Found(_complete(rule.strings, tokens), _complete(rule.answer, tokens))
    return end_by_rule(rule, request.noise_key, found, len(tokens), natural)


def end_by_rule(rule: StopRule, noise_key: int, found: Found, tokens: int, natural: End | None) -> End | None:
    """Return the first end within `tokens` tokens; `natural` is the end by a stop token or by length."""
    ends = [] if natural is None else [natural]
    if found.strings <= tokens:
        ends.append(End(found.strings, FinishReason.STOP))
    answered = max(found.answer, rule.poll_from_tokens) + rule.grace_tokens
    if answered <= tokens:
        ends.append(End(answered, FinishReason.ANSWERED))
    limit = rule.give_up_at_tokens
    doubted = limit is not None and limit < found.answer  # here the random draw decides
    if limit is not None and doubted and limit <= tokens and not kept(rule, noise_key):
        ends.append(End(limit, FinishReason.GIVEN_UP))
    if not ends:
        return None
    end = min(ends, key=lambda end: (end.tokens, _ORDER.index(end.reason)))
    past = limit is not None and doubted and (end.tokens > limit or end.reason is FinishReason.GIVEN_UP)
    return End(end.tokens, end.reason, rule.keep) if past else end


def kept(rule: StopRule, noise_key: int) -> bool:
    """Return the request's random decision to continue. Its stream is independent of tokens and of all other draws."""
    return _coin(noise_key) < rule.keep


@lru_cache(maxsize=1024)
def _coin(noise_key: int) -> float:
    """Cached: it is called two or three times in a row, and costs as much as the rest of a response's rule."""
    return uniform(noise_key, KEEP)


def rows_of(marker: Marker, vocab_size: int) -> NDArray[np.int32]:
    """Return [vocab_size]: each token's row of `table_of`."""
    rows = np.full(vocab_size, len(marker.moves), np.int32)
    rows[marker.tokens] = marker.kinds
    return rows


def table_of(marker: Marker) -> NDArray[np.uint16]:
    """Return [K + 1, S]: the state after a token of each kind."""
    return np.concatenate((marker.moves, marker.rest[None]))


def run(marker: Marker, tokens: NDArray[np.int32], state: int = 0) -> tuple[int, int]:
    """Return (state after `tokens`, number of tokens that completed the marker or NOWHERE)."""
    last = len(marker.rest) - 1
    places = np.searchsorted(marker.tokens, tokens)
    known = places < len(marker.tokens)
    known[known] = marker.tokens[places[known]] == tokens[known]
    rows = np.full(len(tokens), len(marker.moves), np.int64)
    rows[known] = marker.kinds[places[known]]
    moves = table_of(marker)
    for count, row in enumerate(rows.tolist(), start=1):
        if (state := int(moves[row, state])) == last:
            return last, count
    return state, NOWHERE


def _complete(marker: Marker | None, tokens: NDArray[np.int32]) -> int:
    return NOWHERE if marker is None else run(marker, tokens)[1]
