"""One process of a user's environment, on an event loop: calls in, answers out, many episodes at once. No Ray.

Owns the pipe, the deadlines and the replacement of the process. The process says whose code it begins to run: factory,
`reset`, `step` or `close`. Where one call hangs, or ends the process, that call fails, and the others are asked again
of a new process, which plays their episodes up to there. Where several ran side by side, they run one after the
other first, which shows whose fault it was. A process that writes anything else than answers is replaced like one that
ends.
"""

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.identity import ChildPrints, ended
from actors.processes.modules import folders, looked_in
from config.environments import EnvironmentOptions
from contracts.environments import Answer, Call

_SCRIPT = Path(__file__).with_name("child_main.py")
START_TIMEOUT_S = 120.0  # imports of the user's module on a busy machine
_END_TIMEOUT_S = 5.0  # from the end of a process's answers to its exit status
_MAX_LOSSES = 3  # processes that one call may lose
_GARBAGE = "wrote something else than answers to the descriptor of its answers"
_LINE_BYTES = 1 << 28  # of an answer


class EnvironmentStartError(RuntimeError):
    """The process does not start: a missing module, or an environment that cannot be made."""


@dataclass(slots=True, eq=False)
class _Open:
    """A call that is not answered yet."""

    call: Call
    future: "asyncio.Future[Answer]"
    alarm: asyncio.TimerHandle | None = None  # of user code that runs now
    losses: int = 0
    held: bool = False  # its turn to run alone comes

    def rest(self) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None


