"""Environments of the tests, good and bad."""

import asyncio
import os
import subprocess
import sys
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
        elif action == "exit":
            sys.exit("enough")
        elif action == "task":
            await asyncio.gather(asyncio.create_task(self.exit()))
        elif action == "interrupt":
            raise KeyboardInterrupt
        elif action == "cancel":
            raise asyncio.CancelledError("no more")
        elif action == "garbage":
            for descriptor in range(3, 64):
                try:
                    if "pipe" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
                        os.write(descriptor, b"not an answer\n")
                except OSError:
                    continue
            await asyncio.sleep(60)
        elif action == "close":
            os.closerange(3, 64)
            time.sleep(60)
        elif action == "fork":
            os.fork()
        elif action == "tool":
            action = subprocess.run(["cat"], capture_output=True, check=True).stdout.decode() + "read"
        elif action == "flood":
            os.write(1, b"x" * 200_000)
        elif action == "raise":
            raise ValueError("this is mine")
        elif action == "wrong":
            return "no tuple"  # type: ignore[return-value]
        self.count += 1
        return f"{action}:{self.count}", 0.25, self.count >= 5

    async def exit(self) -> None:
        sys.exit("enough of tasks")


class Hanging:
    """Never made, but for the first of a process; or never closed."""

    made = 0

    def __init__(self, at: str) -> None:
        self.at = at
        Hanging.made += 1
        if at == "make" and Hanging.made > 1:
            time.sleep(3600)

    def reset(self, record: dict[str, Any]) -> str:
        return "made"

    def step(self, action: str) -> tuple[str, float, bool]:
        return action, 0.0, False

    def close(self) -> None:
        if self.at == "close":
            time.sleep(3600)


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
