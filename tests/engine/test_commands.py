"""A command that nobody has heard of goes all the way: worker, engine handle, socket, child's loop, core, and back.

What is between the one who sends it and the core that obeys knows no list of commands.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from actors.engine.child import serve
from actors.engine.process import RolloutEngine
from actors.processes.child import parent_link
from actors.rollout_worker import RolloutWorker
from contracts.engine import Answered, Command
from contracts.rollout import EngineAnswer, EngineDiedError, EngineFailed
from tests.actors.fake_engine import FakeCore, FakeOptions

DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Total(EngineAnswer):
    total: int


@dataclass(frozen=True, slots=True)
class Add(Command):
    """What came as memory, times `factor`."""

    factor: int


@dataclass(frozen=True, slots=True)
class Report(Answered[Total]):
    pass


@dataclass(frozen=True, slots=True)
class Unheard(Command):
    pass


class Adder(FakeCore):
    """A core that obeys two commands more."""

    _total = 0

    def apply(self, command: Any, memory: NDArray[np.uint8] | None) -> EngineAnswer | None:
        match command:
            case Add(factor):
                assert memory is not None
                self._total += factor * int(memory.sum())
                return None
            case Report():
                return Total(self._total)
            case _:
                return super().apply(command, memory)


def main() -> None:
    with parent_link(EngineFailed) as link:
        serve(link, Adder(link.receive()))


def adder() -> RolloutEngine:
    engine = RolloutEngine(FakeOptions(), "adder", module="tests.engine.test_commands")
    engine.wait_until_ready(DEADLINE_S)
    return engine


@pytest.mark.asyncio
async def test_a_made_up_command_reaches_the_core_and_its_answer_whoever_asked() -> None:
    worker = RolloutWorker("w", adder)
    await worker.restart_engine()
    await worker.tell(Add(3), np.array([1, 2], np.uint8))
    first, second = asyncio.create_task(worker.ask(Report())), asyncio.create_task(worker.ask(Report()))
    assert await asyncio.wait_for(first, DEADLINE_S) == Total(9)
    await worker.tell(Add(1), np.array([5], np.uint8))
    assert await asyncio.wait_for(second, DEADLINE_S) == Total(9)
    gone = asyncio.create_task(worker.ask(Report()))
    await asyncio.sleep(0)
    gone.cancel()  # its place among the answers stays its own
    assert await asyncio.wait_for(worker.ask(Report()), DEADLINE_S) == Total(14)
    await worker.shutdown()


@pytest.mark.asyncio
async def test_a_command_that_the_core_does_not_know_ends_the_engine_and_is_named() -> None:
    worker = RolloutWorker("w", adder)
    await worker.restart_engine()
    await worker.tell(Unheard())
    with pytest.raises(EngineDiedError, match="Unheard"):
        await asyncio.wait_for(worker.ask(Report()), DEADLINE_S)
    await worker.shutdown()