class EnvironmentHost:
    """Of one event loop. The process starts with the first call."""

    def __init__(self, options: EnvironmentOptions) -> None:
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self._prints: ChildPrints | None = None  # of the process
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._ids = itertools.count()
        self._open: dict[int, _Open] = {}
        self._one_by_one: asyncio.Task[None] | None = None
        self.schemas: list[dict[str, Any]] = []  # of the tools, once it has started

    async def play(self, call: Call) -> Answer:
        """Bounded by timeout_s for each reset and step that runs, and by `START_TIMEOUT_S`. Never raises: what fails is
        the answer's `error`."""
        number = next(self._ids)
        entry = self._open[number] = _Open(call, asyncio.get_running_loop().create_future())
        try:
            while self._one_by_one is not None:
                await asyncio.wait([self._one_by_one])
            await self.start()
            self._send(number, entry)
            return await entry.future
        except EnvironmentStartError as error:
            return Answer(error=str(error))
        finally:
            entry.rest()
            self._open.pop(number, None)

    async def start(self) -> None:
        """Have a process. Raises EnvironmentStartError, with the frames of the user's code."""
        async with self._starting:
            if self._process is not None:
                return
            setup = {
                "factory": self._options.factory,
                "options": self._options.options,
                "tools": self._options.tools,
                "path": folders(),
            }
            prints = ChildPrints()
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", str(_SCRIPT), json.dumps(setup)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=prints.writer,
                    start_new_session=True,  # Ctrl-C at the terminal is for the run, which then closes its children
                    limit=_LINE_BYTES,
                )
            finally:
                prints.started()
            self._prints = prints
            asyncio.get_running_loop().add_reader(prints.reader, self._take_prints)
            assert process.stdout is not None
            try:
                line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
                said: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
                if not said.keys() & {"error", "ready"}:
                    raise ValueError
            except TimeoutError:
                said = {"error": f"its process did not start within {START_TIMEOUT_S:g} s"}
            except (ValueError, AttributeError):
                said = {"error": f"its process {_GARBAGE}"}
            if "error" in said:
                _kill(process)
                await process.wait()
                self._stop_prints()
                shown = f"\n{said['trace']}" if said.get("trace") else ""
                where = self._options.factory or ", ".join(self._options.tools)
                said_of = f"{said['error']}{looked_in(str(said['error']))}"
                raise EnvironmentStartError(f"{where} cannot be used: {said_of}{shown}")
            self.schemas = said["ready"]
            self._process, self._reader = process, asyncio.create_task(self._read(process))

    async def close(self) -> None:
        """End the process; what is open is not answered any more."""
        for task in (self._reader, self._one_by_one):
            if task is not None:
                task.cancel()
        if self._process is not None:
            _kill(self._process)
            await self._process.wait()
        self._stop_prints()

    def _take_prints(self) -> None:
        if self._prints is not None and not self._prints.take():
            asyncio.get_running_loop().remove_reader(self._prints.reader)

    def _stop_prints(self) -> None:
        """Of a process that has ended."""
        if self._prints is not None:
            asyncio.get_running_loop().remove_reader(self._prints.reader)
            self._prints.close()
            self._prints = None

    def _send(self, number: int, entry: _Open) -> None:
        call = entry.call
        asked = {
            "id": number,
            "round": call.round,
            "episode": call.episode,
            "record": dict(call.record),
            "seed": call.seed,
            "actions": call.actions,
        }
        packed = pickle.dumps(asked, protocol=pickle.HIGHEST_PROTOCOL)
        if self._process is not None and self._process.stdin is not None and not entry.future.done():
            with contextlib.suppress(OSError, RuntimeError):
                self._process.stdin.write(len(packed).to_bytes(8, "little") + packed)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        last = ""  # of the process: why it ends
        try:
            while line := await process.stdout.readline():
                said = json.loads(line)
                if "ended" in said:
                    last = _with_trace(said["ended"], said["trace"])
                else:
                    self._heard(process, said)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            last = f"it was killed: it {_GARBAGE}"
            _kill(process)
        try:
            last = last or ended(await asyncio.wait_for(process.wait(), _END_TIMEOUT_S))
        except TimeoutError:
            last = ended(None)
            _kill(process)
        await process.wait()
        self._stop_prints()
        await self._lost(last)

    def _heard(self, process: asyncio.subprocess.Process, said: dict[str, Any]) -> None:
        """One line of the process. Raises what a line raises that is none of its own."""
        answer = None if "begin" in said else _answer(said)
        entry = self._open.get(said["id"])
        if answer is not None and self._prints is not None:
            self._prints.renew()
        if entry is None:
            return
        entry.rest()
        if answer is None:
            loop = asyncio.get_running_loop()
            entry.alarm = loop.call_later(self._options.timeout_s, self._late, process, entry)
        elif not entry.future.done():
            entry.future.set_result(answer)

    def _late(self, process: asyncio.subprocess.Process, entry: _Open) -> None:
        """Its code has run for too long, or code of another one beside it that never lets go."""
        alone = all(other is entry or other.alarm is None for other in self._open.values())
        if alone and not entry.future.done():
            text = (
                f"the environment took more than {self._options.timeout_s:g} s and was killed (environment.timeout_s)"
            )
            entry.future.set_result(Answer(error=text))
        _kill(process)

    async def _lost(self, how: str) -> None:
        """The process has ended, `how` is for people. All that is open is asked again, those whose code ran one after
        the other."""
        self._process = None
        rest, ran = dict[int, _Open](), dict[int, _Open]()
        for number, entry in self._open.items():
            if entry.future.done() or entry.held:
                continue
            (rest if entry.alarm is None else ran)[number] = entry
            entry.losses += entry.alarm is not None
            entry.rest()
            if entry.losses >= _MAX_LOSSES:
                text = f"the environment's process ended {entry.losses} times ({how})"
                entry.future.set_result(Answer(error=text))
        if len(ran) > 1:
            for entry in (*ran.values(), *rest.values()):
                entry.held = True
            self._one_by_one = asyncio.create_task(self._alone(ran, rest))
        else:
            await self._again(ran | rest)

    async def _alone(self, suspects: dict[int, _Open], rest: dict[int, _Open]) -> None:
        for number, entry in suspects.items():
            entry.held = False
            await self._again({number: entry})
            await asyncio.wait([entry.future])
        for entry in rest.values():
            entry.held = False
        await self._again(rest)
        self._one_by_one = None

    async def _again(self, entries: dict[int, _Open]) -> None:
        for number, entry in entries.items():
            try:
                await self.start()
            except EnvironmentStartError as error:
                if not entry.future.done():
                    entry.future.set_result(Answer(error=str(error)))
            else:
                self._send(number, entry)


def tool_schemas(options: EnvironmentOptions) -> list[dict[str, Any]]:
    """Start a process and end it: what chat templates are told of the tools; nothing for a factory. Raises
    EnvironmentStartError, which says what is wrong with the user's code."""

    async def ask() -> list[dict[str, Any]]:
        host = EnvironmentHost(options)
        try:
            await host.start()
        finally:
            await host.close()
        return host.schemas

    return asyncio.run(ask())


def _answer(said: dict[str, Any]) -> Answer:
    if "error" in said:
        return Answer(error=said["error"], trace=said["trace"])
    return Answer(observation=said["observation"], reward=said["reward"], done=said["done"])


def _with_trace(text: str, trace: str | None) -> str:
    return text if trace is None else f"{text}\n{trace}\n"


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the leader of its session, and what it has started
