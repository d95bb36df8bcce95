"""One round of sampling and grading: requests out, graded rollouts back, in any order of arrival.

Serves RL steps and evaluations alike. Owns the overlap of grading with sampling. Never decides what is sampled.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from actors.data.tokenizers import Tokenizer
from actors.reward_pool import RewardPool
from actors.rewards import GradeItem
from contracts.environments import EnvironmentAnswer
from contracts.rollout import FinishReason, Rollout
from launch.batch import Batch
from launch.context import RunContext
from launch.dispatch import DispatchStats, RolloutDispatcher
from launch.dispatch.ledger import FailedRequest
from launch.drafter.training import DrafterTraining
from launch.errors import PacelineError
from launch.fleet import Fleet
from launch.interrupt import Interrupt
from launch.run.episodes import Episode, EpisodeEnded, EpisodeFailed, Episodes
from launch.run.groups import Graded, PromptGroup
from launch.run.race import RaceUnderWay


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All results of one round."""

    groups: list[PromptGroup]
    stats: DispatchStats
    rollout_s: float
    reward_wait_s: float  # from the last rollout to the last grade
    metrics: dict[str, float] = field(default_factory=dict)  # of the plan and of its outcome
    counts: list[int] = field(default_factory=list)  # requested responses, by group
    # By request: ended at an earlier limit (Batch.unfinished), or aborted by the race.
    unfinished: dict[int, Rollout] = field(default_factory=dict)

    @property
    def members(self) -> list[Graded]:
        return [member for group in self.groups for member in group.members]

    @property
    def failed(self) -> int:
        """The number of responses that did not arrive, or could not be graded."""
        ungraded = [m for m in self.members if m.grade.error is not None and not m.grade.bad_record]
        return len(self.stats.failed) + len(ungraded)


@dataclass(frozen=True, slots=True)
class _Arrived:
    rollout: Rollout
    text: str
    episode: Episode | None

    def turns(self, batch: Batch) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Return the model's turns, each with the prompt of the whole episode."""
        if self.episode is None:
            return [(batch.prompt(self.rollout.request_id).tokens, self.rollout.tokens)]
        return [(self.episode.prompt_tokens, turn.tokens) for turn in self.episode.turns]


@dataclass(slots=True, kw_only=True)
class Sampling:
    """A round in progress: the batch, and its results so far."""

    batch: Batch
    phase: str
    step: int
    drafter: DrafterTraining | None  # None: no drafter is trained meanwhile
    episodes: Episodes | None = None  # None: single responses
    race: RaceUnderWay | None = None  # None: all groups are trained on
    arrived: dict[int, _Arrived] = field(default_factory=dict)
    unfinished: dict[int, Rollout] = field(default_factory=dict)  # see Round
    failed: list[FailedRequest] = field(default_factory=list)  # because of their environment

    @property
    def ended(self) -> int:
        return len(self.arrived) + len(self.unfinished)

    @property
    def playing(self) -> bool:
        """Whether turns are still to come that no worker has yet."""
        return self.episodes is not None and self.episodes.waiting


