"""One round of sampling and grading: requests out, graded rollouts back, whatever order they arrive in.

Serves RL steps and evaluations alike. Owns the overlap of grading with sampling; never decides what is sampled.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from actors.data.tokenizers import Tokenizer
from actors.reward_pool import RewardPool
from actors.rewards import GradeItem
from contracts.environments import Answer
from contracts.rollout import Rollout
from launch.batch import Batch
from launch.dispatch import DispatchStats, RolloutDispatcher
from launch.dispatch.ledger import FailedRequest
from launch.fleet import Fleet
from launch.interrupt import Interrupt
from launch.observe import Observer
from launch.run.episodes import EnvironmentFailuresError, Episode, Player
from launch.run.groups import Graded, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Everything one round brought back."""

    groups: list[Group]
    stats: DispatchStats
    rollout_s: float
    reward_wait_s: float  # after the last rollout, until the last grade
    metrics: dict[str, float] = field(default_factory=dict)  # of what was planned, and of what became of it
    counts: list[int] = field(default_factory=list)  # responses asked for, by group
    unfinished: dict[int, Rollout] = field(default_factory=dict)  # by request, of an earlier end (Batch.unfinished)

    @property
    def members(self) -> list[Graded]:
        return [member for group in self.groups for member in group.members]

    @property
    def failed(self) -> int:
        """Responses that did not arrive, or could not be graded."""
        ungraded = [m for m in self.members if m.grade.error is not None and not m.grade.bad_record]
        return len(self.stats.failed) + len(ungraded)


@dataclass(frozen=True, slots=True)
class _Arrived:
    rollout: Rollout
    text: str
    episode: Episode | None

    def turns(self, batch: Batch) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """What the model said, each with the prompt of it all."""
        if self.episode is None:
            return [(batch.prompt(self.rollout.request_id).tokens, self.rollout.tokens)]
        return [(self.episode.prompt_tokens, turn.tokens) for turn in self.episode.turns]


