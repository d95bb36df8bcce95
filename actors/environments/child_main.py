"""What an environment's process does (`actors.processes.user_main` runs it): plays episodes with the user's code.
Light, so that it starts fast.

Its lines are what it is ready with, then for each call that user code begins to run, and its answer; if it ends by an
error, that is its last line. Coroutines of different episodes run side by side; a plain `reset` or `step` has the
process to itself.
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
    """Plays the episodes of one round after the other."""

    def __init__(self, make: Callable[[], Any], parent: "Parent") -> None:
        self._make, self._parent = make, parent
        self._round = -1
        self._live: dict[int, tuple[Any, int]] = {}  # by episode: its environment, and how many actions it has heard

    async def play(self, call: dict[str, Any]) -> None:
        """Answer one call. What user code raises is an answer too, whatever it is."""
        number = call["id"]
        if call["round"] != self._round:
            self._round = call["round"]
            for episode in list(self._live):
                await self._end(episode, number)
        try:
            said = await self._advance(call)
        except BaseException as error:  # nobody but user code cancels this task
            await self._end(call["episode"], number)
            self._parent.answer({"id": number, "error": text_of(error), "trace": _trace(error)})
            return
        self._parent.answer({"id": number, **said})

    async def _advance(self, call: dict[str, Any]) -> dict[str, Any]:
        """Play what is missing of the actions; what was said to the last one."""
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
    """`(observation, reward, done)` as JSON. Raises TypeError, ValueError: the user's `step` returned something
    else."""
    if not isinstance(answer, tuple) or len(answer) != 3:
        raise TypeError(f"step returned {answer!r:.80}, not (observation, reward, done)")
    observation, reward, done = answer
    if isinstance(reward, str | bytes) or not math.isfinite(float(reward)):
        raise ValueError(f"step returned the reward {reward!r:.80}, not a finite number")
    return {"observation": messages(observation), "reward": float(reward), "done": bool(done)}


def messages(observation: Any) -> list[dict[str, str]]:
    """None, a text or messages, as messages."""
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
    """The frames of the user's code, outermost first, with the error; None if there are none."""
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
    """What makes an episode's environment, and what to say of it: the tools' schemas."""
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


async def serve(make: Callable[[], Any], parent: "Parent") -> None:
    """Until nothing more is asked."""
    loop, calls = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None]()

    def read() -> None:
        for call in parent.questions():
            loop.call_soon_threadsafe(calls.put_nowait, call)
        loop.call_soon_threadsafe(calls.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    player, tasks = EpisodeServer(make, parent), set[asyncio.Task[None]]()
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
        asyncio.Runner().run(serve(make, parent))
    except BaseException as error:  # of a task that user code started: it ends the loop
        status = 1
        with contextlib.suppress(OSError):  # it may have closed all descriptors
            parent.answer({"ended": text_of(error), "trace": _trace(error)})
    os._exit(status)  # at once: no task is cancelled, and nobody waits for the thread that reads
