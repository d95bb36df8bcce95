"""The two reward functions of trl_gsm8k.yaml. In TRL each received lists (`completions`, and the columns of the data
set by name) and returned a list. Here each receives one response, and the record with all of its fields.
"""

import re
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*")


def final_number(text: str) -> str | None:
    """Return the last number of a text, without thousands separators."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def correct(prompt: str, response: str, record: dict[str, Any]) -> float:
    """Return 1 if the response's last number is that of the gold answer, which ends in "#### 42"."""
    return float(final_number(response) == final_number(str(record["answer"])))


def numeric(prompt: str, response: str, record: dict[str, Any]) -> float:
    """Return 1 if there is a number at all: a signal for a model that has nothing right yet."""
    return float(final_number(response) is not None)
