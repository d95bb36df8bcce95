"""Counts of one `run` of the dispatcher, besides those of the ledger. Decides nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from contracts.rollout import Rollout
from launch.dispatch.ledger import FailedRequest, Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchStats:
    """Results of one `run`. finished + len(failed) == requests, unless interrupted."""

    requests: int
    finished: int
    failed: tuple[FailedRequest, ...]
    reissued: int  # re-issues after lost workers, and from workers that left
    lost_workers: int
    duplicates: int  # events ignored because their sender no longer held the request
    tokens: int  # response tokens of the finished rollouts
    preempted: int  # recomputed by engines that ran out of cache
    seconds: float
    sampled_by: Mapping[int, str]  # request id -> the worker that finished it; "": aborted while it waited
    interrupted: bool = False
    reissued_ids: frozenset[int] = frozenset()  # requests that more than one worker sampled


@dataclass(slots=True, kw_only=True)
class DispatchTally:
    """Counts of the present run."""

    begin_s: float = 0.0
    lost_workers: int = 0
    tokens: int = 0
    preempted: int = 0
    sampled_by: dict[int, str] = field(default_factory=dict)
    reissued_ids: set[int] = field(default_factory=set)

    def finished(self, worker: str, rollout: Rollout) -> None:
        self.tokens += len(rollout.tokens)
        self.sampled_by[rollout.request_id] = worker

    def stats(self, ledger: Ledger, now_s: float, *, interrupted: bool) -> DispatchStats:
        return DispatchStats(
            requests=ledger.total,
            finished=ledger.finished,
            failed=tuple(ledger.failed),
            reissued=ledger.reissued,
            lost_workers=self.lost_workers,
            duplicates=ledger.duplicates,
            tokens=self.tokens,
            preempted=self.preempted,
            seconds=now_s - self.begin_s,
            sampled_by=self.sampled_by,
            interrupted=interrupted,
            reissued_ids=frozenset(self.reissued_ids),
        )
