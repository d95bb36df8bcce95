"""The online data buffer: the target's outputs over recent sequences, kept across RL steps (TLT 4.2).

Owns which sequences are kept and which are drawn. Pure: no clock, no torch, no processes. Deterministic: the same calls
give the same results.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from config.drafter import BufferOptions
from contracts.records import SequenceRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """The contents of the buffer, and counts of what was drawn and dropped."""

    sequences: int
    bytes: int
    max_bytes: int
    versions: dict[int, int]  # sequences by version of the target
    oldest_age: int  # RL steps
    length_p50: float  # tokens, prompt and response; 0 if empty
    length_p90: float
    draws: int
    drawn: int  # sequences handed out
    drawn_tokens: int
    drawn_long_tokens: int  # of them, from long sequences of the previous RL step
    never_drawn: int  # kept sequences that were not drawn yet
    added: int
    evicted: int  # because of the byte limit
    expired: int  # too old
    refused: int  # no rows, or larger than the whole buffer


@dataclass(slots=True, eq=False)
class _Kept:
    record: SequenceRecord
    number: int  # order of arrival
    order: float  # uniform in [0, 1)
    drawn: int = 0

    @property
    def version(self) -> int:
        return self.record.target_version


class DataBuffer:
    """A buffer of at most `options.max_bytes`, with sequences at most `options.max_age_steps` RL steps old.

    Above the limit the oldest version loses sequences first; a newer one is never dropped for an older one. In past RL
    steps the shortest go first, since the next step draws their long ones. In the newest, chance decides.
    """

    def __init__(self, options: BufferOptions, seed: int = 0) -> None:
        self._options, self._seed = options, seed
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._bytes = 0
        self._version = 0  # newest seen
        self._numbers = 0
        self._draws = 0
        self._tally: Counter[str] = Counter()
        self._balance = [0, 0]  # tokens drawn in the present RL step: long ones of the previous step, and all

    def add(self, records: Iterable[SequenceRecord]) -> None:
        """Keep the records. If a request has two records of one version, the later one is kept."""
        for record in records:
            self._tally["added"] += 1
            self._see(record.target_version)
            if not record.rows or record.bytes > self._options.max_bytes:
                self._tally["refused"] += 1
                continue
            number = self._numbers
            self._numbers += 1
            name = record.request_id if record.request_id >= 0 else -1 - number
            self._drop((record.target_version, name))
            order = float(np.random.default_rng((self._seed, 0, number)).random())
            self._kept[record.target_version, name] = _Kept(record, number, order)
            self._bytes += record.bytes
        self._expire()
        self._make_room()

    def sample(self, tokens: int, version: int) -> list[SequenceRecord]:
        """Return sequences with at least `tokens` tokens in total (fewer if there are no more), each once.

        `version` is the target's present one. One-step offset: `long_share` of the tokens come from the long sequences
        of the previous version, the others from the present one. If one has too few, the rest of the previous version
        follows, then the other, then older ones. The least drawn come first. The shares hold over an RL step's draws,
        not within each.
        """
        self._see(version)
        self._expire()
        rng = np.random.default_rng((self._seed, 1, self._draws))
        self._draws += 1
        long, present, rest, older = (self._queue(pool, rng) for pool in self._pools(version))
        share = self._options.long_share
        chosen: list[SequenceRecord] = []
        total = 0
        while total < tokens:
            behind = self._balance[0] < share * self._balance[1] or share == 1
            turn = (long, present, rest, older) if behind else (present, rest, long, older)
            pool = next((pool for pool in turn if pool), [])
            if not pool:
                break
            kept = pool.pop()
            kept.drawn += 1
            chosen.append(kept.record)
            length = len(kept.record.tokens)
            total += length
            self._balance[1] += length
            if pool is long:
                self._balance[0] += length
                self._tally["long"] += length
        self._tally["drawn"] += len(chosen)
        self._tally["tokens"] += total
        return chosen

    @property
    def stats(self) -> BufferStats:
        kept = self._kept.values()
        lengths = [len(k.record.tokens) for k in kept] or [0]
        p50, p90 = (float(np.quantile(lengths, q)) for q in (0.5, 0.9))
        tally = self._tally
        return BufferStats(
            sequences=len(kept),
            bytes=self._bytes,
            max_bytes=self._options.max_bytes,
            versions=dict(sorted(Counter(k.version for k in kept).items())),
            oldest_age=self._version - min((k.version for k in kept), default=self._version),
            length_p50=p50,
            length_p90=p90,
            draws=self._draws,
            drawn=tally["drawn"],
            drawn_tokens=tally["tokens"],
            drawn_long_tokens=tally["long"],
            never_drawn=sum(not k.drawn for k in kept),
            added=tally["added"],
            evicted=tally["evicted"],
            expired=tally["expired"],
            refused=tally["refused"],
        )

    def _pools(self, version: int) -> list[list[_Kept]]:
        """Return long ones of the previous version; the present version; the rest of the previous version;
        older ones."""
        present = [k for k in self._kept.values() if k.version >= version]
        before = [k for k in self._kept.values() if k.version == version - 1]
        older = [k for k in self._kept.values() if k.version < version - 1]
        lengths = [len(k.record.tokens) for k in before]
        limit = float(np.quantile(lengths, self._options.long_quantile)) if lengths else 0.0
        long = [k for k in before if len(k.record.tokens) > limit] or before
        chosen = {id(k) for k in long}
        return [long, present, [k for k in before if id(k) not in chosen], older]

    @staticmethod
    def _queue(pool: list[_Kept], rng: np.random.Generator) -> list[_Kept]:
        """Return the pool in order; the next one to draw is last."""
        chance = rng.random(len(pool)).tolist()
        ranked = sorted(zip(pool, chance, strict=True), key=lambda pair: (-pair[0].drawn, pair[1]))
        return [kept for kept, _ in ranked]

    def _see(self, version: int) -> None:
        if version > self._version:
            self._version = version
            self._balance = [0, 0]

    def _expire(self) -> None:
        for key in [key for key, k in self._kept.items() if self._version - k.version > self._options.max_age_steps]:
            self._drop(key)
            self._tally["expired"] += 1

    def _make_room(self) -> None:
        if self._bytes <= self._options.max_bytes:
            return
        for key in sorted(self._kept, key=lambda key: self._worth(self._kept[key])):
            self._drop(key)
            self._tally["evicted"] += 1
            if self._bytes <= self._options.max_bytes:
                return

    def _worth(self, kept: _Kept) -> tuple[int, float, int]:
        """Return the sort key of eviction: the smallest is evicted first."""
        newest = kept.version == self._version
        return kept.version, kept.order if newest else float(len(kept.record.tokens)), kept.number

    def _drop(self, key: tuple[int, int]) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes -= kept.record.bytes
