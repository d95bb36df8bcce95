"""Convert dataclass values to flat arrays and back: one column per field, from the field types alone.

A nested dataclass has its own columns, named by the path to the field. A variable-length field has a column of lengths
and a column of items. A thousand responses thus become a few dozen arrays, without one object per response. Numbers
keep every bit and their type. No files and no knowledge of what the values mean.

Types: bool, int (64 bit), float, str, Enum, Literal of str, NDArray (one axis), list, tuple, frozenset, Mapping, unions
and dataclasses of these.
"""

import json
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

Columns = dict[str, NDArray[Any]]
T = TypeVar("T")
_ALIGNED_BYTES = 64
Made = type[list[Any]] | type[tuple[Any, ...]] | type[frozenset[Any]]
_SEQUENCES: Mapping[Any, Made] = {
    list: list,
    tuple: tuple,
    frozenset: frozenset,
    Sequence: tuple,
}


@dataclass(frozen=True, slots=True)
class StandIn:
    """Rule for storing a type by a substitute, such as its key."""

    kind: type
    of: Callable[[Any], Any]
    back: Callable[[Any], Any]  # raises KeyError for an unknown substitute


class Codec(Generic[T]):
    """Codec for values of one dataclass. `stand_ins` maps each type that is not stored itself to its substitute."""

    def __init__(self, kind: type[T], stand_ins: Mapping[type, StandIn] | None = None) -> None:
        """Raises TypeError for a field of an unsupported type."""
        self._column = _column("", kind, stand_ins or {})

    def pack(self, values: Sequence[T]) -> Columns:
        """Return the columns of `values`; the arrays are copies."""
        columns: Columns = {"count": np.array([len(values)], np.int64)}
        self._column.write(list(values), columns)
        return columns

    def unpack(self, columns: Columns) -> list[T]:
        """Return the packed values; their arrays are views. Raises KeyError or ValueError for columns that `pack` did
        not make."""
        return self._column.read(columns, int(columns["count"][0]))


def to_bytes(columns: Columns) -> NDArray[np.uint8]:
    """Pack all columns into one buffer: length of a JSON header, the header, then each array, aligned to 64 bytes."""
    head = json.dumps([(name, array.dtype.str, len(array)) for name, array in columns.items()]).encode()
    start = _aligned(8 + len(head))
    memory = np.zeros(start + sum(_aligned(array.nbytes) for array in columns.values()), np.uint8)
    memory[:8] = np.array([len(head)], "<i8").view(np.uint8)
    memory[8 : 8 + len(head)] = np.frombuffer(head, np.uint8)
    for array in columns.values():
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
        start += _aligned(array.nbytes)
    return memory


def from_bytes(memory: NDArray[np.uint8]) -> Columns:
    """Return the columns packed by `to_bytes`, as views of `memory`."""
    length = int(memory[:8].view("<i8")[0])
    start, columns = _aligned(8 + length), Columns()
    for name, dtype, count in json.loads(memory[8 : 8 + length].tobytes()):
        size = count * np.dtype(dtype).itemsize
        columns[name] = memory[start : start + size].view(dtype)
        start += _aligned(size)
    return columns


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES


class _Column(ABC):
    """Column of values of one type under one name."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def holds(self, value: Any) -> bool:
        """Return whether a union's value belongs to this alternative."""

    @abstractmethod
    def write(self, values: list[Any], columns: Columns) -> None: ...

    @abstractmethod
    def read(self, columns: Columns, count: int) -> list[Any]: ...

    def _get(self, columns: Columns, count: int, suffix: str = "") -> NDArray[Any]:
        found = columns[self.name + suffix]
        if len(found) != count:
            raise ValueError(f"column {self.name + suffix} has {len(found)} values for {count}")
        return found


class _Scalars(_Column):
    """bool, int or float."""

    def __init__(self, name: str, kind: type, dtype: Any) -> None:
        super().__init__(name)
        self._kind, self._dtype = kind, dtype

    def holds(self, value: Any) -> bool:
        return isinstance(value, self._kind) or (self._kind is float and isinstance(value, int))

    def write(self, values: list[Any], columns: Columns) -> None:
        columns[self.name] = np.array(values, self._dtype)

    def read(self, columns: Columns, count: int) -> list[Any]:
        return list(self._get(columns, count).tolist())


