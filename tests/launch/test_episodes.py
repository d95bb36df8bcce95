"""Episodes turn by turn, without workers: what is asked, of whom, and what comes out."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.data.prompts import Prompt
from actors.data.templates import Template
from config.environments import EnvironmentOptions
from contracts.environments import EnvironmentAnswer, EnvironmentCall, Said
from contracts.rewards import Grade
from contracts.rollout import FinishReason, Request, Rollout, Sampled, SamplingParams
from examples.words import EOS, PAD, UNK, word_tokenizer
from launch.batch import Batch, Pick
from launch.run.episodes import Episode, EpisodeEnded, EpisodeFailed, Episodes
from launch.run.groups import Graded, sequence
from tests.engine.test_stopping import byte_level, wrapped

WORDS = ("doors ", " to ", "open ", "\nno; ", "no; ", "\n> ")
TOKENIZER = word_tokenizer([PAD, EOS, UNK, *WORDS, *map(str, range(10))], WORDS, max_tokens=256)
TEMPLATE = Template(tokenizer=TOKENIZER, chat=False, chat_template=None, system_prompt=None)
PROMPT = "doors 3 to 9\n> "


def tokens(text: str) -> np.ndarray:
    return np.array(TOKENIZER.encode(text, add_special_tokens=False), np.int32)


class World:
    """In place of workers and environments: nothing happens but what a test lets happen."""

    def __init__(self, samples: int = 1, room: int = 40, **options: Any) -> None:
        prompt = Prompt(prompt_id=0, uid="x", text=PROMPT, tokens=tokens(PROMPT), record={"x": 1}, raw=PROMPT)
        self.batch = Batch([Pick(0, prompt)], [samples], SamplingParams(room), seed=0, expected_tokens=[12.0])
        self.calls: list[tuple[int, EnvironmentCall]] = []
        self.turns: list[Request] = []
        self.ended: list[tuple[Rollout, Episode]] = []
        self.failed: list[tuple[int, str | None]] = []
        self.episodes = Episodes(EnvironmentOptions(factory="a:B", **options), self, TEMPLATE)
        self.episodes.begin(self.batch)

    def begin(self) -> None:
        self.calls.clear()

    def play(self, key: int, call: EnvironmentCall) -> None:
        self.calls.append((key, call))

    def answer(self, text: str = "", reward: float = 0.0, *, key: int = 0, **more: Any) -> None:
        said = [{"role": "user", "content": text}] if text else []
        match self.episodes.answered(key, EnvironmentAnswer(observation=said, reward=reward, **more)):
            case EpisodeEnded(rollout, episode):
                self.ended.append((rollout, episode))
            case EpisodeFailed(request_id, why):
                self.failed.append((request_id, why.error))
            case turn:
                self.turns.append(turn)

    def say(self, text: str, *, key: int = 0, reused: int = 0) -> None:
        drawn = np.append(tokens(text), TOKENIZER.eos_token_id).astype(np.int32)
        logprobs = -np.arange(1.0, len(drawn) + 1, dtype=np.float32)
        rollout = Rollout(
            request_id=key,
            sampled=Sampled(drawn, logprobs, logprobs),
            finish_reason=FinishReason.STOP,
            weights_version=1,
            started_s=1.0,
            finished_s=2.0,
            verifications=2,
            reused_tokens=reused,
        )
        self.episodes.turn(rollout)


def test_turns_and_observations_become_one_sequence() -> None:
    world = World(max_turns=3)
    assert [key for key, _ in world.calls] == [0]
    world.answer()
    (first,) = world.turns
    assert (first.prompt_tokens.tolist(), first.earlier_tokens, first.continues) == (tokens(PROMPT).tolist(), 0, True)
    world.say("open 5")
    assert world.calls[-1][1].actions == ("open 5",)
    world.answer("\nno; doors 6 to 9\n> ", 0.25)
    second = world.turns[-1]
    behind = [*world.episodes._running[0].parts]
    assert second.prompt_tokens.tolist() == np.concatenate([tokens(PROMPT), *behind]).tolist()
    assert second.earlier_tokens == sum(map(len, behind))
    assert second.sampling.max_new_tokens == 40 - second.earlier_tokens
    assert second.expected_tokens == 12.0 - 3
    assert second.noise_key == first.noise_key
    world.say("open 9", reused=len(second.prompt_tokens) - 7)
    world.answer("", 1.0, done=True)
    ((rollout, episode),) = world.ended
    assert rollout.finish_reason is FinishReason.STOP
    assert (rollout.verifications, rollout.started_s, len(rollout.tokens)) == (4, 1.0, 6)
    assert TOKENIZER.decode(episode.response_tokens) == "open 5<eos>\nno; doors 6 to 9\n> open 9<eos>"
    assert episode.response_tokens[episode.drawn].tolist() == rollout.tokens.tolist()
    assert episode.said == (
        Said("assistant", "open 5", 0.25),
        Said("user", "\nno; doors 6 to 9\n> "),
        Said("assistant", "open 9", 1.0),
    )
    metrics = world.episodes.metrics()
    assert (metrics["turns/mean"], metrics["turns/max"], metrics["turns/observation_tokens"]) == (2.0, 2.0, 6.0)
    assert metrics["turns/prefilled_tokens"] == (len(tokens(PROMPT)) + 7) / 2
    assert metrics["turns/prompt_tokens"] == (len(tokens(PROMPT)) + len(second.prompt_tokens)) / 2
    trained = sequence(
        world.batch.picks[0], Graded(rollout=rollout, grade=Grade(value=0.0), text="", episode=episode), 1.5
    )
    assert trained.drawn is not None
    assert (trained.drawn_tokens, len(trained.response_tokens)) == (6, len(episode.response_tokens))
    assert trained.sampler_logprobs.tolist() == [-1, -2, -3, -1, -2, -3]


def test_what_it_begins_with_belongs_to_the_prompt() -> None:
    world = World()
    world.answer("no; ")
    assert world.turns[0].earlier_tokens == 0
    world.say("open 5")
    world.answer(done=True)
    episode = world.ended[0][1]
    assert episode.prompt == PROMPT + "no; "
    assert episode.prompt_tokens.tolist() == world.turns[0].prompt_tokens.tolist()


@pytest.mark.parametrize(
    ("options", "turns", "reason"),
    [
        ({"max_turns": 2}, 2, FinishReason.TURNS),
        ({"max_turns": 9, "room": 16}, 2, FinishReason.LENGTH),
        ({"max_turns": 1, "room": 3}, 1, FinishReason.LENGTH),  # its last turn has used up the room
    ],
)
def test_episodes_end_by_turns_or_by_room(options: dict[str, int], turns: int, reason: FinishReason) -> None:
    world = World(**options)
    world.answer()
    for _ in range(turns):
        world.say("open 5")
        world.answer("\nno; doors 3 to 9\n> ")
    ((rollout, episode),) = world.ended
    assert rollout.finish_reason is reason
    assert episode.drawn[-3:].all(), "what nobody answers any more is left out"
    assert len(world.turns) == turns
    assert [request.continues for request in world.turns] == [turn + 1 < options["max_turns"] for turn in range(turns)]


def test_limits_of_a_turn_and_of_an_observation() -> None:
    world = World(max_turn_tokens=4, max_observation_tokens=2)
    world.answer()
    assert world.turns[0].sampling.max_new_tokens == 4
    world.say("open 5")
    world.answer("\nno; doors 6 to 9\n> ")
    assert TOKENIZER.decode(world.turns[1].prompt_tokens[-2:]) == "\nno; doors "


def test_a_failed_environment_fails_its_episode_alone() -> None:
    world = World(samples=2)
    world.answer(key=1)
    world.answer(key=0, error="it broke")
    assert world.failed == [(0, "it broke")]
    world.say("open 5", key=1)
    world.answer(done=True, key=1)
    assert [rollout.request_id for rollout, _ in world.ended] == [1]


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_chat_template_says_what_stands_between_turns() -> None:
    tokenizer = wrapped(byte_level())
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    template = Template(tokenizer=tokenizer, chat=True, chat_template=CHAT, system_prompt=None)
    observed = [{"role": "tool", "content": "42"}]
    text = "<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    assert template.between(observed) == text
    end = int(tokenizer.eos_token_id)
    assert tokenizer.decode(template.encode_between(observed, end)) == text.removeprefix("<|im_end|>")
    assert tokenizer.decode(template.encode_between(observed, 5)) == text, "a turn that was cut off is ended"
    whole = template.render(
        [{"role": "user", "content": "6 * 7"}, {"role": "assistant", "content": "I ask."}, *observed]
    )
    begun = template.render("6 * 7")
    assert whole == begun + "I ask." + text
    assert replace(template, chat_template="{{ tools[0].name }}" + CHAT, tools=[{"name": "add"}]).render("x") == (
        "add" + template.render("x")
    )
    assert replace(template, chat=False).between(observed) == "\n<tool_response>\n42\n</tool_response>\n"
