"""Write the task's files: `python -m examples.calculator.make_data [FOLDER]`. Same seed, same bytes; no network.

FOLDER/model/{config.json, tokenizer*}   a Qwen3 configuration without weights (the warm start makes them)
FOLDER/train.jsonl                       problems for RL
FOLDER/eval.jsonl                        held-out problems: neither in train.jsonl nor demonstrated
FOLDER/demos.jsonl                       demonstrations for the warm start

Owns the file formats and the split's sizes; task.py has the problems and the tool.
"""

import random
from pathlib import Path

from examples.calculator import task
from examples.words import MODEL, main, word_tokenizer, write_model, write_records

DEFAULT_FOLDER = Path(__file__).parent / "data"
TRAIN, HELD_OUT = 512, 128  # problems


def write_all(folder: Path, *, seed: int, demonstrations: int) -> dict[str, int]:
    """Write every file below `folder`. Returns the number of records of each JSON-lines file."""
    rng, found = random.Random(f"problems-{seed}"), dict[task.Problem, None]()
    while len(found) < HELD_OUT + TRAIN + demonstrations:
        found[task.problem(rng)] = None
    problems = list(found)
    held_out, train, shown = problems[:HELD_OUT], problems[HELD_OUT : HELD_OUT + TRAIN], problems[HELD_OUT + TRAIN :]
    words, habits = task.vocabulary(), task.Habits()
    tokenizer = word_tokenizer(words, task.WORDS, numbers="[0-9]", max_tokens=MODEL["max_position_embeddings"])
    write_model(folder, MODEL | {"vocab_size": len(words)}, tokenizer)
    return write_records(
        folder,
        {
            "train": map(_record, train),
            "eval": map(_record, held_out),
            "demos": ({"prompt": one.prompt, "response": task.demonstrate(one, habits, rng)} for one in shown),
        },
    )


def _record(one: task.Problem) -> dict[str, str]:
    return {"id": one.expression, "prompt": one.prompt, "answer": str(one.answer)}


if __name__ == "__main__":
    main(write_all, DEFAULT_FOLDER, demonstrations=16_000)
