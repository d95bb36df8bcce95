"""Write the task's files: `python -m examples.smollm_think.make_data [FOLDER]`. Same seed, same bytes; no network.

FOLDER/demos.jsonl   stories with thoughts, for the warm start
FOLDER/train.jsonl   other stories, for RL
FOLDER/eval.jsonl    held-out ones: no story is in two files
"""

import random
from collections.abc import Iterator
from pathlib import Path

from examples.smollm_think.task import Story
from examples.words import main, write_records

DEFAULT_FOLDER = Path(__file__).parent / "data"
TRAIN, HELD_OUT, DEMONSTRATIONS = 512, 64, 1024  # stories


def write_all(folder: Path, *, seed: int, demonstrations: int) -> dict[str, int]:
    """Write the three files below `folder`. Returns the number of records of each."""
    rng = random.Random(f"think-{seed}")
    stories = _different(rng)
    folder.mkdir(parents=True, exist_ok=True)

    def records(kind: str, count: int) -> list[dict[str, str]]:
        return [
            {"id": f"{kind}-{i}", "prompt": story.prompt(rng), "answer": str(story.answer)}
            for i, story in zip(range(count), stories, strict=False)
        ]

    held_out, train = records("eval", HELD_OUT), records("train", TRAIN)
    demos = [
        {"prompt": story.prompt(rng), "response": story.thoughts(rng)}
        for _, story in zip(range(demonstrations), stories, strict=False)
    ]
    return write_records(folder, {"demos": demos, "train": train, "eval": held_out})


def _different(rng: random.Random) -> Iterator[Story]:
    seen = set()
    while True:
        story = Story.drawn(rng)
        if story not in seen:
            seen.add(story)
            yield story


if __name__ == "__main__":
    main(write_all, DEFAULT_FOLDER, demonstrations=DEMONSTRATIONS)
