"""A measured sweep of self-speculation, in the form that EfficientRollout publishes, and the score of a cost model on
it.

A CSV has a line per model, batch, context (`seq`), draft length (`gamma`) and mode: target_decode, drafter_decode (one
of the passes of a draft), target_verify. Owns its reading, the split into fitted and held-out cells and their scores.
Has no file of its own.
"""

import csv
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.tools.qwen import QWEN
from benchmarks.tools.two_stage import OVERLAP, Timing, TwoStage, Work, fit_two_stage
from config.formats import FORMATS
from config.network import Network

COPY = FORMATS["w4a16"]  # the drafter of these sweeps
_TIMES = ("median_ms", "mean_ms")  # the first that exists


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A step that might draft `length` tokens for each of `batch` requests of `context` tokens."""

    batch: int
    context: int
    length: int


@dataclass(slots=True)
class Sweep:
    """The sweep of one model, in seconds. Unmeasured cells are missing."""

    model: str
    decoding: dict[tuple[int, int], float] = field(default_factory=dict)  # by batch and context
    drafting: dict[Cell, float] = field(default_factory=dict)
    verification: dict[Cell, float] = field(default_factory=dict)
    left_out: int = 0  # lines

    @property
    def lengths(self) -> list[int]:
        return sorted({cell.length for cell in self.cells})

    @property
    def batches(self) -> list[int]:
        return sorted({batch for batch, _ in self.decoding})

    @property
    def contexts(self) -> list[int]:
        return sorted({context for _, context in self.decoding})

    @property
    def cells(self) -> list[Cell]:
        """The cells with all three parts measured, so with a measured speed-up."""
        return sorted(
            cell for cell in self.verification if cell in self.drafting and (cell.batch, cell.context) in self.decoding
        )

    def cycle_s(self, cell: Cell) -> float:
        return cell.length * self.drafting[cell] + self.verification[cell]

    def speedup(self, cell: Cell) -> float:
        """Return the speed-up if every draft is accepted (eq. 4)."""
        return (cell.length + 1) * self.decoding[cell.batch, cell.context] / self.cycle_s(cell)

    def fit(self, work: Work, keep: Callable[[Cell], bool], overlap: float = OVERLAP) -> TwoStage:
        """Fit to the kept cells; decoding has length 0. Raises ValueError if no cell of a kind is left."""
        decoding = [
            Timing(batch, context, 0, seconds)
            for (batch, context), seconds in self.decoding.items()
            if keep(Cell(batch, context, 0))
        ]
        verifying, drafting = (
            [
                Timing(cell.batch, cell.context, cell.length if verifies else 0, seconds)
                for cell, seconds in part.items()
                if keep(cell)
            ]
            for part, verifies in ((self.verification, True), (self.drafting, False))
        )
        return fit_two_stage(work, decoding, verifying, drafting, overlap)


def read(path: Path) -> list[Sweep]:
    """Read every model of a file, in order. Lines of batch 0 or context 0 have an unclear meaning and are left out, as
    are other modes and invalid times. A cell measured more than once counts as its median.

    Raises ValueError for a file without a needed column, or without a model of which all three parts were measured.
    """
    found: dict[str, tuple[Sweep, dict[tuple[str, Cell], list[float]]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or ()
        missing = [name for name in ("batch", "seq", "gamma", "mode") if name not in names]
        if missing or not any(name in names for name in _TIMES):
            raise ValueError(f"{path}: no column {', '.join(missing) or ' or '.join(_TIMES)}")
        for line in reader:
            model = line.get("model") or "unnamed"
            sweep, times = found.setdefault(model, (Sweep(model), defaultdict(list)))
            numbers = [_number(line.get(name)) for name in ("batch", "seq", "gamma")]
            seconds = next((ms / 1e3 for name in _TIMES if (ms := _number(line.get(name))) and ms > 0), None)
            batch, context, length = (int(number or 0) for number in numbers)
            mode = line["mode"]
            known = mode == "target_decode" or (mode in ("drafter_decode", "target_verify") and length > 0)
            if batch > 0 and context > 0 and seconds and known:
                times[mode, Cell(batch, context, 0 if mode == "target_decode" else length)].append(seconds)
            else:
                sweep.left_out += 1
    sweeps = []
    for sweep, times in found.values():
        for (mode, cell), of in times.items():
            if mode == "target_decode":
                sweep.decoding[cell.batch, cell.context] = median(of)
            else:
                (sweep.drafting if mode == "drafter_decode" else sweep.verification)[cell] = median(of)
        if sweep.cells:
            sweeps.append(sweep)
    if not sweeps:
        raise ValueError(f"{path}: no cell with target_decode, drafter_decode and target_verify")
    return sweeps


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Split:
    """The fitted cells: these draft lengths, up to `most` requests. The rest is held out."""

    lengths: Sequence[int]
    most: int

    @classmethod
    def of(cls, sweep: Sweep) -> "Split":
        """Fit all draft lengths except 11, or except the second longest, and batches up to 32, or to half of the
        largest."""
        lengths, batches = sweep.lengths, sweep.batches
        held = 11 if 11 in lengths else lengths[-2] if len(lengths) > 2 else lengths[-1]
        fitted = [length for length in lengths if length != held] or lengths
        half = 32 if batches[0] <= 32 < batches[-1] else batches[-1] // 2
        return cls(fitted, half if any(batch <= half for batch in batches) else batches[-1])

    def keep(self, cell: Cell) -> bool:
        return cell.batch <= self.most and (cell.length == 0 or cell.length in self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Scores over some cells. Errors are medians, relative. Losses are shares of the time of an oracle that always
    chooses right, at one token per request and cell."""

    cells: int
    sign_right: float  # of the predicted speed-up over 1
    always_right: float  # the same for always drafting
    target_error: float
    draft_error: float
    verify_error: float
    cycle_error: float
    lost: float  # by drafting where the model predicts a gain
    always_lost: float
    never_lost: float


