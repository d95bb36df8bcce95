"""The example of several generated tasks: its questions can be made, and its shares are those its comment names."""

import importlib.util
import json
from pathlib import Path

import pytest

from actors.data.mixture import MixedOrder
from launch.config import load_config
from launch.config.gym import generated

EXAMPLE = Path(__file__).parents[2] / "examples/reasoning_gym/config.yaml"


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning-gym")
def test_every_step_has_its_shares_of_tasks_whose_answers_are_numbers(tmp_path: Path) -> None:
    made = generated(load_config(EXAMPLE, [f"run.dir={tmp_path}"]).config)
    sizes = {}
    for one in made.data.sets:
        records = [json.loads(line) for line in Path(one.path).read_text().splitlines()]
        assert all(str(int(record["answer"])) == record["answer"] for record in records)
        sizes[one.name] = (len(records), one.weight)
    assert {one.name for one in made.eval.sets} == sizes.keys() == {"chain_sum", "gcd", "times"}
    order = MixedOrder(sizes, 0, True)
    first = {name: sum(size for size, _ in list(sizes.values())[:index]) for index, name in enumerate(sizes)}
    for _ in range(3):
        taken = [index for _, index in order.take(made.rollout.prompts_per_step)]
        assert sum(index < first["gcd"] for index in taken) == 4
        assert sum(first["gcd"] <= index < first["times"] for index in taken) == 2
