"""Child process of an environment, run by `actors.processes.user_main`: plays episodes with the user's code. It imports
little, so that it starts fast.

Its output lines are: its setup, then for each call the start of user code, and the answer; a fatal error is its last
line. Coroutines of different episodes run concurrently; a plain `reset` or `step` blocks the process.
"""

import asyncio
import contextlib
import importlib
import inspect
import math
import os
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.processes.user_main import Parent


class EpisodeServer:
    """Plays episodes, of one round at a time."""

    def __init__(self, make: Callable[[], Any], parent: "Parent") -> None:
        self._make, self._parent = make, parent
        self._round = -1
        self._live: dict[int, tuple[Any, int]] = {}  # by episode: environment, number of actions received

    async def play(self, call: dict[str, Any]) -> None:
        """Answer one call. Any exception of user code becomes an answer too."""
        number = call["id"]
        if call["round"] != self._round:
            self._round = call["round"]
            for episode in list(self._live):
                await self._end(episode, number)
        try:
            said = await self._advance(call)
        except BaseException as error:  # only user code can cancel this task
            await self._end(call["episode"], number)
            self._parent.answer({"id": number, "error": text_of(error), "trace": _trace(error)})
            return
        self._parent.answer({"id": number, **said})

    async def _advance(self, call: dict[str, Any]) -> dict[str, Any]:
        """Play the missing actions; return the response to the last one."""
        actions, episode = call["actions"], call["episode"]
        environment, heard = self._live.pop(episode, (None, 0))
        said: dict[str, Any] = {"done": False}
        if environment is None or heard >= len(actions):
            self._begin(call["id"])
            environment, heard = self._make(), 0
            more = {"seed": call["seed"]} if "seed" in inspect.signature(environment.reset).parameters else {}
            self._begin(call["id"])
            observation = await _value(environment.reset(call["record"], **more))
            said = {"observation": messages(observation), "reward": 0.0, "done": False}
        self._live[episode] = environment, heard
        for count, action in enumerate(actions[heard:], start=heard + 1):
            if said["done"]:
                raise RuntimeError(f"played again, the episode ended after {count - 1} of {len(actions)} actions")
            self._begin(call["id"])
            answer = await _value(environment.step(action))
            said = step_of(answer)
            self._live[episode] = environment, count
        if said["done"]:
            await self._end(episode, call["id"])
        return said

    def _begin(self, number: int) -> None:
        """User code runs from now on: its deadline, for call `number`, begins."""
        self._parent.answer({"id": number, "begin": True})

    async def _end(self, episode: int, number: int) -> None:
        environment, _ = self._live.pop(episode, (None, 0))
        if hasattr(environment, "close"):
            self._begin(number)
            try:
                await _value(environment.close())
            except BaseException:
                traceback.print_exc()


async def _value(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def step_of(answer: Any) -> dict[str, Any]:
    """Return `(observation, reward, done)` as JSON. Raises TypeError, ValueError if the user's `step` returned anything
    else."""
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise TypeError(f"step returned {answer!r:.80}, not (observation, reward, done)")
    observation, reward, done = answer
    if isinstance(reward, str | bytes) or not math.isfinite(float(reward)):
        raise ValueError(f"step returned the reward {reward!r:.80}, not a finite number")
    return {"observation": messages(observation), "reward": float(reward), "done": bool(done)}


def messages(observation: Any) -> list[dict[str, str]]:
    """Convert None, a text or messages to messages."""
    if observation is None or observation == "":
        return []
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if not isinstance(observation, list) or not all(
        isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("role", "content"))
        for one in observation
    ):
        raise TypeError(f"an observation is text, or a list of messages with role and content, not {observation!r:.80}")
    return observation


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _trace(error: BaseException) -> str | None:
    """Return the frames of the user's code, outermost first, with the error; None if there are none."""
    machinery = (__file__, "<frozen importlib._bootstrap", importlib.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(machinery)]
    if not frames:
        return None
    return "".join(traceback.format_list(frames) + traceback.format_exception_only(error)).rstrip()[-8000:]


def named(place: str) -> Any:
    """What 'package.module:name' names. Raises what the import raises, and AttributeError that says what there is."""
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    try:
        return getattr(found, name)
    except AttributeError as error:
        there = [each for each, value in vars(found).items() if callable(value) and not each.startswith("_")]
        raise AttributeError(f"{error}; it has {', '.join(there[:12]) or 'nothing to call'}") from None


def prepare(setup: dict[str, Any]) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Return a factory of an episode's environment, and the setup to report: the tools' schemas."""
    if not setup["tools"]:
        factory = named(setup["factory"])
        made = factory(**setup["options"])
        for method in ("reset", "step"):
            if not callable(getattr(made, method, None)):
                raise TypeError(f"{setup['factory']} makes {type(made).__name__}, which has no method {method}")
        return lambda: factory(**setup["options"]), {"ready": []}
    from actors.environments.schemas import schema
    from actors.environments.tools import Tools

    functions = {place.partition(":")[2]: named(place) for place in setup["tools"]}
    return lambda: Tools(functions), {"ready": [schema(name, function) for name, function in functions.items()]}


async def serve(player: EpisodeServer, parent: "Parent") -> None:
    """Play calls until the parent closes its end."""
    loop, calls = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None]()

    def read() -> None:
        for call in parent.questions():
            loop.call_soon_threadsafe(calls.put_nowait, call)
        loop.call_soon_threadsafe(calls.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    tasks = set[asyncio.Task[None]]()
    while (call := await calls.get()) is not None:
        task = asyncio.create_task(player.play(call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def main(parent: "Parent", setup: dict[str, Any]) -> None:
    try:
        make, ready = prepare(setup)
    except BaseException as error:
        parent.answer({"error": text_of(error), "trace": _trace(error)})
        return
    parent.answer(ready)
    status = 0
    try:
        asyncio.Runner().run(serve(EpisodeServer(make, parent), parent))
    except BaseException as error:  # from a task that user code started: it ends the loop
        status = 1
        with contextlib.suppress(OSError):  # it may have closed all descriptors
            parent.answer({"ended": text_of(error), "trace": _trace(error)})
    os._exit(status)  # at once: no task is cancelled, and the reading thread is not awaited
