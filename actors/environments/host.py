"""One process of a user's environment, on an event loop: calls in, answers out, many episodes at once. No Ray.

Enforces the deadlines and replaces the process; its pipes are `actors.processes.user_code`. The process reports when it
runs user code: factory, `reset`, `step` or `close`. If one call hangs or ends the process, that call fails. The others
are repeated on a new process, which replays their episodes. If several ran concurrently, they first run one by one,
which shows the faulty one. A process that writes anything but answers is replaced too.
"""

import asyncio
import contextlib
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.processes.modules import looked_in
from actors.processes.user_code import UserProcess, framed
from config.environments import EnvironmentOptions
from contracts.environments import EnvironmentAnswer, EnvironmentCall

_SCRIPT = Path(__file__).with_name("child_main.py")
START_TIMEOUT_S = 120.0  # for imports of the user's module on a busy machine
_END_TIMEOUT_S = 5.0  # between the end of a process's answers and its exit status
_MAX_LOSSES = 3  # processes that one call may lose before it fails
_GARBAGE = "wrote something else than answers to the descriptor of its answers"


class EnvironmentStartError(RuntimeError):
    """The process does not start: a missing module, or an environment that cannot be made."""


@dataclass(slots=True, eq=False)
class _Open:
    """A pending call."""

    call: EnvironmentCall
    future: "asyncio.Future[EnvironmentAnswer]"
    alarm: asyncio.TimerHandle | None = None  # deadline of running user code
    losses: int = 0
    held: bool = False  # it waits for its turn to run alone

    def rest(self) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None


