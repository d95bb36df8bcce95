"""Write the sets of curriculum.yaml: `python -m examples.options.make_data [FOLDER]`. Same seed, same bytes.

The problems of guess_and_check in two files by modulus, each with a first estimate of its success rate. Also writes the
data of guess_and_check if it is missing.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from examples.guess_and_check import make_data
from examples.words import main

DEFAULT_FOLDER = Path(__file__).parent / "data"
SMALL = (5, 7)
SOLVED = {5: 0.97, 7: 0.7, 11: 0.4, 13: 0.3}  # rough success rates of the warm-started model, by modulus


def with_success(records: Iterable[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (modulus, record with `solved`) of each record."""
    for record in records:
        modulus = int(record["prompt"].rpartition("(mod ")[2].rstrip(")"))
        yield modulus, record | {"solved": SOLVED[modulus]}


def write_sets(train: Path, folder: Path) -> dict[str, int]:
    """Write FOLDER/small.jsonl and large.jsonl from a train.jsonl of guess_and_check. Returns the records of each."""
    records = list(with_success(json.loads(line) for line in train.read_text(encoding="utf-8").splitlines()))
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for name, chosen in (("small", True), ("large", False)):
        own = [json.dumps(record) for modulus, record in records if (modulus in SMALL) == chosen]
        (folder / f"{name}.jsonl").write_text("\n".join(own) + "\n", encoding="utf-8")
        counts[name] = len(own)
    return counts


def write_all(folder: Path, *, seed: int, demonstrations: int) -> dict[str, int]:
    """Write both sets below `folder`. Returns the number of records of each file."""
    train = make_data.DEFAULT_FOLDER / "train.jsonl"
    if not train.exists():
        make_data.write_all(make_data.DEFAULT_FOLDER, seed=seed, demonstrations=demonstrations)
    return write_sets(train, folder)


if __name__ == "__main__":
    main(write_all, DEFAULT_FOLDER, demonstrations=make_data.DEMONSTRATIONS)
