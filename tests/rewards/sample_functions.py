"""Reward functions of the kinds that users write."""

import asyncio
import math
import os
import signal
import time
from pathlib import Path
from typing import Any


def length(prompt: str, response: str, record: dict[str, Any]) -> float:
    return len(response) / record["target"]


def prints(prompt: str, response: str, record: dict[str, Any]) -> float:
    print("printing must not disturb the answers")
    return 0.5


def raises(prompt: str, response: str, record: dict[str, Any]) -> float:
    raise RuntimeError("the judge is out of office")


def raises_sometimes(response: str) -> float:
    print("a line of a reward function")
    return float(1 / (len(response) % 3))  # the line that raises


def deep(prompt: str, response: str, record: dict[str, Any]) -> float:
    return lookup(record, response)


def lookup(record: dict[str, Any], key: str) -> float:
    return float(record[key])


def dies_once(prompt: str, response: str, record: dict[str, Any]) -> float:
    mark = Path(record["mark"])
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def takes_tokens(prompt: str, response: str, record: dict[str, Any], *, tokens: list[int], finish_reason: str) -> float:
    return len(tokens) if finish_reason == "length" else -sum(tokens)


def takes_anything(prompt: str, response: str, record: dict[str, Any], **more: Any) -> float:
    return float(len(more))


def wants_completions(completions: list[str], **more: Any) -> float:
    return 0.0


def wants_label(prompt: str, response: str, record: dict[str, Any], *, label: str) -> float:
    return 0.0


def by_name(step: int, sample: int, response: str) -> float:
    return 100.0 * step + 10.0 * sample + len(response)


def with_names_of_their_own(question: str, text: str, line: dict[str, Any], *, step: int) -> float:
    return len(question) + len(text) + step


def trl(prompts: list[str], completions: list[str], answer: list[str]) -> float:
    return 0.0


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 0.0


def rank(response: str, sample: int, group: list[dict[str, Any]]) -> float:
    """How many of the group are shorter in tokens; every call gets a group of its own."""
    own = next(other for other in group if other["sample"] == sample)
    shorter = sum(len(other["tokens"]) < len(own["tokens"]) for other in group)
    group.clear()
    return float(shorter)


def unique(response: str, group: list[dict[str, Any]]) -> float:
    if response == "hang":
        time.sleep(3600)
    if response == "raise":
        raise LookupError("nothing to compare with")
    return float([other["response"] for other in group].count(response) == 1)


def normalised(response: list[str], group: list[dict[str, Any]]) -> list[float]:
    """Lengths relative to the mean of the group, which is the batch."""
    assert response == [other["response"] for other in group]
    mean = sum(map(len, response)) / len(response)
    return [len(text) - mean for text in response]


def together(response: list[str], record: list[dict[str, Any]]) -> list[float]:
    """Tells with whom it was called."""
    if "raise" in response:
        raise RuntimeError("the batch is bad")
    if "short" in response:
        return [0.0]
    return [float(len(response))] * len(record)


at_once = 0
most = 0


async def asynchronous(response: str, sample: int) -> float:
    """How many calls have been under way at once, the first one ending last."""
    global at_once, most
    if response == "raise":
        await asyncio.sleep(0)
        raise RuntimeError("nobody answers")
    if response == "late":
        await asyncio.sleep(3600)
    if response == "impatient":
        await asyncio.wait_for(asyncio.sleep(3600), 0.01)
    at_once += 1
    most = max(most, at_once)
    await asyncio.sleep(0.05)
    at_once -= 1
    return float(most)


async def deadly(response: str) -> float:
    await asyncio.sleep(0.05)
    if response == "die":
        os._exit(9)
    return 1.0


class Model:
    """What a reward model looks like."""

    made = 0

    def __init__(self, bias: float = 0.0) -> None:
        if bias < 0:
            raise ValueError("no such model")
        Model.made += 1
        self.bias = bias

    def score(self, response: list[str]) -> list[float]:
        print(f"scores {len(response)}")
        return [len(text) + self.bias for text in response]


class Called:
    async def __call__(self, response: str, tokens: list[int]) -> float:
        return float(len(tokens))


class Silent:
    pass


def hangs(prompt: str, response: str, record: dict[str, Any]) -> float:
    while response == "hang":
        time.sleep(0.01)
    return 1.0


def exits(prompt: str, response: str, record: dict[str, Any]) -> float:
    if response == "exit":
        os._exit(3)
    return 1.0


def returns(prompt: str, response: str, record: dict[str, Any]) -> Any:
    return {"nan": math.nan, "inf": math.inf, "text": "1.0", "none": None, "bool": True, "int": 3}[response]


not_callable = 3
