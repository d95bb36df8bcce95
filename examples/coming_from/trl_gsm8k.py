"""The two reward functions of trl_gsm8k.yaml. In TRL each got lists (`completions`, and the columns of the data set by
name) and returned a list; here it gets one response, and the record with all of its fields."""

import re
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*")


def final_number(text: str) -> str | None:
    """The last number of a text, without thousands separators."""
    found = NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def correct(prompt: str, response: str, record: dict[str, Any]) -> float:
    """1 where the response's last number is that of the gold answer, which ends in "#### 42"."""
    return float(final_number(response) == final_number(str(record["answer"])))


def numeric(prompt: str, response: str, record: dict[str, Any]) -> float:
    """1 where there is a number at all: what a model that has nothing right yet can learn from."""
    return float(final_number(response) is not None)
