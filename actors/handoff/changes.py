"""Send only the changed elements of each piece: encoding against the piece that was sent before, and its application to
an engine's live tensors. In torch, so that both run on the devices of the weights.

The encoding of a piece has a header, one row of three int64 words for each tensor in the piece: form, changed elements,
bytes of positions. The body holds the positions and new bits of each row, in order. A row's positions are the gaps
between changed elements, in bytes or in 16-bit words, whichever is smaller. If they would save nothing, the row holds
all elements. So a body is never larger than its piece. Elements are compared as bits, as in models.delta, whose deltas
are of whole buffers in host memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contracts.handoff import HandOffError
from models.delta import Form
from models.manifest import ITEM_BYTES, TensorSpec
from models.pieces import PieceSums, in_pieces

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element
ROW_WORDS = 3


_FORMS = frozenset(Form) - {Form.BITMAP}  # those of a piece
_MOST = {Form.GAPS8: 255, Form.GAPS16: 65535}


@dataclass(frozen=True, slots=True)
class _Cut:
    """Bytes [low, high) of the buffer, all of tensor `number`."""

    number: int
    low: int
    high: int


class PieceLayout:
    """Places of tensors in the pieces of a flat buffer."""

    def __init__(self, specs: Sequence[TensorSpec], total_bytes: int, piece_bytes: int) -> None:
        self.specs, self.total_bytes, self.piece_bytes = tuple(specs), total_bytes, piece_bytes
        self._sizes = [math.prod(spec.shape) * ITEM_BYTES[spec.dtype] for spec in specs]

    @property
    def pieces(self) -> int:
        return -(-self.total_bytes // self.piece_bytes)

    def cuts(self, number: int) -> list[_Cut]:
        """Return the non-empty parts of tensors in piece `number`, in order."""
        start = number * self.piece_bytes
        end, found = min(start + self.piece_bytes, self.total_bytes), []
        for index, (spec, size) in enumerate(zip(self.specs, self._sizes, strict=True)):
            low, high = max(start, spec.offset_bytes), min(end, spec.offset_bytes + size)
            if low < high:
                found.append(_Cut(index, low, high))
        return found

    def item_bytes(self, cut: _Cut) -> int:
        return ITEM_BYTES[self.specs[cut.number].dtype]


class Before:
    """The sender's copy of the buffer that it sent last, on its device: the base of the next changes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: Tensor | None = None
        self._layout: PieceLayout | None = None
        self.checksum: int | None = None  # None: the copy is missing or incomplete
        self._changed, self.sent_bytes = 0, 0  # of the present hand-off

    @property
    def share(self) -> float:
        """Share of the elements that changed in the present hand-off."""
        assert self._layout is not None
        return self._changed / max(1, sum(math.prod(spec.shape) for spec in self._layout.specs))

    def fits(self, specs: Sequence[TensorSpec]) -> bool:
        """Return whether it holds a whole buffer of these tensors."""
        return self.checksum is not None and self._layout is not None and self._layout.specs == tuple(specs)

    def drop(self) -> None:
        self._buffer, self._layout, self.checksum = None, None, None

    def begin(self, specs: Sequence[TensorSpec], total_bytes: int, piece_bytes: int) -> str:
        """Begin a hand-off, whose pieces come by `replace`. Returns why it cannot: no memory for the copy."""
        if self._buffer is None or self._buffer.numel() != total_bytes:
            self.drop()
            try:
                self._buffer = torch.empty(total_bytes, dtype=torch.uint8, device=self._device)
            except RuntimeError as error:  # includes torch's OutOfMemoryError
                return f"no memory for a copy of {total_bytes} bytes: {error}"
        self._layout = PieceLayout(specs, total_bytes, piece_bytes)
        self.checksum, self._changed, self.sent_bytes = None, 0, 0
        return ""

    def encoded(self, number: int, piece: Tensor) -> tuple[Tensor, Tensor]:
        """Return the header and the body (both uint8) of what differs between `piece` and the copy's."""
        assert self._layout is not None
        header, body = encode(self._layout, number, self._room(number, piece), piece)
        self._changed += int(header[:, 1].sum())
        flat = header.view(-1).view(torch.uint8)
        self.sent_bytes += flat.numel() + body.numel()
        return flat, body

    def replace(self, number: int, piece: Tensor) -> None:
        """Make this piece part of the copy."""
        self._room(number, piece).copy_(piece)

    def end(self, checksum: int) -> None:
        """End the hand-off: all pieces were replaced."""
        self.checksum = checksum

    def _room(self, number: int, piece: Tensor) -> Tensor:
        assert self._buffer is not None
        assert self._layout is not None
        start = number * self._layout.piece_bytes
        return self._buffer[start : start + piece.numel()]


