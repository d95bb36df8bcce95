"""Reward functions of the kinds that users write."""

import math
import time
from typing import Any


def length(prompt: str, response: str, record: dict[str, Any]) -> float:
    return len(response) / record["target"]


def prints(prompt: str, response: str, record: dict[str, Any]) -> float:
    print("printing must not disturb the answers")
    return 0.5


def raises(prompt: str, response: str, record: dict[str, Any]) -> float:
    raise RuntimeError("the judge is out of office")


def hangs(prompt: str, response: str, record: dict[str, Any]) -> float:
    while response == "hang":
        time.sleep(0.01)
    return 1.0


def exits(prompt: str, response: str, record: dict[str, Any]) -> float:
    import os

    if response == "exit":
        os._exit(3)
    return 1.0


def returns(prompt: str, response: str, record: dict[str, Any]) -> Any:
    return {"nan": math.nan, "inf": math.inf, "text": "1.0", "none": None, "bool": True, "int": 3}[response]


not_callable = 3
