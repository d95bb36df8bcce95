"""Write the game's files: `python -m examples.text_game.make_data [FOLDER]`. Same seed, same bytes; no network.

FOLDER/model/{config.json, tokenizer*}   a Qwen3 configuration without weights (the warm start makes them)
FOLDER/train.jsonl                       levels for RL
FOLDER/eval.jsonl                        held-out levels: neither in train.jsonl nor demonstrated
FOLDER/demos.jsonl                       games for the warm start

Owns the file formats and the split's sizes; the game is in game.py.
"""

import random
from pathlib import Path

from examples.text_game import game
from examples.words import MODEL, main, word_tokenizer, write_model, write_records

DEFAULT_FOLDER = Path(__file__).parent / "data"
DISTANCES = (3, 4, 5, 6)
TRAIN, HELD_OUT = 512, 128  # levels
TURNS = 8
CARELESS = 0.6


def write_all(folder: Path, *, seed: int, demonstrations: int) -> dict[str, int]:
    """Write every file below `folder`. Returns the number of records of each JSON-lines file."""
    levels = game.levels(DISTANCES)
    random.Random(f"split-{seed}").shuffle(levels)
    held_out, shown = levels[:HELD_OUT], levels[HELD_OUT:]
    words = game.vocabulary()
    tokenizer = word_tokenizer(words, game.WORDS, max_tokens=MODEL["max_position_embeddings"])
    write_model(folder, MODEL | {"vocab_size": len(words)}, tokenizer)
    rng = random.Random(f"demonstrations-{seed}")
    games = (game.demonstrate(rng.choice(shown), rng, turns=TURNS, careless=CARELESS) for _ in range(demonstrations))
    files = {
        "train": (level.record for level in shown[:TRAIN]),
        "eval": (level.record for level in held_out),
        "demos": ({"prompt": prompt, "response": parts} for prompt, parts in games),
    }
    return write_records(folder, files)


if __name__ == "__main__":
    main(write_all, DEFAULT_FOLDER, demonstrations=8_000)
