"""The examples of episodes: files that are the same for the same seed, and demonstrations that keep the rules."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from actors.data.prompts import load_demonstrations, load_prompts
from actors.environments.tools import calls_in
from config.data import DataOptions
from config.learner import WarmupOptions
from examples.calculator import make_data as calculator
from examples.calculator import task
from examples.text_game import game
from examples.text_game import make_data as text_game
from launch.config import load_config

ROOT = Path(__file__).parents[2]
BOTH = pytest.mark.parametrize("module", [calculator, text_game], ids=["calculator", "text_game"])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@BOTH
def test_same_seed_same_bytes_and_nothing_is_held_out_and_shown(module: ModuleType, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        module.write_all(tmp_path / name, seed=seed, demonstrations=200)
    files = ["demos.jsonl", "train.jsonl", "eval.jsonl", "model/config.json", "model/tokenizer.json"]
    content: Callable[[str], list[bytes]] = lambda name: [(tmp_path / name / file).read_bytes() for file in files]  # noqa: E731
    assert content("a") == content("b")
    assert all(one != other for one, other in zip(content("a")[:3], content("c")[:3], strict=True))
    ids = {split: {row["id"] for row in lines(tmp_path / "a" / f"{split}.jsonl")} for split in ("train", "eval")}
    assert not ids["train"] & ids["eval"]


@BOTH
def test_every_word_is_known_and_every_demonstration_fits_the_run(module: ModuleType, tmp_path: Path) -> None:
    module.write_all(tmp_path, seed=0, demonstrations=300)
    config = load_config(ROOT / module.__name__.replace(".", "/").replace("make_data", "config.yaml")).config
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    data = DataOptions(
        train=str(tmp_path / "train.jsonl"), template="plain", max_prompt_tokens=config.data.max_prompt_tokens
    )
    shown, report = load_demonstrations(WarmupOptions(data=str(tmp_path / "demos.jsonl")), data, tokenizer)
    assert report.used == 300
    most = max(len(one.response_tokens) for one in shown)
    assert most <= config.rollout.sampling.max_new_tokens
    assert config.environment is not None
    for one in shown:
        assert tokenizer.unk_token_id not in [*one.prompt_tokens, *one.response_tokens]
        drawn = [True] * len(one.response_tokens) if one.drawn is None else one.drawn.tolist()
        assert drawn[0]
        assert drawn[-1]
        turns = "".join("x" if own else " " for own in drawn).split()
        assert len(turns) <= config.environment.max_turns
        assert max(map(len, turns)) <= (config.environment.max_turn_tokens or most)
    assert len(load_prompts(data, "train", tokenizer)) == module.TRAIN


@given(st.integers(0, 10**6))
def test_the_calculator_computes_what_python_does(seed: int) -> None:
    one = task.problem(random.Random(seed))
    assert one.answer == eval(one.expression)
    assert abs(one.answer) < 10**5


@pytest.mark.parametrize("text", ["2 ** 9", "f(1)", "1 / 2", "__import__('os')", "1.5", "1 +", "9" * 101])
def test_the_calculator_computes_nothing_else(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        task.calculate(text)


def test_calls_of_demonstrations_are_answered_as_shown() -> None:
    rng = random.Random(0)
    for _ in range(200):
        parts = task.demonstrate(task.problem(rng), task.Habits(), rng)
        if len(parts) > 1:
            (call,) = calls_in(str(parts[0]))
            asked = json.loads(call)["arguments"]["expression"]
            assert parts[1] == [{"role": "tool", "content": str(task.calculate(asked))}]


@given(st.integers(0, 10**6))
def test_who_listens_finds_the_treasure_in_time(seed: int) -> None:
    rng = random.Random(seed)
    level = rng.choice(game.levels(text_game.DISTANCES))
    _, parts = game.demonstrate(level, rng, turns=text_game.TURNS, careless=0.0)
    assert len(parts[::2]) == level.distance
    island = game.Island()
    island.reset(level.record)
    assert [island.step(action) for action in parts[::2]][-1] == ("", 1.0, True)


def test_the_island_has_shores_and_knows_its_words() -> None:
    island = game.Island()
    assert island.reset(game.Level(0, 0, 2, 0).record) == "\nit lies east\n> "
    assert island.step("go west") == ("\nit lies east\n> ", 0.0, False)
    assert island.step("fly north") == ("\nwhat? it lies east\n> ", 0.0, False)
    assert island.step("go north")[0] == "\nit lies south east\n> "
