"""Expected response length, by problem and by tokens so far: the length prediction of DAS 4.2.3.

Owns the statistics and their file. Never decides what is drafted, reads no clock. Problems are identified by a hash of
their prompt, so that every worker's rollouts count. A problem's *initial class* is the most frequent class of its
recent rollouts. For every initial class a histogram over log-length counts how many responses reached a bin and how
many ended there. It gives the whole distribution of the rest, P(length | length so far, initial class). The paper uses
its most likely class. Responses that were aborted or truncated count as far as they came.
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
_RECENT = 16  # rollouts of a problem that determine its class
_PROBLEMS = 1 << 16  # kept, the least recently used dropped first: about 300 bytes each
_WAITING = 1 << 14  # pending ends; further ones are entered at once
_HALF_LIFE = 4096.0  # rollouts after which one has half the weight: lengths change with the policy
_POOL = 8.0  # responses that the pool's hazard counts for
_HAZARD = 0.2  # chance to end within a bin that no response has reached


class LengthClass(IntEnum):
    """Thirds of all recent responses by length; a problem without history has no class."""

    SHORT, MEDIUM, LONG, UNKNOWN = range(4)


def problem_key(prompt_tokens: NDArray[np.int32]) -> int:
    """Return the problem's key, the same in every process, and in every run on these prompts."""
    return int.from_bytes(blake2b(prompt_tokens.tobytes(), digest_size=6).digest(), "little")


class LengthStatistics:
    """Statistics of response lengths. Ends are entered when the target gets new weights: within a round short responses
    end first, and would make a problem look short."""

    def __init__(self) -> None:
        self._recent: OrderedDict[int, list[int]] = OrderedDict()  # by problem: bins of its last lengths
        self._reached, self._ended = np.zeros((4, _BINS)), np.zeros((4, _BINS))
        self._waiting: list[tuple[int, int, int, int, bool, bool]] = []
        self._hazards: FloatArray | None = None
        self._bounds = (0, 0)

    def __len__(self) -> int:
        """Return the number of problems with a history."""
        return len(self._recent)

    @property
    def known(self) -> bool:
        """Whether any response has ended."""
        return bool(self._ended.any())

    def class_of(self, key: int) -> LengthClass:
        """Return the most frequent class of the problem's recent rollouts; the longer one of a tie."""
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
        """Add a response of the problem with `tokens` tokens. `initial`: the problem's class when it began. `entered`:
        tokens already counted. Not `finished`: aborted or preempted, so without evidence for the problem's class. Not
        `ended`: it did not end by itself either."""
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
        """Return [S, R] remaining tokens of responses of these initial classes with `drawn` tokens, at the quantiles
        `shares` [S, R] of the rest; at most `room`, at least 1."""
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
        kept = deepcopy(self)  # saves pending ends too, which stay pending here
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
        """Restore what `save` wrote. If it is missing or damaged, the state stays as it is, with a warning."""
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
