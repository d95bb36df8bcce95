"""Tool calls as models write them, well and badly."""

import asyncio
import json
from typing import Any

import pytest

from actors.environments.formats import format_fault
from actors.environments.tools import Tools, calls_in
from actors.rewards.callables import member
from actors.rewards.grader import EnvironmentTerm
from contracts.environments import Said
from contracts.rewards import GradeItem
from tests.environments.played import add, shout

TOOLS = Tools({"add": add, "shout": shout, "now": lambda: "noon"})
FORM = 'error: a call must be JSON like {"name": "...", "arguments": {...}}'


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def step(text: str) -> tuple[list[str], bool]:
    messages, reward, done = asyncio.run(TOOLS.step(text))
    assert reward == 0.0
    assert {message["role"] for message in messages} <= {"tool"}
    return [message["content"] for message in messages], done


def test_calls_are_answered_in_their_order_and_a_turn_without_one_ends() -> None:
    assert step(f"I add. {call('add', a=1)} and {call('shout', text='hm')}") == (["3", '{"said": "HM"}'], False)
    assert step("it is 3") == ([], True)


def test_one_that_is_not_closed_counts() -> None:
    assert calls_in("<tool_call>{1}</tool_call> x <tool_call>{2}") == ["{1}", "{2}"]


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (r'<tool_call>{"name": "add", "arguments": "{\"a\": 3}"}</tool_call>', ["5"]),
        ('<tool_call>{"name": "shout", "arguments": {"text": "a\nb"}}</tool_call>', ['{"said": "A\\nB"}']),
        ('<tool_call>{"name": "now", "arguments": null}</tool_call>', ["noon"]),
        ('<tool_call>{"name": "now", "arguments": ""}</tool_call>', [FORM]),
        ('<tool_call>{"name": "now"}</tool_call>', ["noon"]),
        ('<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>', ["3"]),
        (f"{call('shout', text='a</tool_call>b')}{call('add', a=1)}", ['{"said": "A</TOOL_CALL>B"}', "3"]),
        (f"<tool_call>{{not JSON}}</tool_call>{call('add', a=1)}", [FORM, "3"]),
        (f"<tool_call>{{not JSON {call('add', a=1)}", [FORM, "3"]),
        (f"<think>\nor {call('add', a=1)}?\n</think>\n{call('add', a=2)}", ["4"]),
        (f"so {call('add', a=1)}?\n</think>\n{call('add', a=2)}", ["4"]),  # the prompt ended with <think>
        (f"<tool_call>, I write </think> {call('add', a=2)}", ["4"]),
        (f"<think>not done {call('add', a=1)}", []),
        (call("shout", text="</think>"), ['{"said": "</THINK>"}']),
    ],
)
def test_calls_as_models_write_them(text: str, answers: list[str]) -> None:
    assert step(text) == (answers, not answers)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<tool_call>add 1 and 2</tool_call>", "error: a call must be JSON"),
        ("<tool_call>[1]</tool_call>", "error: a call must be JSON"),
        ('<tool_call>{"name": "add", "arguments": "1"}</tool_call>', "error: a call must be JSON"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}} more</tool_call>', "error: a call must be JSON"),
        ('<tool_call>{"name": ["add"], "arguments": {"a": 1}}</tool_call>', "error: a call must be JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "error: a call must be JSON"),
        (call("sub", a=1), "error: there is no tool 'sub', only add, shout, now"),
        (call("add", c=1), "error: TypeError"),
        (call("shout", text="x", loud=False), "error: RuntimeError: never"),
    ],
)
def test_what_is_wrong_is_told_to_the_model(text: str, says: str) -> None:
    (answer,), done = step(text)
    assert answer.startswith(says)
    assert not done


def test_formats_that_are_not_read_are_named() -> None:
    assert format_fault(None) == ""
    assert format_fault("{% if tools %}<tool_call>{{ tool_call | tojson }}</tool_call>") == ""
    assert "no tools" in format_fault("{{ messages }}")
    assert "another format" in format_fault("{% if tools %}[TOOL_CALLS]")
    assert "XML" in format_fault("{% if tools %}<tool_call><function=x>")


def test_a_reward_function_is_given_the_turns() -> None:
    said = (Said("assistant", "2 + 2?", 0.5), Said("tool", "4"))
    item = GradeItem(prompt="p", response="r", record={}, turns=said)
    assert member(item)["turns"] == [
        {"role": "assistant", "text": "2 + 2?", "reward": 0.5},
        {"role": "tool", "text": "4", "reward": None},
    ]
    assert EnvironmentTerm().score(item).value == 0.5
