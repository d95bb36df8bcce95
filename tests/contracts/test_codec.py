"""Values of every type that the codec knows come back as they were, from columns and from one piece of memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from contracts.codec import Codec, StandIn, from_bytes, to_bytes


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Part:
    tokens: NDArray[np.int32]
    weights: NDArray[np.float32] | None = None


@dataclass
class Whole:
    flag: bool
    number: int
    value: float
    text: str
    colour: Colour
    kind: Literal["a", "b"]
    part: Part
    parts: list[Part]
    pairs: tuple[tuple[int, str], ...]
    numbers: frozenset[int]
    names: Mapping[int, str]
    nested: dict[str, list[float]]
    either: float | NDArray[np.float64]
    any_of: int | str | None
    maybe: Part | None
    items: Sequence[bool] = ()
    more: dict[str, Part] = field(default_factory=dict)


PARTS = st.builds(
    Part,
    arrays(np.int32, st.integers(0, 5)),
    st.none() | arrays(np.float32, st.integers(0, 5), elements=st.floats(width=32)),
)
INTS = st.integers(-(2**63), 2**63 - 1)
WHOLES = st.builds(
    Whole,
    flag=st.booleans(),
    number=INTS,
    value=st.floats(),
    text=st.text(st.characters()),
    colour=st.sampled_from(Colour),
    kind=st.sampled_from(["a", "b"]),
    part=PARTS,
    parts=st.lists(PARTS, max_size=3),
    pairs=st.lists(st.tuples(INTS, st.text()), max_size=3).map(tuple),
    numbers=st.frozensets(INTS, max_size=3),
    names=st.dictionaries(INTS, st.text(), max_size=3),
    nested=st.dictionaries(st.text(), st.lists(st.floats(), max_size=2), max_size=3),
    either=st.floats() | arrays(np.float64, st.integers(0, 4)),
    any_of=INTS | st.text() | st.none(),
    maybe=st.none() | PARTS,
    items=st.lists(st.booleans(), max_size=3).map(tuple),
    more=st.dictionaries(st.text(), PARTS, max_size=2),
)
CODEC = Codec(Whole)


def exact(value: Any) -> Any:
    """Comparable, with types and bits."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return float, "nan" if math.isnan(value) else value.hex()
    if is_dataclass(value):
        return type(value), [exact(getattr(value, one.name)) for one in fields(value)]
    if isinstance(value, dict):
        return dict, [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [exact(item) for item in value]
    return type(value), value


@given(st.lists(WHOLES, max_size=4))
def test_every_type_comes_back(given_: list[Whole]) -> None:
    columns = CODEC.pack(given_)
    assert exact(CODEC.unpack(columns)) == exact(given_)
    assert exact(CODEC.unpack(from_bytes(to_bytes(columns)))) == exact(given_)


@given(st.lists(WHOLES, min_size=1, max_size=2), st.data())
def test_columns_that_lack_a_value_are_refused(given_: list[Whole], data: st.DataObject) -> None:
    columns = CODEC.pack(given_)
    name = data.draw(st.sampled_from([name for name, column in columns.items() if len(column)]))
    if name == "count":
        columns[name] = columns[name] + 1
    else:
        columns[name] = columns[name][:-1]
    with pytest.raises((ValueError, KeyError)):
        CODEC.unpack(columns)


def test_arrays_are_copies_on_the_way_in_and_views_on_the_way_out() -> None:
    codec = Codec(Part)
    part = Part(np.arange(3, dtype=np.int32))
    columns = codec.pack([part])
    (found,) = codec.unpack(columns)
    assert not np.shares_memory(columns["tokens"], part.tokens)
    assert np.shares_memory(found.tokens, columns["tokens"])
    assert columns.keys() == {"count", "tokens", "tokens.lengths", "weights.which", "weights.0", "weights.0.lengths"}


def test_what_is_not_stored_is_stood_for_by_its_key() -> None:
    known = {3: Part(np.arange(3, dtype=np.int32))}
    codec = Codec(Holder, {Part: StandIn(int, lambda part: len(part.tokens), lambda key: known[key])})
    columns = codec.pack([Holder(known[3])])
    assert columns["part"].tolist() == [3]
    assert codec.unpack(columns)[0].part is known[3]
    with pytest.raises(KeyError):
        codec.unpack(codec.pack([Holder(Part(np.arange(2, dtype=np.int32)))]))


@dataclass
class Holder:
    part: Part


@dataclass
class Unknown:
    anything: dict[str, Any]


def test_a_type_without_columns_is_named() -> None:
    with pytest.raises(TypeError, match=r"anything\.values is of type typing\.Any"):
        Codec(Unknown)
    with pytest.raises(TypeError, match="either"):
        CODEC.pack([wrong()])
    with pytest.raises(OverflowError):
        Codec(Number).pack([Number(2**64)])


@dataclass
class Number:
    value: int


def wrong() -> Any:
    return Whole(
        flag=True,
        number=1,
        value=1.0,
        text="",
        colour=Colour.RED,
        kind="a",
        part=Part(np.zeros(0, np.int32)),
        parts=[],
        pairs=(),
        numbers=frozenset(),
        names={},
        nested={},
        either="neither",
        any_of=None,
        maybe=None,
    )