class Collector:
    """Runs rounds on the dispatcher's workers and the reward pool."""

    def __init__(
        self,
        dispatcher: RolloutDispatcher,
        rewards: RewardPool,
        tokenizer: Tokenizer,
        observer: Observer,
        interrupt: Interrupt,
        *,
        share: bool = False,
        fleet: Fleet | None = None,
        player: Player | None = None,
    ) -> None:
        """share: show every worker's drafters what the others sampled. fleet: is told of begins and ends. player:
        responses are episodes; None: they are single."""
        self._dispatcher, self._rewards, self._tokenizer = dispatcher, rewards, tokenizer
        self._observer, self._interrupt = observer, interrupt
        self._share, self._fleet, self._player = share, fleet, player
        self._failures: list[str] = []  # of environments, in this RL step

    def run(
        self,
        batch: Batch,
        phase: str,
        *,
        step: int = 0,
        same_step: bool = False,
        to_the_end: bool = False,
        decoding: Callable[[], None] = lambda: None,
        sampled: Callable[[], None] = lambda: None,
    ) -> Round:
        """Sample and grade; one group per pick, in their order.

        `step`: what reward functions are told. `same_step`: a further round of the RL step before, whose failures count
        on. `to_the_end`: it is not given up when the run is asked to stop. `decoding` is called once, when the first
        response has come: by then every worker that gets work has it; `sampled` once, when nothing is left to sample,
        whatever happened.
        Raises Interrupted if asked to stop meanwhile; what the dispatcher and the reward pool raise.
        """
        arrived: dict[int, _Arrived] = {}
        unfinished: dict[int, Rollout] = {}
        failed: list[FailedRequest] = []

        def finished(rollout: Rollout, episode: Episode | None = None) -> None:
            if not (arrived or unfinished):
                decoding()
            if batch.unfinished(rollout):
                unfinished[rollout.request_id] = rollout
                return
            text = self._tokenizer.decode(rollout.tokens, skip_special_tokens=True)
            arrived[rollout.request_id] = _Arrived(rollout, text, episode)
            prompt = batch.prompt(rollout.request_id)
            item = GradeItem(
                prompt=prompt.text if episode is None else episode.prompt,
                response=text,
                record=prompt.record,
                finish_reason=rollout.finish_reason,
                where=prompt.where,
                tokens=rollout.tokens,
                sample=batch.place(rollout.request_id)[1],
                step=step,
                turns=() if episode is None else episode.said,
            )
            self._rewards.submit(rollout.request_id, item)
            self._observer.progress(phase, len(arrived) + len(unfinished), len(batch))

        def fails(request_id: int, answer: Answer) -> None:
            failed.append(FailedRequest(request_id, answer.error or ""))
            prompt = batch.prompt(request_id)
            self._environment_failed(f"rollout {request_id} ({prompt.where or prompt.uid})", answer)

        def tick() -> None:
            if episodes is not None:
                episodes.poll()
            self._rewards.poll()

        if not same_step:
            self._failures.clear()
        self._rewards.begin([batch.ids(index) for index in range(len(batch.picks))], same_step=same_step)
        start_s = time.monotonic()
        if self._fleet is not None:
            self._fleet.begins(phase)
        player = self._player
        episodes = None if player is None else player.begin(batch, self._dispatcher.submit, finished, fails)
        try:
            stats = self._dispatcher.run(
                batch.requests if episodes is None else (),
                finished if episodes is None else episodes.turn,
                tick=tick,
                should_stop=lambda: not to_the_end and bool(self._interrupt),
                more=lambda: episodes is not None and episodes.waiting,
            )
        finally:
            sampled()
        sampled_s = time.monotonic()
        begun = {r.request_id: len(r.prefix) for r in batch.requests if r.prefix is not None}
        old = sum(tokens for i, tokens in begun.items() if i in arrived or i in unfinished)
        stats = replace(stats, tokens=stats.tokens - old) if old else stats
        if self._fleet is not None:
            self._fleet.ends(stats.tokens)
        if stats.interrupted:
            self._interrupt.check()
        if episodes is not None:
            stats = replace(stats, requests=len(batch), failed=(*stats.failed, *failed))
        if self._share:  # while the grades come in: nobody waits for it
            made_by = stats.sampled_by
            self._dispatcher.drafters.share(
                [(prompt, turn, made_by[i]) for i in sorted(arrived) for prompt, turn in arrived[i].turns(batch)]
            )
        grades = self._rewards.drain()

        def graded(i: int) -> Graded:
            one = arrived[i]
            again = i in stats.reissued_ids
            return Graded(
                rollout=one.rollout,
                grade=grades[i],
                text=one.text,
                worker=stats.sampled_by[i],
                reissued=again,
                episode=one.episode,
            )

        groups = [
            Group(pick, [graded(i) for i in batch.ids(index) if i in arrived]) for index, pick in enumerate(batch.picks)
        ]
        counts = [len(batch.ids(index)) for index in range(len(batch.picks))]
        return Round(
            groups=groups,
            stats=stats,
            rollout_s=sampled_s - start_s,
            reward_wait_s=time.monotonic() - sampled_s,
            counts=counts,
            metrics={} if episodes is None else episodes.metrics(),
            unfinished=unfinished,
        )

    def _environment_failed(self, which: str, answer: Answer) -> None:
        """Raises EnvironmentFailuresError."""
        self._failures.append(f"{which}: {answer.error}")
        said = self._failures[-1] if answer.trace is None else f"{self._failures[-1]}\n{answer.trace}"
        self._observer.event("environment_failed", said)
        assert self._player is not None
        if len(self._failures) > (most := self._player.options.max_failures_per_step):
            raise EnvironmentFailuresError(
                f"{len(self._failures)} episodes of this step failed by their environment, "
                f"environment.max_failures_per_step is {most}: {'; '.join(self._failures[:3])}",
                remedy="mend the environment, or raise environment.max_failures_per_step",
            )