class _Nothing(_Column):
    """None."""

    def holds(self, value: Any) -> bool:
        return value is None

    def write(self, values: list[Any], columns: Columns) -> None:
        """None needs no column."""

    def read(self, columns: Columns, count: int) -> list[Any]:
        return [None] * count


class _Texts(_Column):
    """str, or an Enum or Literal of str."""

    def __init__(self, name: str, kind: type) -> None:
        super().__init__(name)
        self._kind = kind

    def holds(self, value: Any) -> bool:
        return isinstance(value, self._kind)

    def write(self, values: list[Any], columns: Columns) -> None:
        plain = [value.value if isinstance(value, Enum) else value for value in values]
        packed = [text.encode("utf-8", "surrogatepass") for text in plain]
        columns[f"{self.name}.lengths"] = np.array([len(text) for text in packed], np.int64)
        columns[self.name] = np.frombuffer(b"".join(packed), np.uint8)

    def read(self, columns: Columns, count: int) -> list[Any]:
        parts = _parts(self._get(columns, count, ".lengths"), columns[self.name])
        return [self._kind(part.tobytes().decode("utf-8", "surrogatepass")) for part in parts]


class _Arrays(_Column):
    """NDArray of one axis."""

    def __init__(self, name: str, dtype: Any) -> None:
        super().__init__(name)
        self._dtype = dtype

    def holds(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def write(self, values: list[Any], columns: Columns) -> None:
        columns[f"{self.name}.lengths"] = np.array([len(array) for array in values], np.int64)
        columns[self.name] = np.concatenate([np.empty(0, self._dtype), *values])

    def read(self, columns: Columns, count: int) -> list[Any]:
        return _parts(self._get(columns, count, ".lengths"), columns[self.name])


class _Sequences(_Column):
    """list, tuple or frozenset of one type."""

    def __init__(self, name: str, made: Made, kind: type, item: _Column) -> None:
        super().__init__(name)
        self._made, self._kind, self._item = made, kind, item

    def holds(self, value: Any) -> bool:
        return isinstance(value, self._kind)

    def write(self, values: list[Any], columns: Columns) -> None:
        columns[f"{self.name}.lengths"] = np.array([len(value) for value in values], np.int64)
        self._item.write([item for value in values for item in value], columns)

    def read(self, columns: Columns, count: int) -> list[Any]:
        lengths = self._get(columns, count, ".lengths")
        return [self._made(part) for part in _split(self._item.read(columns, int(lengths.sum())), lengths)]


class _Mappings(_Column):
    def __init__(self, name: str, key: _Column, value: _Column) -> None:
        super().__init__(name)
        self._key, self._value = key, value

    def holds(self, value: Any) -> bool:
        return isinstance(value, Mapping)

    def write(self, values: list[Any], columns: Columns) -> None:
        columns[f"{self.name}.lengths"] = np.array([len(value) for value in values], np.int64)
        self._key.write([key for value in values for key in value], columns)
        self._value.write([item for value in values for item in value.values()], columns)

    def read(self, columns: Columns, count: int) -> list[Any]:
        lengths = self._get(columns, count, ".lengths")
        total = int(lengths.sum())
        keys, values = (_split(column.read(columns, total), lengths) for column in (self._key, self._value))
        return [dict(zip(*pair, strict=True)) for pair in zip(keys, values, strict=True)]


class _Records(_Column):
    """A dataclass by its fields, or a tuple of fixed length by its positions."""

    def __init__(self, name: str, kind: type, parts: Mapping[str, _Column]) -> None:
        super().__init__(name)
        self._kind, self._parts = kind, parts

    def holds(self, value: Any) -> bool:
        return isinstance(value, self._kind)

    def write(self, values: list[Any], columns: Columns) -> None:
        plain = self._kind is tuple
        for place, (field, part) in enumerate(self._parts.items()):
            part.write([value[place] if plain else getattr(value, field) for value in values], columns)

    def read(self, columns: Columns, count: int) -> list[Any]:
        read = [part.read(columns, count) for part in self._parts.values()]
        rows = zip(*read, strict=True) if read else [()] * count
        if self._kind is tuple:
            return list(rows)
        return [self._kind(**dict(zip(self._parts, row, strict=True))) for row in rows]


class _Unions(_Column):
    """One of several types: the index of the type, and a column for each."""

    def __init__(self, name: str, alternatives: Sequence[_Column]) -> None:
        super().__init__(name)
        self._alternatives = alternatives

    def holds(self, value: Any) -> bool:
        return any(alternative.holds(value) for alternative in self._alternatives)

    def write(self, values: list[Any], columns: Columns) -> None:
        which = [self._which(value) for value in values]
        columns[f"{self.name}.which"] = np.array(which, np.uint8)
        for i, alternative in enumerate(self._alternatives):
            alternative.write([value for value, of in zip(values, which, strict=True) if of == i], columns)

    def read(self, columns: Columns, count: int) -> list[Any]:
        which = self._get(columns, count, ".which").tolist()
        if any(i >= len(self._alternatives) for i in which):
            raise ValueError(f"column {self.name}.which names a type that there is not")
        read = [iter(a.read(columns, which.count(i))) for i, a in enumerate(self._alternatives)]
        return [next(read[i]) for i in which]

    def _which(self, value: Any) -> int:
        for i, alternative in enumerate(self._alternatives):
            if alternative.holds(value):
                return i
        raise TypeError(f"{self.name} is of no type that it may be of: {value!r:.80}")


class _StoodFor(_Column):
    def __init__(self, name: str, kind: type, stand_in: StandIn, column: _Column) -> None:
        super().__init__(name)
        self._kind, self._stand_in, self._column = kind, stand_in, column

    def holds(self, value: Any) -> bool:
        return isinstance(value, self._kind)

    def write(self, values: list[Any], columns: Columns) -> None:
        self._column.write([self._stand_in.of(value) for value in values], columns)

    def read(self, columns: Columns, count: int) -> list[Any]:
        return [self._stand_in.back(value) for value in self._column.read(columns, count)]


def _column(name: str, annotation: Any, stand_ins: Mapping[type, StandIn]) -> _Column:
    def below(part: str, of: Any) -> _Column:
        return _column(f"{name}.{part}" if name else part, of, stand_ins)

    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is None or annotation is type(None):
        return _Nothing(name)
    if isinstance(annotation, type) and annotation in stand_ins:
        stand_in = stand_ins[annotation]
        return _StoodFor(name, annotation, stand_in, _column(name, stand_in.kind, stand_ins))
    if annotation in (bool, int, float):
        return _Scalars(name, annotation, {bool: np.bool_, int: np.int64, float: np.float64}[annotation])
    if annotation is str or (isinstance(annotation, type) and issubclass(annotation, Enum)):
        return _Texts(name, annotation)
    if origin is Literal and all(isinstance(one, str) for one in arguments):
        return _Texts(name, str)
    if origin in (Union, types.UnionType):
        return _Unions(name, [below(str(i), one) for i, one in enumerate(arguments)])
    if origin is np.ndarray:
        return _Arrays(name, get_args(arguments[1])[0])
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _Records(name, tuple, {str(i): below(str(i), one) for i, one in enumerate(arguments)})
    if origin in _SEQUENCES:
        return _Sequences(name, _SEQUENCES[origin], origin, below("items", arguments[0]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _Mappings(name, below("keys", arguments[0]), below("values", arguments[1]))
    if isinstance(annotation, type) and is_dataclass(annotation):
        hints = get_type_hints(annotation)
        return _Records(name, annotation, {one.name: below(one.name, hints[one.name]) for one in fields(annotation)})
    raise TypeError(f"{name or 'the value'} is of type {annotation}, which has no columns")


def _parts(lengths: NDArray[Any], flat: NDArray[Any]) -> list[NDArray[Any]]:
    """Split concatenated arrays by their lengths, as views."""
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    if (ends[-1] if ends else 0) != len(flat) or (lengths < 0).any():
        raise ValueError(f"lengths of {ends[-1] if ends else 0} in all for {len(flat)} values")
    return [flat[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


def _split(values: list[Any], lengths: NDArray[Any]) -> list[list[Any]]:
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [values[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
