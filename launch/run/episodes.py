"""The episodes of a round: turns from engines, answers from environments, and what follows each.

Owns the progress of each episode. The next party is asked at once, in order of arrival. Its input depends only on the
episode: the prompt, the tokens and the environment's answers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from actors.data.templates import BadPromptError, Template
from actors.environment_worker import EnvironmentPool
from config.environments import EnvironmentOptions
from contracts.environments import EnvironmentAnswer, EnvironmentCall, Messages, Said
from contracts.rollout import FinishReason, Request, Rollout, Sampled
from launch.batch import Batch

_SEED_BITS = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A complete episode. Its rollout has the T drawn tokens of all turns, concatenated."""

    prompt: str
    prompt_tokens: NDArray[np.int32]  # [L], with what was observed before the first turn
    response_tokens: NDArray[np.int32]  # [R], turns and observations
    drawn: NDArray[np.bool_]  # [R], T of them true
    said: tuple[Said, ...]  # after the prompt
    turns: tuple[Sampled, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the turns."""
        return tuple(part.reward for part in self.said if part.reward is not None)


@dataclass(slots=True, eq=False, kw_only=True)
class _Running:
    request: Request  # as the batch requested it
    room: int  # tokens after the prompt
    prompt: str = ""
    prompt_tokens: NDArray[np.int32]
    parts: list[NDArray[np.int32]] = field(default_factory=list)  # after the prompt: turns and observations ...
    of_model: list[bool] = field(default_factory=list)  # ... and which of them the model said
    rollouts: list[Rollout] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    asked_s: float = 0.0
    waited_s: float = 0.0  # for the environment

    @property
    def length(self) -> int:
        return sum(map(len, self.parts))

    @property
    def prompt_lengths(self) -> list[int]:
        """Token counts before each of its turns."""
        before = accumulate(map(len, self.parts), initial=len(self.prompt_tokens))
        return [length for length, of_model in zip(before, self.of_model, strict=False) if of_model]


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """The episode is complete."""

    rollout: Rollout
    episode: Episode


@dataclass(frozen=True, slots=True)
class EpisodeFailed:
    """The episode's environment has failed."""

    request_id: int
    answer: EnvironmentAnswer


class Episodes:
    """The episodes of a run, one batch after another. Each answer returns what follows: a turn to sample, or the
    episode's end."""

    def __init__(self, options: EnvironmentOptions, environments: EnvironmentPool, template: Template) -> None:
        self.options, self._environments, self._template = options, environments, template
        self._running: dict[int, _Running] = {}
        self._asked: set[int] = set()  # those that wait for their environment
        self._done: list[_Running] = []

    def begin(self, batch: Batch) -> None:
        """Begin the episodes of a batch, and drop those of the one before."""
        self._batch = batch
        self._running.clear()
        self._asked.clear()
        self._done.clear()
        self._environments.begin()
        for request in batch.requests:
            self._running[request.request_id] = _Running(
                request=request, room=request.sampling.max_new_tokens, prompt_tokens=request.prompt_tokens
            )
            self._ask(request.request_id)

    @property
    def waiting(self) -> bool:
        """Whether turns are still to come that no worker has yet."""
        return bool(self._asked)

    def turn(self, rollout: Rollout) -> None:
        """Take a turn that a worker has sampled."""
        running = self._running[rollout.request_id]
        running.parts.append(rollout.tokens)
        running.of_model.append(True)
        running.rollouts.append(rollout)
        running.actions.append(self._text(rollout.tokens))
        self._ask(rollout.request_id)

    def answered(self, key: int, answer: EnvironmentAnswer) -> Request | EpisodeEnded | EpisodeFailed:
        """Take an environment's answer."""
        self._asked.discard(key)
        running = self._running[key]
        running.waited_s += time.monotonic() - running.asked_s
        if answer.error is not None:
            del self._running[key]
            return EpisodeFailed(key, answer)
        if not running.rollouts:
            return self._begin(running, list(answer.observation))
        return self._go_on(running, answer)

    def metrics(self) -> dict[str, float]:
        """Return turns/* of the complete episodes."""
        if not self._done:
            return {}
        turns = [rollout for running in self._done for rollout in running.rollouts]
        given = sum(len(part) for running in self._done for part in running.parts) - sum(len(r.tokens) for r in turns)
        prompts = [length for running in self._done for length in running.prompt_lengths]
        reused = sum(rollout.reused_tokens for rollout in turns)
        return {
            "turns/mean": len(turns) / len(self._done),
            "turns/max": float(max(len(running.rollouts) for running in self._done)),
            "turns/observation_tokens": given / len(self._done),
            "turns/prompt_tokens": sum(prompts) / len(turns),
            "turns/prefilled_tokens": (sum(prompts) - reused) / len(turns),
            "turns/waited_s": sum(running.waited_s for running in self._done) / len(self._done),
        }

    def _ask(self, key: int) -> None:
        running = self._running[key]
        running.asked_s = time.monotonic()
        self._asked.add(key)
        call = EnvironmentCall(
            round=0,
            episode=key,
            record=self._batch.prompt(key).record,
            seed=running.request.noise_key & ((1 << _SEED_BITS) - 1),
            actions=tuple(running.actions),
        )
        self._environments.play(key, call)

    def _begin(self, running: _Running, observed: Messages) -> Request | EpisodeFailed:
        """Return the first turn, after the record's prompt and the environment's first messages."""
        prompt = self._batch.prompt(running.request.request_id)
        running.prompt = prompt.text
        if observed:
            try:
                running.prompt = self._template.render(prompt.raw, observed)
            except BadPromptError as error:
                return self._give_up(running, f"what it began with cannot be rendered: {error}")
            running.prompt_tokens = self._template.encode(running.prompt)
            running.room -= len(running.prompt_tokens) - len(prompt.tokens)
            if running.room < 1:
                return self._give_up(running, "what it began with leaves no room (rollout.sampling.max_new_tokens)")
        return self._sample(running)

    def _go_on(self, running: _Running, answer: EnvironmentAnswer) -> Request | EpisodeEnded | EpisodeFailed:
        running.said.append(Said("assistant", running.actions[-1], answer.reward))
        if answer.done:
            return self._end(running, FinishReason.STOP)
        if running.length >= running.room:
            return self._end(running, FinishReason.LENGTH)
        if len(running.rollouts) >= self.options.max_turns:
            return self._end(running, FinishReason.TURNS)
        observed = [self._cut(message) for message in answer.observation]
        if observed:
            try:
                tokens = self._template.encode_between(observed, int(running.parts[-1][-1]))
            except BadPromptError as error:
                return self._give_up(running, f"an observation cannot be rendered: {error}")
            if running.length + len(tokens) >= running.room:
                return self._end(running, FinishReason.LENGTH)
            running.parts.append(tokens)
            running.of_model.append(False)
            running.said += [Said(message["role"], message["content"]) for message in observed]
        return self._sample(running)

    def _sample(self, running: _Running) -> Request:
        """Return the next turn."""
        asked, begun = running.request, running.length
        left = running.room - begun
        drawn = sum(len(rollout.tokens) for rollout in running.rollouts)
        return replace(
            asked,
            prompt_tokens=np.concatenate([running.prompt_tokens, *running.parts]).astype(np.int32),
            sampling=replace(asked.sampling, max_new_tokens=min(left, self.options.max_turn_tokens or left)),
            expected_tokens=max(1.0, asked.expected_tokens - drawn),
            earlier_tokens=begun,
            continues=len(running.rollouts) + 1 < self.options.max_turns,
        )

    def _end(self, running: _Running, reason: FinishReason) -> EpisodeEnded:
        first, last = running.rollouts[0], running.rollouts[-1]
        del self._running[last.request_id]
        drawn = [np.full(len(part), own) for part, own in zip(running.parts, running.of_model, strict=True)]
        turns = tuple(rollout.sampled for rollout in running.rollouts)
        rollout = replace(
            last,
            sampled=Sampled.join(turns),
            finish_reason=reason,
            started_s=first.started_s,
            verifications=sum(rollout.verifications for rollout in running.rollouts),
        )
        episode = Episode(
            prompt=running.prompt,
            prompt_tokens=running.prompt_tokens,
            response_tokens=np.concatenate(running.parts),
            drawn=np.concatenate(drawn),
            said=tuple(running.said),
            turns=turns,
        )
        self._done.append(running)
        return EpisodeEnded(rollout, episode)

    def _give_up(self, running: _Running, reason: str) -> EpisodeFailed:
        key = running.request.request_id
        del self._running[key]
        return EpisodeFailed(key, EnvironmentAnswer(error=reason))

    def _text(self, tokens: NDArray[np.int32]) -> str:
        return str(self._template.tokenizer.decode(tokens, skip_special_tokens=True))

    def _cut(self, message: dict[str, str]) -> dict[str, str]:
        """Truncate a message's text to max_observation_tokens."""
        most, tokenizer = self.options.max_observation_tokens, self._template.tokenizer
        tokens: Sequence[int] = tokenizer.encode(message["content"], add_special_tokens=False)
        return message if len(tokens) <= most else {**message, "content": str(tokenizer.decode(tokens[:most]))}
