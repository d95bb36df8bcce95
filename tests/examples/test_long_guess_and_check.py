"""The task of wide difficulty: its split, what its demonstrations show, and the same files for the same seed."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.guess_and_check.make_data import build_tokenizer
from examples.guess_and_check.task import LARGEST_NUMBER, Problem, demonstrate
from examples.long_guess_and_check import make_data
from launch.config import load_config

SPLIT, SHOWN = make_data.split(random.Random("split-0"))
LIMIT = load_config(Path(make_data.__file__).parent / "config.yaml").config.rollout.sampling.max_new_tokens
shown_problems = st.sampled_from([(name, problem) for name, members in SHOWN.items() for problem in members])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    assert make_data.write_all(folder, seed=0, demonstrations=2000) == {"train": 96, "eval": 72, "demos": 2000}
    return folder


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def tokens_of(response: str) -> int:
    return len(build_tokenizer()(response)["input_ids"]) + 1


def test_held_out_problems_are_seen_neither_in_rl_nor_in_demonstrations(written: Path) -> None:
    prompts = {name: {record["prompt"] for record in read(written / f"{name}.jsonl")} for name in ("train", "eval")}
    demonstrated = {record["prompt"] for record in read(written / "demos.jsonl")}
    assert (len(prompts["train"]), len(prompts["eval"])) == (96, 72)
    assert prompts["eval"].isdisjoint(prompts["train"] | demonstrated)


def test_a_third_of_the_training_problems_is_beyond_reach_and_a_fifth_is_read_off() -> None:
    beyond = [problem for problem in SPLIT.train if problem.answer > make_data.REACH and problem.a > 1]
    assert 0.25 <= len(beyond) / len(SPLIT.train) <= 0.5
    assert sum(problem.a == 1 for problem in SPLIT.train) == 20


@given(shown_problems, st.integers(0, 10_000))
def test_every_number_of_a_demonstration_has_a_token(shown: tuple[str, Problem], seed: int) -> None:
    name, problem = shown
    response = demonstrate(problem, make_data.LEVELS[name].style, random.Random(seed))
    tokenizer = build_tokenizer()
    ids = tokenizer(response)["input_ids"]
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == response
    assert max(problem.c, problem.a * min(problem.p - 1, make_data.REACH)) <= LARGEST_NUMBER


@given(
    st.sampled_from([problem for problem in SHOWN["97"] if problem.answer > make_data.REACH]), st.integers(0, 10_000)
)
def test_who_is_stubborn_beyond_reach_ends_at_the_limit_without_a_box(problem: Problem, seed: int) -> None:
    style = make_data.FAR
    response = demonstrate(problem, style, random.Random(seed))
    tries = response.count("\ntry ")
    assert f"{{{problem.answer}}}" not in response
    if tries == style.max_tries:
        assert tokens_of(response[: response.index("\n\\boxed")]) - 1 > LIMIT
    assert tokens_of(response) + 16 <= make_data.MODEL["max_position_embeddings"]


def test_half_of_the_demonstrations_beyond_reach_never_give_up() -> None:
    rng = random.Random(0)
    problems = [problem for problem in SHOWN["97"] if problem.answer > make_data.REACH]
    drawn = [demonstrate(rng.choice(problems), make_data.FAR, rng) for _ in range(2000)]
    stubborn = sum(response.count("\ntry ") == make_data.FAR.max_tries for response in drawn) / len(drawn)
    assert stubborn == pytest.approx(make_data.FAR.stubborn, abs=0.04)


def test_where_a_is_one_the_first_try_is_the_answer() -> None:
    for problem in SHOWN["read off"]:
        response = demonstrate(problem, make_data.NEAR, random.Random(0))
        assert response.count("\ntry ") == 1
        assert response.endswith(f"\\boxed{{{problem.answer}}}")


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_data.write_all(tmp_path / name, seed=seed, demonstrations=50)

    def contents(name: str) -> dict[str, bytes]:
        folder = tmp_path / name
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.json*"))}

    assert contents("a") == contents("b")
    assert all(contents("a")[f"{name}.jsonl"] != contents("c")[f"{name}.jsonl"] for name in ("train", "eval", "demos"))