@torch.no_grad()
def encode(layout: PieceLayout, number: int, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return what leads from `old` to `new`, both piece `number`: the header int64 [cuts, ROW_WORDS] on the host, and
    the body uint8 on the device of `new`."""
    start, rows, body = number * layout.piece_bytes, [], []
    for cut in layout.cuts(number):
        word = _WORDS[layout.item_bytes(cut)]
        was, now = (piece[cut.low - start : cut.high - start].view(word) for piece in (old, new))
        form, changed, positions, values = _row(was, now)
        rows.append((form, changed, positions.numel()))
        body += [positions, values]
    header = torch.tensor(rows, dtype=torch.int64).view(-1, ROW_WORDS)
    return header, torch.cat(body) if body else new[:0]


def _row(was: Tensor, now: Tensor) -> tuple[int, int, Tensor, Tensor]:
    nothing = now.view(torch.uint8)[:0]
    at = (was != now).nonzero().view(-1)
    changed, saved = at.numel(), (now.numel() - at.numel()) * now.element_size()
    if not changed:
        return Form.SAME, 0, nothing, nothing
    if changed < saved:  # positions take at least one byte each
        gaps = at.diff(prepend=at.new_full((1,), -1)) - 1
        sizes = {
            form: (1 + (form is Form.GAPS16)) * (changed + int((gaps // most).sum())) for form, most in _MOST.items()
        }
        form = min(sizes, key=lambda form: sizes[form])
        if sizes[form] < saved:
            return form, changed, _coded(gaps, form), now[at].view(torch.uint8)
    return Form.WHOLE, now.numel(), nothing, now.view(torch.uint8)


def _coded(gaps: Tensor, form: Form) -> Tensor:
    """Encode each gap as copies of the largest word, then the remainder, which is smaller than the largest word."""
    most = _MOST[form]
    ends = (gaps // most + 1).cumsum(0) - 1
    out = torch.full((int(ends[-1]) + 1,), most, dtype=torch.int32, device=gaps.device)
    out[ends] = (gaps % most).int()
    return out.to(torch.uint8 if form is Form.GAPS8 else torch.int16).view(torch.uint8)


class Changer:
    """Applies the changes of pieces to live tensors, in place."""

    def __init__(self, layout: PieceLayout, targets: Mapping[str, Tensor]) -> None:
        """`targets` by name: contiguous, of the layout's shapes and dtypes (as models.pieces.Scatter requires)."""
        self._layout, self._targets = layout, targets
        self._flat = [targets[spec.name].detach().reshape(-1).view(torch.uint8) for spec in layout.specs]

    def header_bytes(self, number: int) -> int:
        return 8 * ROW_WORDS * len(self._layout.cuts(number))

    def body_bytes(self, number: int, header: Tensor) -> int:
        """Return the size of the body that follows this header (uint8, host). Raises HandOffError for one that no piece
        has."""
        size = 0
        for cut, (form, changed, positions) in self._rows(number, header):
            values = changed * self._layout.item_bytes(cut)
            sound = form in _FORMS and min(positions, changed) >= 0 and (form != Form.SAME or positions + changed == 0)
            if not sound or positions + values > cut.high - cut.low:
                raise HandOffError(f"the changes of piece {number} are damaged")
            size += positions + values
        return size

    @torch.no_grad()
    def take(self, number: int, header: Tensor, body: Tensor) -> None:
        """Apply piece `number`. `header`: uint8, host; `body`: uint8. Raises HandOffError."""
        at = 0
        for cut, (form, changed, position_bytes) in self._rows(number, header):
            item = self._layout.item_bytes(cut)
            positions = body[at : at + position_bytes]
            values = body[at + position_bytes : at + position_bytes + changed * item]
            at += position_bytes + changed * item
            if form == Form.SAME:
                continue
            first = self._layout.specs[cut.number].offset_bytes
            target = self._flat[cut.number][cut.low - first : cut.high - first].view(_WORDS[item])
            new = values.to(target.device).clone().view(_WORDS[item])  # it may start at any byte
            if form == Form.WHOLE:
                if new.numel() != target.numel():
                    raise HandOffError(f"{new.numel()} elements came for all {target.numel()}")
                target.copy_(new)
                continue
            target[_places(Form(form), positions.to(target.device), changed, target.numel())] = new

    def checksum(self) -> int:
        """Return the checksum of the buffer that the tensors make."""
        sums, layout = PieceSums(), self._layout
        device = next((flat.device for flat in self._flat), torch.device("cpu"))
        named = ((spec.name, self._targets[spec.name]) for spec in layout.specs)
        for piece in in_pieces(layout.specs, layout.total_bytes, named, device, piece_bytes=layout.piece_bytes):
            sums.add(piece)
        return sums.value()

    def _rows(self, number: int, header: Tensor) -> Iterator[tuple[_Cut, list[int]]]:
        rows = header.clone().view(torch.int64).view(-1, ROW_WORDS).tolist()
        return zip(self._layout.cuts(number), rows, strict=True)


def _places(form: Form, positions: Tensor, changed: int, count: int) -> Tensor:
    """Return the indices of the `changed` elements, int64. Raises HandOffError for another number of them, or one that
    is not below `count`."""
    short = form is Form.GAPS8
    words = positions.long() if short else positions.clone().view(torch.int16).long() & 0xFFFF
    ends = (words != _MOST[form]).nonzero().view(-1)
    at = words.cumsum(0)[ends] + torch.arange(ends.numel(), device=ends.device)
    if ends.numel() != changed or (changed and int(at[-1]) >= count):
        raise HandOffError(f"{ends.numel()} positions came for {changed} of {count} elements")
    return at