class EnvironmentHost:
    """Environment process of one event loop. The process starts with the first call."""

    def __init__(self, options: EnvironmentOptions) -> None:
        self._options = options
        self._process: UserProcess | None = None
        self._questions: asyncio.WriteTransport | None = None  # of the process
        self._reader: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._ids = itertools.count()
        self._open: dict[int, _Open] = {}
        self._one_by_one: asyncio.Task[None] | None = None
        self.schemas: list[dict[str, Any]] = []  # of the tools, once it has started

    async def play(self, call: EnvironmentCall) -> EnvironmentAnswer:
        """Play one call. Bounded by timeout_s for each reset and step, and by `START_TIMEOUT_S`. Never raises: failures
        are the answer's `error`."""
        number = next(self._ids)
        entry = self._open[number] = _Open(call, asyncio.get_running_loop().create_future())
        try:
            while self._one_by_one is not None:
                await asyncio.wait([self._one_by_one])
            await self.start()
            self._send(number, entry)
            return await entry.future
        except EnvironmentStartError as error:
            return EnvironmentAnswer(error=str(error))
        finally:
            entry.rest()
            self._open.pop(number, None)

    async def start(self) -> None:
        """Start a process if there is none. Raises EnvironmentStartError, with the frames of the user's code."""
        async with self._starting:
            if self._process is not None:
                return
            setup = {
                "factory": self._options.factory,
                "options": self._options.options,
                "tools": self._options.tools,
            }
            process, lines = UserProcess(_SCRIPT, setup), asyncio.Queue[bytes]()
            loop = asyncio.get_running_loop()
            loop.add_reader(process.answers, _take_answers, process, lines)
            loop.add_reader(process.prints.reader, _take_prints, process)
            try:
                self._questions, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.questions)
                line = await asyncio.wait_for(lines.get(), START_TIMEOUT_S)
                said: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
                if not said.keys() & {"error", "ready"}:
                    raise ValueError
            except asyncio.CancelledError:
                self._stop(process)
                raise
            except TimeoutError:
                said = {"error": f"its process did not start within {START_TIMEOUT_S:g} s"}
            except (ValueError, AttributeError):
                said = {"error": f"its process {_GARBAGE}"}
            if "error" in said:
                await self._end(process)
                shown = f"\n{said['trace']}" if said.get("trace") else ""
                where = self._options.factory or ", ".join(self._options.tools)
                said_of = f"{said['error']}{looked_in(str(said['error']))}"
                raise EnvironmentStartError(f"{where} cannot be used: {said_of}{shown}")
            self.schemas = said["ready"]
            self._process, self._reader = process, asyncio.create_task(self._read(process, lines))

    async def close(self) -> None:
        """End the process; pending calls stay unanswered."""
        tasks = [task for task in (self._reader, self._one_by_one) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._process is not None:
            await self._end(self._process)

    async def _end(self, process: UserProcess) -> None:
        """Kill the process, if it still runs, and close its pipes."""
        process.kill()
        await asyncio.to_thread(process.wait)
        self._stop(process)

    def _stop(self, process: UserProcess) -> None:
        """Same as `_end`, without a thread: a killed process ends within milliseconds."""
        loop = asyncio.get_running_loop()
        for descriptor in (process.answers, process.prints.reader):
            loop.remove_reader(descriptor)
        if self._questions is not None:
            if not self._questions.is_closing():  # it closes the pipe, also by itself once the process has ended
                self._questions.abort()
            self._questions = None
            process.detach()
        process.close()

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
        if self._process is not None and self._questions is not None and not entry.future.done():
            with contextlib.suppress(OSError, RuntimeError):
                self._questions.write(framed(asked))

    async def _read(self, process: UserProcess, lines: "asyncio.Queue[bytes]") -> None:
        last = ""  # the process's reason to end
        try:
            while line := await lines.get():
                said = json.loads(line)
                if "ended" in said:
                    last = _with_trace(said["ended"], said["trace"])
                else:
                    self._heard(process, said)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            last = f"it was killed: it {_GARBAGE}"
        last = last or await asyncio.to_thread(process.how_it_ended, _END_TIMEOUT_S)
        await self._end(process)
        await self._lost(last)

    def _heard(self, process: UserProcess, said: dict[str, Any]) -> None:
        """Handle one line of the process. Raises various errors for invalid lines."""
        answer = None if "begin" in said else _answer(said)
        entry = self._open.get(said["id"])
        if answer is not None:
            process.prints.renew()
        if entry is None:
            return
        entry.rest()
        if answer is None:
            loop = asyncio.get_running_loop()
            entry.alarm = loop.call_later(self._options.timeout_s, self._late, process, entry)
        elif not entry.future.done():
            entry.future.set_result(answer)

    def _late(self, process: UserProcess, entry: _Open) -> None:
        """User code has run too long, or another call's code blocks the process."""
        alone = all(other is entry or other.alarm is None for other in self._open.values())
        if alone and not entry.future.done():
            text = (
                f"the environment took more than {self._options.timeout_s:g} s and was killed (environment.timeout_s)"
            )
            entry.future.set_result(EnvironmentAnswer(error=text))
        process.kill()

    async def _lost(self, how: str) -> None:
        """Handle the end of the process; `how` is for messages. All pending calls are repeated, those with running user
        code one by one."""
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
                entry.future.set_result(EnvironmentAnswer(error=text))
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
                    entry.future.set_result(EnvironmentAnswer(error=str(error)))
            else:
                self._send(number, entry)


def tool_schemas(options: EnvironmentOptions) -> list[dict[str, Any]]:
    """Return the tools' schemas for chat templates, from a temporary process; [] for a factory. Raises
    EnvironmentStartError with the fault of the user's code."""

    async def ask() -> list[dict[str, Any]]:
        host = EnvironmentHost(options)
        try:
            await host.start()
        finally:
            await host.close()
        return host.schemas

    return asyncio.run(ask())


def _answer(said: dict[str, Any]) -> EnvironmentAnswer:
    if "error" in said:
        return EnvironmentAnswer(error=said["error"], trace=said["trace"])
    return EnvironmentAnswer(observation=said["observation"], reward=said["reward"], done=said["done"])


def _with_trace(text: str, trace: str | None) -> str:
    return text if trace is None else f"{text}\n{trace}\n"


def _take_answers(process: UserProcess, lines: "asyncio.Queue[bytes]") -> None:
    """Queue complete lines, at the end the rest, then b""."""
    more = process.read()
    while (line := process.line()) is not None:
        lines.put_nowait(line)
    if not more:
        asyncio.get_running_loop().remove_reader(process.answers)
        if process.received:
            lines.put_nowait(bytes(process.received))
        lines.put_nowait(b"")


def _take_prints(process: UserProcess) -> None:
    if not process.prints.take():
        asyncio.get_running_loop().remove_reader(process.prints.reader)
