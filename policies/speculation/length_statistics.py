"""How long responses get, by problem and by what they have already: the length prediction of DAS 4.2.3.

Owns the statistics and their file; never decides what is drafted, reads no clock. Problems are known by a hash of their
prompt, so that every worker's rollouts count. A problem's *initial class* is the one most of its recent rollouts fell
into; for every initial class there is a histogram over log-length of how many responses came so far and how many ended
there. It gives the whole distribution of what is left, P(length | length so far, initial class), of which the paper
takes the most likely class; responses that were aborted or cut off at their limit count as far as they came.
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from enum import IntEnum
from hashlib import blake2b
from math import log2
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_log = logging.getLogger(__name__)
_FILE, _FORMAT = "lengths.json", 1
_PER_OCTAVE = 4
_BINS = 21 * _PER_OCTAVE  # up to two million tokens
_RECENT = 16  # rollouts of a problem that vote for its class
_PROBLEMS = 1 << 16  # kept, oldest use first to leave: about 300 bytes each
_WAITING = 1 << 14  # ends that wait for the next weights; then they count at once
_HALF_LIFE = 4096.0  # rollouts after which one counts half: lengths move with the policy
_POOL = 8.0  # the pool's hazard counts as so many responses of the class itself
_HAZARD = 0.2  # chance to end within a bin where no response has been


class LengthClass(IntEnum):
    """Thirds of all recent responses by length; a problem without history has no class."""

    SHORT, MEDIUM, LONG, UNKNOWN = range(4)


def problem_key(prompt_tokens: NDArray[np.int32]) -> int:
    """The same in every process, and in every run on these prompts."""
    return int.from_bytes(blake2b(prompt_tokens.tobytes(), digest_size=6).digest(), "little")


class LengthStatistics:
    """Ends are entered when the target gets new weights: within a round the short responses end first, and a problem
    judged by them alone would look short."""

    def __init__(self) -> None:
        self._recent: OrderedDict[int, list[int]] = OrderedDict()  # by problem: bins of its last lengths
        self._reached, self._ended = np.zeros((4, _BINS)), np.zeros((4, _BINS))
        self._waiting: list[tuple[int, int, int, int, bool, bool]] = []
        self._hazards: FloatArray | None = None
        self._bounds = (0, 0)

    def __len__(self) -> int:
        """Problems with a history."""
        return len(self._recent)

    @property
    def known(self) -> bool:
        """Any response has ended."""
        return bool(self._ended.any())

    def class_of(self, key: int) -> LengthClass:
        """Most of the problem's recent rollouts; the longer one of two that are as many."""
        recent = self._recent.get(key)
        if not recent:
            return LengthClass.UNKNOWN
        self._recent.move_to_end(key)
        low, high = self._bounds
        votes = [0, 0, 0]
        for place in recent:
            votes[(place > low) + (place > high)] += 1
        return LengthClass(max(range(3), key=lambda number: (votes[number], number)))

    def add(
        self, key: int, initial: LengthClass, tokens: int, *, entered: int = 0, finished: bool = True, ended: bool
    ) -> None:
        """A response of the problem, which was of class `initial` when it began, has so many tokens; the first
        `entered` of them were counted before. Not `finished`: it was aborted or preempted, and says nothing of its
        problem's class. Not `ended`: nor did it end by itself."""
        if tokens < 1:
            return
        self._waiting.append((key, initial, entered, tokens, finished, finished and ended))
        if len(self._waiting) >= _WAITING:
            self.settle()

    def settle(self) -> None:
        """Enter what has been added. Called when the target gets new weights."""
        if not self._waiting:
            return
        fade = 0.5 ** (len(self._waiting) / _HALF_LIFE)
        self._reached *= fade
        self._ended *= fade
        for key, initial, entered, tokens, finished, ended in self._waiting:
            place = _place(tokens)
            self._reached[initial, _place(entered) : place + ended] += 1
            if ended:
                self._ended[initial, place] += 1
            if finished:
                recent = self._recent.setdefault(key, [])
                recent.append(place)
                del recent[:-_RECENT]
                self._recent.move_to_end(key)
        while len(self._recent) > _PROBLEMS:
            self._recent.popitem(last=False)
        self._waiting.clear()
        self._refit()

    def _refit(self) -> None:
        pool_reached, pool_ended = self._reached.sum(0), self._ended.sum(0)
        pool = np.where(pool_reached > 0, pool_ended / np.maximum(pool_reached, 1e-9), _HAZARD)
        hazard = (self._ended + _POOL * pool) / (self._reached + _POOL)
        hazard[LengthClass.UNKNOWN] = np.where(pool_reached > 0, hazard[LengthClass.UNKNOWN], pool)
        steps = -np.log1p(-np.clip(hazard, 1e-6, 1 - 1e-6))
        self._hazards = np.concatenate([np.zeros((4, 1)), steps.cumsum(1)], axis=1)
        shares = pool_ended.cumsum() / max(pool_ended.sum(), 1e-9)
        self._bounds = (int(np.searchsorted(shares, 1 / 3)), int(np.searchsorted(shares, 2 / 3)))

    def remaining(self, classes: Int64Array, drawn: Int64Array, room: Int64Array, shares: FloatArray) -> FloatArray:
        """[S, R] tokens that responses of these initial classes, with `drawn` tokens, still get, at the quantiles
        `shares` [S, R] of what is left; at most `room`, at least 1."""
        assert self._hazards is not None, "asked before anything ended"
        left = np.empty_like(shares)
        start = _PER_OCTAVE * np.log2(np.maximum(drawn, 1))
        target = -np.log1p(-shares)
        places = np.arange(_BINS + 1, dtype=np.float64)
        for number in range(4):
            mine = np.flatnonzero(classes == number)
            if not len(mine):
                continue
            hazards = self._hazards[number]
            ends = np.interp(target[:, mine] + np.interp(start[mine], places, hazards), hazards, places)
            left[:, mine] = np.exp2(ends / _PER_OCTAVE)
        return np.clip(left - drawn, 1, np.maximum(room, 1))

    def save(self, directory: str) -> None:
        """Write the statistics to `directory`, atomically. Raises OSError."""
        kept = deepcopy(self)  # what waits for the round's end is saved, and goes on waiting here
        kept.settle()
        path = Path(directory) / _FILE
        document = {
            "format": _FORMAT,
            "per_octave": _PER_OCTAVE,
            "reached": np.round(kept._reached, 3).tolist(),
            "ended": np.round(kept._ended, 3).tolist(),
            "problems": [[key, *recent] for key, recent in kept._recent.items()],
        }
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
        partial.replace(path)

    def load(self, directory: str) -> None:
        """Restore what `save` wrote. What is missing or damaged leaves them as they are, with a warning."""
        path = Path(directory) / _FILE
        try:
            self._restore(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            _log.warning("no length statistics in %s: draft budgets begin without them", directory)
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.warning("draft budgets go on without the length statistics %s: %s", path, error)

    def _restore(self, document: dict[str, object]) -> None:
        if (document["format"], document["per_octave"]) != (_FORMAT, _PER_OCTAVE):
            raise ValueError(f"format {document['format']} is not {_FORMAT}")
        reached, ended = (_counts(document[name]) for name in ("reached", "ended"))
        problems = document["problems"]
        if not isinstance(problems, list):
            raise ValueError("problems are not a list")
        recent = OrderedDict((int(key), _places(places)) for key, *places in problems[-_PROBLEMS:])
        self._reached, self._ended, self._recent = reached, ended, recent
        self._refit()


def _place(tokens: int) -> int:
    return min(int(_PER_OCTAVE * log2(max(tokens, 1))), _BINS - 1)


def _counts(value: object) -> FloatArray:
    counts = np.array(value, np.float64)
    if counts.shape != (4, _BINS) or not np.isfinite(counts).all() or (counts < 0).any():
        raise ValueError(f"counts are {list(counts.shape)}, not finite [4, {_BINS}]")
    return counts


def _places(values: Iterable[object]) -> list[int]:
    places = [int(str(value)) for value in values][-_RECENT:]
    if any(not 0 <= place < _BINS for place in places):
        raise ValueError(f"a length lies outside of {_BINS} bins")
    return places
