"""Reward functions of the kinds that users write."""

import asyncio
import math
import os
import signal
import subprocess
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


def takes_answer(question: str, response: str, answer: str) -> float:
    return float(response == answer)


def takes_record_as_reference(prompt: str, response: str, reference: dict[str, Any]) -> float:
    return float(response == reference["answer"])


def takes_record_as_target(question: str, response: str, target: Any = None) -> float:
    return float(target["answer"] == response)


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


def forks(response: str) -> float:
    """Returns twice: in this process and in another one."""
    os.fork()
    return float(response)


def answers_by_itself(response: str, record: dict[str, Any]) -> float:
    """The first process writes an answer into every pipe that it finds, as a C library's stray write would."""
    mark = Path(record["mark"])
    if response == "2" and not mark.exists():
        mark.touch()
        for descriptor in range(3, 64):
            try:
                if "pipe" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
                    os.write(descriptor, b'{"number": 0, "value": [[9.0, null, null]]}\n')
            except OSError:
                continue
    return float(response)


def asks_a_tool(response: str) -> float:
    """Starts programs that read their standard input, as many do."""
    said = subprocess.run(["cat"], capture_output=True, check=True).stdout
    subprocess.Popen(["cat"], stdout=subprocess.DEVNULL)
    try:
        input()
    except EOFError:
        return float(response) + len(said)
    return -1.0


class Unheard(BaseException):
    pass


def ends_by(response: str) -> float:
    if response == "base":
        raise Unheard("not an Exception")
    if response == "cancelled":
        raise asyncio.CancelledError("by hand")
    if response == "descriptors":
        os.closerange(3, 64)
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0


def floods(response: str) -> float:
    for _ in range(20):
        os.write(1, b"x" * 100_000)
    print("the last words")
    return float(response)