class Collector:
    """Runs rounds on the dispatcher's workers and the reward pool. The event loop delivers ended responses
    and answers."""

    def __init__(
        self,
        context: RunContext,
        dispatcher: RolloutDispatcher,
        rewards: RewardPool,
        tokenizer: Tokenizer,
        *,
        share: bool = False,
        fleet: Fleet | None = None,
        episodes: Episodes | None = None,
        drafter: DrafterTraining | None = None,
    ) -> None:
        """share: send every worker's drafters what the others sampled. fleet: is informed of begins and ends. episodes:
        responses are episodes; None: single responses. drafter: workers out of work train it."""
        self._context, self._dispatcher, self._rewards, self._tokenizer = context, dispatcher, rewards, tokenizer
        self._share, self._fleet, self._episodes, self._drafter = share, fleet, episodes, drafter
        self._sampling: Sampling | None = None  # None: nothing is being sampled
        self._failures: list[str] = []  # of environments, in this RL step

    def run(
        self,
        batch: Batch,
        phase: str,
        *,
        step: int = 0,
        same_step: bool = False,
        to_the_end: bool = False,
        spare: bool = False,
        race: RaceUnderWay | None = None,
    ) -> Round:
        """Sample and grade. The result has one group per pick, in order.

        `step`: passed to reward functions. `same_step`: a further round of the last RL step, whose failures are added
        up. `to_the_end`: finish the round even if the run is asked to stop. `spare`: workers out of work may train the
        drafter. It starts at the first response, when every worker that gets work has it. It ends when nothing is left
        to sample, or later where it disturbs nothing. `race`: ends responses of groups that cannot be among the
        shortest. Raises Interrupted if asked to stop, and what the dispatcher and the reward pool raise.
        """
        drafter = self._drafter if spare else None
        try:
            collected = self._run(
                Sampling(batch=batch, phase=phase, step=step, drafter=drafter, race=race),
                same_step=same_step,
                to_the_end=to_the_end,
            )
        finally:
            if drafter is not None:
                drafter.reached("graded", step)
        if drafter is not None:
            drafter.make_room(self._dispatcher)
        return collected

    def _run(self, sampling: "Sampling", *, same_step: bool, to_the_end: bool) -> Round:
        batch = sampling.batch
        if not same_step:
            self._failures.clear()
        self._rewards.begin([batch.ids(index) for index in range(len(batch.picks))], same_step=same_step)
        start_s = time.monotonic()
        if self._fleet is not None:
            self._fleet.begins(sampling.phase)
        try:
            stats = self._sample(sampling, None if to_the_end else self._context.interrupt)
        finally:
            if sampling.drafter is not None:
                sampling.drafter.reached("sampled", sampling.step)
        sampled_s = time.monotonic()
        arrived, unfinished = sampling.arrived, sampling.unfinished
        begun = {r.request_id: len(r.prefix) for r in batch.requests if r.prefix is not None}
        old = sum(tokens for i, tokens in begun.items() if i in arrived or i in unfinished)
        stats = replace(stats, tokens=stats.tokens - old) if old else stats
        if self._fleet is not None:
            self._fleet.ends(stats.tokens)
        if stats.interrupted:
            self._context.interrupt.check()
        if sampling.episodes is not None:
            stats = replace(stats, requests=len(batch), failed=(*stats.failed, *sampling.failed))
        if self._share:  # while grades arrive, so that nothing waits for it
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
            PromptGroup(pick, [graded(i) for i in batch.ids(index) if i in arrived])
            for index, pick in enumerate(batch.picks)
        ]
        counts = [len(batch.ids(index)) for index in range(len(batch.picks))]
        return Round(
            groups=groups,
            stats=stats,
            rollout_s=sampled_s - start_s,
            reward_wait_s=time.monotonic() - sampled_s,
            counts=counts,
            metrics={} if sampling.episodes is None else sampling.episodes.metrics(),
            unfinished=unfinished,
        )

    def _sample(self, sampling: "Sampling", interrupt: Interrupt | None) -> DispatchStats:
        """Run until all requests have ended, or until the run is asked to stop."""
        self._sampling = sampling
        if self._episodes is not None:
            self._episodes.begin(sampling.batch)
            sampling.episodes = self._episodes
        requests = sampling.batch.requests if sampling.episodes is None else ()
        self._dispatcher.begin(requests, watch=sampling.race is not None)
        stopped = True
        try:
            self._dispatcher.wait(lambda: bool(interrupt) or (self._dispatcher.done and not sampling.playing))
            stopped = bool(interrupt) and not (self._dispatcher.done and not sampling.playing)
        finally:
            self._sampling = None
            stats = self._dispatcher.end(abort=stopped)
        return stats

    # Reactions.

    def ended(self, rollout: Rollout) -> None:
        """Take a response, or a turn of one, that a worker has sampled."""
        sampling = self._sampling
        if sampling is None:
            return  # the round was given up
        if sampling.episodes is None:
            self._finished(sampling, rollout, None)
        else:
            sampling.episodes.turn(rollout)

    def progressed(self, request_id: int, tokens: int) -> None:
        """Take the number of tokens so far of a response."""
        if (sampling := self._sampling) is not None and sampling.race is not None:
            self._give_up(sampling.race.reached(request_id, tokens))

    def _give_up(self, request_ids: Sequence[int]) -> None:
        if request_ids:
            self._dispatcher.abort(request_ids)

    def answered(self, answers: Iterable[tuple[int, EnvironmentAnswer]]) -> None:
        """Environments have. Raises PacelineError: too many failed."""
        sampling = self._sampling
        if sampling is None or sampling.episodes is None:
            return
        for key, answer in answers:
            match sampling.episodes.answered(key, answer):
                case EpisodeEnded(rollout, episode):
                    self._finished(sampling, rollout, episode)
                case EpisodeFailed(request_id, why):
                    sampling.failed.append(FailedRequest(request_id, why.error or ""))
                    prompt = sampling.batch.prompt(request_id)
                    self._environment_failed(f"rollout {request_id} ({prompt.where or prompt.uid})", why)
                case turn:
                    self._dispatcher.submit(turn)

    def _finished(self, sampling: "Sampling", rollout: Rollout, episode: Episode | None) -> None:
        batch, request_id = sampling.batch, rollout.request_id
        if not sampling.ended and sampling.drafter is not None:
            sampling.drafter.begin(sampling.step, self._dispatcher)
        aborted = sampling.race is not None and rollout.finish_reason is FinishReason.ABORT
        if aborted or batch.unfinished(rollout):
            sampling.unfinished[request_id] = rollout
            return
        text = self._tokenizer.decode(rollout.tokens, skip_special_tokens=True)
        sampling.arrived[request_id] = _Arrived(rollout, text, episode)
        prompt = batch.prompt(request_id)
        item = GradeItem(
            prompt=prompt.text if episode is None else episode.prompt,
            response=text,
            record=prompt.record,
            finish_reason=rollout.finish_reason,
            where=prompt.where,
            tokens=rollout.tokens,
            sample=batch.place(request_id)[1],
            step=sampling.step,
            turns=() if episode is None else episode.said,
        )
        self._rewards.submit(request_id, item)
        self._context.observer.progress(sampling.phase, sampling.ended, len(batch))
        if sampling.race is not None:
            self._give_up(sampling.race.ended(rollout))

    def _environment_failed(self, which: str, answer: EnvironmentAnswer) -> None:
        """Raises PacelineError: more failed in this RL step than environment.max_failures_per_step allows."""
        self._failures.append(f"{which}: {answer.error}")
        said = self._failures[-1] if answer.trace is None else f"{self._failures[-1]}\n{answer.trace}"
        self._context.observer.event("environment_failed", said)
        assert self._episodes is not None
        if len(self._failures) > (most := self._episodes.options.max_failures_per_step):
            raise PacelineError(
                f"{len(self._failures)} episodes of this step failed by their environment, "
                f"environment.max_failures_per_step is {most}: {'; '.join(self._failures[:3])}",
                remedy="mend the environment, or raise environment.max_failures_per_step",
            )
