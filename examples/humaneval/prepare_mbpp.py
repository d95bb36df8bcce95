"""Write MBPP as prompts with unit tests. MBPP's texts do not name the function, so the prompt quotes the first test, as
is usual; the reward runs all of them. Owns this conversion only.

    python -m examples.humaneval.prepare_mbpp data/mbpp-source/full data/mbpp.jsonl
"""

import argparse
import json
from pathlib import Path

from actors.data import DataError
from actors.data.files import resolve
from actors.data.readers import BadRecord, read_file

SPLITS = ("train", "validation", "test")  # all of them, since the example evaluates on HumanEval


def convert(source: str, target: Path) -> int:
    """Convert every split below a folder, atomically. Returns the number of records."""
    lines = []
    for split in SPLITS:
        for file in resolve(source, [split], "source"):
            for record in read_file(file):
                if isinstance(record, BadRecord):
                    raise DataError(f"{record.where}: {record.reason}")
                fields = record.fields
                prompt = f"{fields['text'].strip()}\nYour code must pass this test:\n{fields['test_list'][0]}"
                made = {
                    "id": f"mbpp/{fields['task_id']}",
                    "prompt": prompt,
                    "tests": list(fields["test_list"]),
                    "test_setup_code": fields.get("test_setup_code") or "",
                }
                lines.append(json.dumps(made) + "\n")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(target)
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder with MBPP's parquet files")
    parser.add_argument("target", type=Path, help=".jsonl file to write")
    arguments = parser.parse_args()
    print(f"{convert(arguments.source, arguments.target)} records written to {arguments.target}")


if __name__ == "__main__":
    main()