def score(sweep: Sweep, model: TwoStage, cells: Iterable[Cell]) -> Score | None:
    """Score the cells with a measured speed-up; None if there are none."""
    known = set(sweep.cells)
    chosen = sorted(known.intersection(cells))
    if not chosen:
        return None
    errors: dict[str, list[float]] = defaultdict(list)
    right = helps = 0
    best = lost = always = never = 0.0
    for cell in chosen:
        batch, context, length = cell.batch, cell.context, cell.length
        plain_s, per_token_s = sweep.decoding[batch, context], sweep.cycle_s(cell) / (length + 1)
        on, good = model.speedup(batch, context, length) > 1, per_token_s < plain_s
        errors["target"].append(model.target_s(batch, context) / plain_s)
        errors["draft"].append(model.draft_s(batch, context) / sweep.drafting[cell])
        errors["verify"].append(model.verify_s(batch, context, length) / sweep.verification[cell])
        errors["cycle"].append(model.cycle_s(batch, context, length) / sweep.cycle_s(cell))
        right += on == good
        helps += good
        least_s = min(plain_s, per_token_s)
        best += least_s
        lost += (per_token_s if on else plain_s) - least_s
        always += per_token_s - least_s
        never += plain_s - least_s
    typical = {f"{name}_error": median(abs(ratio - 1) for ratio in of) for name, of in errors.items()}
    return Score(
        cells=len(chosen),
        sign_right=right / len(chosen),
        always_right=helps / len(chosen),
        lost=lost / best,
        always_lost=always / best,
        never_lost=never / best,
        **typical,
    )


def _shape(vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool) -> Network:
    return Network(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        tied=tied,
    )


# By words of the name; the first that fits counts. From the models' config.json.
_SHAPES: dict[str, Network] = {
    "llama-3.2-3b": _shape(128_256, 3072, 8192, 28, 24, 8, True),
    "llama-8b": _shape(128_256, 4096, 14_336, 32, 32, 8, False),
    "llama-70b": _shape(128_256, 8192, 28_672, 80, 64, 8, False),
    "qwen3-1.7b": _shape(151_936, 2048, 6144, 28, 16, 8, True),
    "qwen3-4b": _shape(151_936, 2560, 9728, 36, 32, 8, True),
    "qwen3-8b": _shape(151_936, 4096, 12_288, 36, 32, 8, False),
    "qwen3-14b": _shape(151_936, 5120, 17_408, 40, 40, 8, False),
    "qwen3-32b": _shape(151_936, 5120, 25_600, 64, 64, 8, False),
    "qwen-3b": _shape(151_936, 2048, 11_008, 36, 16, 2, True),
    "qwen-14b": _shape(152_064, 5120, 13_824, 48, 40, 8, False),
    "qwen-32b": _shape(152_064, 5120, 27_648, 64, 40, 8, False),
    "qwen-72b": _shape(152_064, 8192, 29_568, 80, 64, 8, False),
} | {f"qwen-{size}": Network(**fields, qkv_bias=True) for size, fields in QWEN.items()}


def network_of(model: str, config: Path | None = None) -> tuple[Network, str]:
    """Return the shape of a model and its source: a config.json, its name, or the nearest size. A fit only needs the
    ratios of weights, cache and operations, since measurements set the scale.

    Raises ValueError for a config without a needed key.
    """
    if config is not None:
        fields = json.loads(config.read_text(encoding="utf-8"))
        fields = fields.get("text_config", fields)
        try:
            heads = fields["num_attention_heads"]
            return (
                Network(
                    vocab_size=fields["vocab_size"],
                    hidden_size=fields["hidden_size"],
                    intermediate_size=fields["intermediate_size"],
                    num_layers=fields["num_hidden_layers"],
                    num_heads=heads,
                    num_kv_heads=fields.get("num_key_value_heads") or heads,
                    head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
                    tied=bool(fields.get("tie_word_embeddings", False)),
                ),
                config.name,
            )
        except KeyError as error:
            raise ValueError(f"{config}: no key {error}, which decides bytes and operations") from None
    words = re.findall(r"[a-z]+\d?(?:\.\d+)?|\d+(?:\.\d+)?b(?![a-z])", model.lower())
    name = "-".join(words)
    for known, net in _SHAPES.items():
        family, size = known.rsplit("-", 1)
        if family in name and size in words:
            return net, f"known as {known}"
    size_b = next((float(word[:-1]) for word in words if re.fullmatch(r"\d+(\.\d+)?b", word)), 7.0)
    nearest = min(_SHAPES, key=lambda known: abs(math.log(_SHAPES[known].parameters / (size_b * 1e9))))
    return _SHAPES[nearest], f"unknown: shape of {nearest}; --model-config says better"
