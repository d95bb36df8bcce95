"""The demo task: arithmetic, split, tokenizer round trip, and files that are the same for the same seed."""

import json
import random
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.guess_and_check import make_data, task

ALL = [problem for p in task.PRIMES for problem in task.problems(p)]
problem_strategy = st.sampled_from(ALL)
MAX_NEW_TOKENS = 200
RECORDED = {"train": "a2d58b94ba4e18bb", "eval": "cbafeedcf754246d", "demos": "af86aaf73b4e7015"}  # SHA-256, seed 0


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    counts = make_data.write_all(folder, seed=0, demonstrations=2000)
    assert counts == {"train": 96, "eval": 72, "demos": 2000}
    return folder


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_there_are_264_problems_and_each_has_exactly_one_solution() -> None:
    assert len(set(ALL)) == 264
    for problem in ALL:
        solutions = [x for x in range(1, problem.p) if problem.a * x % problem.p == problem.c]
        assert solutions == [problem.answer]


def test_an_attempt_is_written_out_as_expected() -> None:
    problem = task.Problem(p=11, a=8, c=8)
    assert problem.prompt == "find x: 8 * x = 8 (mod 11)"
    assert problem.attempt(9) == "\ntry 9: 72 is 6, off 8 by 2, not 9"
    assert problem.attempt(1) == "\ntry 1: 8 is 8, off 8 by 0, so x = 1"


@given(problem_strategy, st.integers(0, 10_000))
def test_a_demonstration_stops_at_its_first_hit_and_boxes_it(problem: task.Problem, seed: int) -> None:
    text = task.demonstrate(problem, task.DemonstrationStyle(), random.Random(seed))
    *tries, boxed = text.strip().splitlines()
    hits = [", so x = " in line for line in tries]
    assert not any(hits[:-1])
    if hits[-1]:
        assert boxed == f"\\boxed{{{problem.answer}}}"


def test_impatience_is_what_demonstrations_lose_by() -> None:
    """About 63 % end in the right box; without giving up, and without repeating a value, all do."""
    rng = random.Random(0)
    weights = [make_data.DEMONSTRATION_WEIGHTS[p] for p in task.PRIMES]
    drawn = [rng.choice(task.problems(p)) for p in rng.choices(task.PRIMES, weights, k=4000)]

    def right(style: task.DemonstrationStyle) -> float:
        ends = (task.demonstrate(problem, style, rng).endswith(f"\\boxed{{{problem.answer}}}") for problem in drawn)
        return sum(ends) / len(drawn)

    assert right(task.DemonstrationStyle()) == pytest.approx(0.63, abs=0.03)
    assert right(task.DemonstrationStyle(give_up=0.0, with_replacement=0.0)) == 1.0


@given(problem_strategy, st.integers(0, 10_000))
def test_decoding_gives_back_the_text(problem: task.Problem, seed: int) -> None:
    tokenizer = make_data.build_tokenizer()
    response = task.demonstrate(problem, task.DemonstrationStyle(), random.Random(seed))
    prompt_ids, response_ids = tokenizer(problem.prompt)["input_ids"], tokenizer(response)["input_ids"]
    assert tokenizer(problem.prompt + response)["input_ids"] == prompt_ids + response_ids
    assert tokenizer.unk_token_id not in prompt_ids + response_ids
    assert tokenizer.decode([*response_ids, tokenizer.eos_token_id], skip_special_tokens=True) == response
    assert len(response_ids) + 1 <= MAX_NEW_TOKENS


def test_held_out_problems_are_seen_neither_in_rl_nor_in_demonstrations(written: Path) -> None:
    prompts = {name: {record["prompt"] for record in read(written / f"{name}.jsonl")} for name in ("train", "eval")}
    demonstrated = {record["prompt"] for record in read(written / "demos.jsonl")}
    assert (len(prompts["train"]), len(prompts["eval"])) == (96, 72)
    assert prompts["eval"].isdisjoint(prompts["train"] | demonstrated)
    assert len(demonstrated) > 150


def test_the_saved_tokenizer_and_config_load_with_transformers(written: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(written / "model")
    config = AutoConfig.from_pretrained(written / "model")
    assert (len(tokenizer), config.vocab_size, config.model_type) == (228, 228, "qwen3")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (config.eos_token_id, config.pad_token_id)
    text = "find x: 8 * x = 8 (mod 11)\n\\boxed{1}"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert config.rope_parameters["rope_theta"] == 10000.0


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_data.write_all(tmp_path / name, seed=seed, demonstrations=50)

    def contents(name: str) -> dict[str, bytes]:
        folder = tmp_path / name
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.json*"))}

    assert contents("a") == contents("b")
    assert all(contents("a")[f"{name}.jsonl"] != contents("c")[f"{name}.jsonl"] for name in ("train", "eval", "demos"))


def test_too_few_problems_are_refused() -> None:
    sizes = dict.fromkeys(task.PRIMES, 7)
    with pytest.raises(ValueError, match="modulus 5 has 12 problems, but 14"):
        task.split(random.Random(0), train=sizes, held_out=sizes)


def test_every_number_of_a_trace_has_a_token() -> None:
    largest = max(problem.a * x for problem in ALL for x in range(1, problem.p))
    assert largest <= task.LARGEST_NUMBER
    vocabulary = task.vocabulary()
    assert len(vocabulary) == len(set(vocabulary)) == task.VOCAB_SIZE


def test_the_demo_s_data_are_those_that_its_records_were_made_with(tmp_path: Path) -> None:
    """benchmarks/results and experiments/results speak of these files; another task's needs must not change them."""
    make_data.write_all(tmp_path, seed=0, demonstrations=22_400)
    digests = {name: sha256((tmp_path / f"{name}.jsonl").read_bytes()).hexdigest()[:16] for name in RECORDED}
    assert digests == RECORDED
