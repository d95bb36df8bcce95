"""Schemas of tools: transformers' where that accepts the function, else as much as the function says."""

import enum
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from transformers.utils import get_json_schema

from actors.environments.schemas import schema


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


def plain(a: int, b: float = 1.0, c: str = "", d: bool = False) -> float:
    """Adds them.

    Carefully, and in
    order.

    Args:
        a: the first
        b: the second, which has a description
            of two lines: really
        c: a text (choices: ["x", " y "])
        d: whether

    Returns:
        The sum.

    Raises:
        ValueError: never
    """
    return a + b


def unions(a: int | str, b: int | None, c: list[int] | None, d: list[int] | dict[str, int] | None) -> None:
    """Says.

    Args:
        a: a
        b: b
        c: c
        d: d
    """


def containers(a: list, b: list[list[str]], c: dict, d: dict[str, list[float]], e: tuple, f: tuple[int, str]) -> list:
    """Says.

    Args:
        a: a
        b: b
        c: c
        d: d
        e: e
        f: f
    """
    return a


def choices(
    a: Literal["x", "y"], b: Literal[1, "x", None], c: Colour, d: list[Colour] | None = None, e: Any = None
) -> str:
    """Says.

    Args:
        a: a
        b: b
        c: c
        d: d
        e: e
    """
    return ""


def nothing() -> dict[str, int]:
    """What it is."""
    return {}


def annotated(a: Annotated[int, "metres"], b: int | float | list[int] = 0) -> tuple[int, str]:
    """Lines.

    Args:
        a: first line
            second line

        b: behind a blank one
    """
    return 1, ""


@pytest.mark.parametrize("function", [plain, unions, containers, choices, nothing, annotated])
def test_what_transformers_accepts_is_described_as_it_does(function: Callable[..., Any]) -> None:
    assert schema(function.__name__, function) == get_json_schema(function)


def undescribed(x, where: Colour | bytes, size: tuple[int, ...] = (), *rest: int, **more: Any) -> None:  # type: ignore[no-untyped-def]
    """Does it.

    Args:
        size (tuple): of each (choices: [not JSON])
        other: no argument
    """


def test_what_transformers_refuses_says_what_it_can() -> None:
    assert schema("do", undescribed)["function"] == {
        "name": "do",
        "description": "Does it.",
        "parameters": {
            "type": "object",
            "properties": {
                "x": {},
                "where": {"anyOf": [{"type": "string", "enum": ["red", "blue"]}, {}]},
                "size": {
                    "type": "array",
                    "items": {"type": "integer"},
                    "description": "of each (choices: [not JSON])",
                },
            },
            "required": ["x", "where"],
        },
        "return": {"type": "null"},
    }
