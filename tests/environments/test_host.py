"""An environment's process: many episodes, and what becomes of them when user code hangs, ends or raises."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from actors import identity
from actors.environments.host import EnvironmentHost, EnvironmentStartError, tool_schemas
from actors.identity import PRINTS_BYTES
from config.environments import EnvironmentOptions
from contracts.environments import EnvironmentAnswer, EnvironmentCall
from launch.local.job import LocalEnvironments

COUNTING = "tests.environments.played:Counting"


def call(episode: int, *actions: str, round_: int = 0) -> EnvironmentCall:
    return EnvironmentCall(round=round_, episode=episode, record={"x": 1}, seed=7, actions=actions)


def played(
    use: Callable[[EnvironmentHost], Coroutine[Any, Any, list[EnvironmentAnswer]]],
    timeout_s: float = 30.0,
    **options: Any,
) -> list[EnvironmentAnswer]:
    async def main() -> list[EnvironmentAnswer]:
        host = EnvironmentHost(EnvironmentOptions(**{"factory": COUNTING, "timeout_s": timeout_s, **options}))
        try:
            return await use(host)
        finally:
            await host.close()

    return asyncio.run(main())


def said(answer: EnvironmentAnswer) -> str:
    return "".join(message["content"] for message in answer.observation)


def test_episodes_go_side_by_side_and_are_functions_of_their_actions() -> None:
    async def use(host: EnvironmentHost) -> list[EnvironmentAnswer]:
        begun = await asyncio.gather(*(host.play(call(i)) for i in range(20)))
        heard = await asyncio.gather(*(host.play(call(i, "wait")) for i in range(20)))
        known = await host.play(call(3, "wait", "b"))
        unknown = await host.play(call(99, "wait", "b"))  # nobody has it: it is played from the beginning
        asked_again = await host.play(call(3, "wait", "b"))
        over = await host.play(call(3, "wait", "b", "c", "d"))
        return [*begun, *heard, known, unknown, asked_again, over]

    answers = played(use, options={"base": 1})
    assert {said(answer) for answer in answers[:20]} == {"1:7"}
    assert {said(answer) for answer in answers[20:40]} == {"wait:2"}
    assert [said(answer) for answer in answers[40:43]] == ["b:3"] * 3
    assert (said(answers[43]), answers[43].done, answers[43].reward) == ("d:5", True, 0.25)


@pytest.mark.parametrize(
    ("action", "timeout_s", "says"),
    [
        ("hang", 0.5, "took more than 0.5 s"),
        ("die", 30.0, "process ended 3 times (exit status 3)"),
        ("exit", 30.0, "SystemExit: enough"),
        ("task", 30.0, "process ended 3 times (SystemExit: enough of tasks"),
        ("interrupt", 30.0, "KeyboardInterrupt"),
        ("cancel", 30.0, "CancelledError: no more"),
        ("garbage", 30.0, "it was killed: it wrote something else than answers"),
        ("close", 30.0, "it closed the descriptor of its answers"),
        ("raise", 30.0, "ValueError: this is mine"),
        ("wrong", 30.0, "not (observation, reward, done)"),
    ],
)
def test_only_the_one_that_misbehaves_fails(
    action: str, timeout_s: float, says: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("actors.environments.host._END_TIMEOUT_S", 0.5)  # of the one that never ends

    async def use(host: EnvironmentHost) -> list[EnvironmentAnswer]:
        await asyncio.gather(*(host.play(call(i)) for i in range(3)))
        bad = host.play(call(1, "a", action))
        answers = await asyncio.gather(host.play(call(0, "a", "b")), bad, host.play(call(2, "a", "wait")))
        return [*answers, await host.play(call(0, "a", "b", "c"))]

    answers = played(use, timeout_s)
    assert says in (answers[1].error or "")
    assert [said(answers[i]) for i in (0, 2, 3)] == ["b:2", "wait:2", "c:3"]
    shown = f"{answers[1].error}{answers[1].trace}"
    line = {"raise": "raise ValueError", "exit": 'sys.exit("enough")', "task": 'sys.exit("enough of tasks")'}
    line |= {"interrupt": "raise KeyboardInterrupt", "cancel": "raise asyncio.CancelledError"}
    assert line.get(action, "") in shown
    assert ("tests/environments/played.py" in shown) == (action in line)
    assert action not in line or "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("at", ["make", "close"])
def test_a_factory_and_a_close_that_hang_have_a_deadline(at: str) -> None:
    async def use(host: EnvironmentHost) -> list[EnvironmentAnswer]:
        begun = await asyncio.gather(*(host.play(call(i)) for i in range(3)))
        return [*begun, await host.play(call(0, round_=1)), await host.play(call(1, round_=1))]

    answers = played(use, 0.5, factory="tests.environments.played:Hanging", options={"at": at})
    late = "took more than 0.5 s and was killed (environment.timeout_s)"
    assert [late in (answer.error or "") for answer in answers] == (
        [True] * 5 if at == "make" else [False] * 3 + [True, False]
    )


def test_a_process_that_is_forked_off_and_a_tool_that_reads_change_no_answer() -> None:
    async def use(host: EnvironmentHost) -> list[EnvironmentAnswer]:
        actions: tuple[str, ...] = ()
        answers = []
        for action in ("a", "fork", "tool", "fork"):
            actions += (action,)
            answers.append(await host.play(call(0, *actions)))
        return answers

    assert [said(answer) for answer in played(use)] == ["a:1", "fork:2", "read:3", "fork:4"]


def test_what_is_printed_between_two_answers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(host: EnvironmentHost) -> list[EnvironmentAnswer]:
        return [await host.play(call(0, *("flood",) * n)) for n in (0, 1, 2)]

    log = tmp_path / "environment.log"
    with log.open("a", encoding="utf-8") as file:
        monkeypatch.setattr(identity, "_file", file)
        played(use)
    text = log.read_text(encoding="utf-8")
    assert text.count(f"... {200_000 - PRINTS_BYTES} bytes left out") == 2
    assert len(text) < 2 * (PRINTS_BYTES + 100)


def test_a_round_forgets_the_one_before() -> None:
    async def use(host: EnvironmentHost) -> list[EnvironmentAnswer]:
        await host.play(call(0, "a", "b"))
        return [await host.play(call(0, "a", round_=1))]

    assert said(played(use)[0]) == "a:1"


def test_what_cannot_start_says_why() -> None:
    with pytest.raises(
        EnvironmentStartError, match=r"played:Missing cannot be used: AttributeError.*; it has .*Counting"
    ):
        tool_schemas(EnvironmentOptions(factory="tests.environments.played:Missing"))
    with pytest.raises(EnvironmentStartError, match="which has no method reset"):
        tool_schemas(EnvironmentOptions(factory="tests.environments.played:add", options={"a": 1}))


def test_tools_are_described_from_their_signatures() -> None:
    places = ("tests.environments.played:add", "tests.environments.played:shout")
    add, shout = (made["function"] for made in tool_schemas(EnvironmentOptions(tools=places)))
    assert (add["name"], add["description"]) == ("add", "Adds two numbers.")
    assert add["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a"],
    }
    assert shout["parameters"]["properties"] == {
        "text": {"type": "string"},
        "loud": {"type": "boolean", "nullable": True},
    }


def test_a_run_that_fails_leaves_no_call_under_way(caplog: pytest.LogCaptureFixture) -> None:
    """One call waits for its answer, another has not begun."""
    environments = LocalEnvironments(EnvironmentOptions(factory=COUNTING))
    environments.play(0, call(0))
    assert [key for key, _ in environments.look()] == [0]
    environments.play(1, call(1))
    environments.play(2, call(2, "tool", "wait", "wait"))
    assert [key for key, _ in environments.look()] == [1]
    environments.play(3, call(3))
    assert len(environments._asked) == 2
    environments.close()
    del environments
    gc.collect()
    assert "destroyed" not in caplog.text
