"""Environments of the tests, good and bad."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any


class Counting:
    """Says what it has heard."""

    def __init__(self, base: int = 0) -> None:
        self.count = base

    def reset(self, record: dict[str, Any], seed: int) -> str:
        return f"{record['x']}:{seed}"

    async def step(self, action: str) -> tuple[str, float, bool]:
        await asyncio.sleep(0)
        if action == "wait":
            await asyncio.sleep(0.05)
        elif action == "hang":
            time.sleep(60)
        elif action == "die":
            os._exit(3)
        elif action == "raise":
            raise ValueError("this is mine")
        elif action == "wrong":
            return "no tuple"  # type: ignore[return-value]
        self.count += 1
        return f"{action}:{self.count}", 0.25, self.count >= 5


def add(a: int, b: int = 2) -> int:
    """Adds two numbers."""
    return a + b


async def shout(text: str, loud: bool | None = None) -> dict[str, str]:
    """Says it again."""
    if loud is False:
        raise RuntimeError("never")
    return {"said": text.upper()}


class Replying:
    """Answers in the words of examples/guess_and_check; what a turn is worth depends on what was said. `dies`: a file;
    the first process that hears a third turn makes it, and ends."""

    def __init__(self, dies: str = "") -> None:
        self.dies, self.turns = dies, 0

    def reset(self, record: dict[str, Any], seed: int) -> str:
        return f"\ntry {seed % 7}: "

    def step(self, action: str) -> tuple[str, float, bool]:
        self.turns += 1
        if self.turns == 3 and self.dies and not Path(self.dies).exists():
            Path(self.dies).touch()
            os._exit(9)
        return f", not {len(action) % 13}", (len(action) % 3) / 4, len(action) % 5 == 0
