"""Offline training to a plateau: packs, held-out sequences, the stopping rule. The caller supplies the data.

The plateau rule, fixed before any run: every `every` micro-steps the held-out sequences are evaluated. When their loss
has not fallen by `gain` (relative to its best) for `patience` evaluations, the learning rate falls to the next of
`rates`. After the last of these, training ends. The weights of the best evaluation are kept.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contracts.records import SequenceRecord
from drafter.training.collect import collect_records
from drafter.training.packing import MIN_ROWS
from drafter.training.trainer import DrafterTrainer
from models.transformer import Transformer

Tokens = NDArray[np.int32]


class TargetRecords:
    """Records of sequences, by forward passes of the target. Those that fit `max_bytes` are computed only once."""

    def __init__(
        self,
        target: Transformer,
        prompts: Sequence[Tokens],
        responses: Sequence[Tokens],
        *,
        layers: Sequence[int] = (),
        version: int = 0,
        max_bytes: int = 4 << 30,
    ) -> None:
        self._target, self._layers, self._version = target, tuple(layers), version
        self._pairs = list(zip(prompts, responses, strict=True))
        self._kept: dict[int, SequenceRecord] = {}
        self._room = max_bytes
        self.tokens = [len(prompt) + len(response) for prompt, response in self._pairs]

    def take(self, indices: Sequence[int]) -> list[SequenceRecord]:
        """Return the records in the given order."""
        missing = [index for index in dict.fromkeys(indices) if index not in self._kept]
        made: dict[int, SequenceRecord] = {}
        if missing:
            prompts, responses = zip(*(self._pairs[index] for index in missing), strict=True)
            records = collect_records(self._target, prompts, responses, layers=self._layers, version=self._version)
            made = dict(zip(missing, records, strict=True))
        for index, record in made.items():
            if record.bytes <= self._room:
                self._kept[index] = record
                self._room -= record.bytes
        return [made.get(index) or self._kept[index] for index in indices]


@dataclass(frozen=True, slots=True)
class PlateauRule:
    """The plateau rule; see the module docstring."""

    every: int = 50  # micro-steps
    patience: int = 4  # evaluations
    gain: float = 0.003
    rates: tuple[float, ...] = (1.0, 0.1)  # of the options' learning rate
    max_steps: int = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FitProgress:
    """Progress after an evaluation; losses and accuracies are means over supervised rows."""

    step: int
    loss: float  # of the micro-steps since the last evaluation
    held_out_loss: float
    held_out_accuracy: float
    held_out_top3: float
    best: bool  # the held-out loss is the lowest yet
    rate: float  # learning rate
    tokens: int  # supervised rows so far
    seconds: float  # so far, evaluations included


def fit(
    trainer: DrafterTrainer,
    records: TargetRecords,
    rule: PlateauRule = PlateauRule(),
    *,
    seed: int = 0,
    held_out: int = 64,
) -> Iterator[FitProgress | None]:
    """Train until the plateau (or rule.max_steps), a micro-step at a time; yields what its evaluation found, if it had
    one. Iterated to its end, it leaves the trainer with the best weights.

    held_out: sequences never trained on, at most a tenth of all. Raises ValueError if there are fewer than two
    sequences long enough.
    """
    rng, start_s = np.random.default_rng(seed), time.monotonic()
    order = [int(i) for i in rng.permutation(len(records.tokens)) if records.tokens[i] > MIN_ROWS]
    if len(order) < 2:
        raise ValueError(f"{len(order)} sequences of more than {MIN_ROWS} tokens: a drafter needs two at least")
    count = min(held_out, max(1, len(order) // 10))
    judges = list(_packs(records, order[:count], trainer.options.micro_step_tokens))
    source = _endless(records, order[count:], trainer.options.micro_step_tokens, rng)
    best, best_state, waited, phase, tokens = float("inf"), trainer.state_dict(), 0, 0, 0
    losses: list[float] = []
    trainer.rate_scale = rule.rates[0]
    for step in range(1, rule.max_steps + 1):
        result = trainer.micro_step(records.take(next(source)))
        losses.append(result.loss)
        tokens += result.positions
        if step % rule.every and step < rule.max_steps:
            yield None
            continue
        loss, accuracy, top3 = _judge(trainer, records, judges)
        waited = 0 if loss < best * (1 - rule.gain) else waited + 1
        is_best = loss < best
        if is_best:
            best, best_state = loss, {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        rate = trainer.options.learning_rate * trainer.rate_scale
        seconds = time.monotonic() - start_s
        yield FitProgress(
            step=step,
            loss=float(np.mean(losses)),
            held_out_loss=loss,
            held_out_accuracy=accuracy,
            held_out_top3=top3,
            best=is_best,
            rate=rate,
            tokens=tokens,
            seconds=seconds,
        )
        losses = []
        if waited >= rule.patience:
            waited, phase = 0, phase + 1
            if phase == len(rule.rates):
                break
            trainer.load_state_dict(best_state)
            trainer.rate_scale = rule.rates[phase]
    trainer.load_state_dict(best_state)
    trainer.rate_scale = 1.0


def _judge(
    trainer: DrafterTrainer, records: TargetRecords, packs: Sequence[Sequence[int]]
) -> tuple[float, float, float]:
    """Return mean loss, accuracy and top-3 accuracy over all rows of the packs."""
    results = [trainer.evaluate(records.take(pack)) for pack in packs]
    rows = np.array([result.positions for result in results])
    values = np.array([(result.loss, result.accuracy, result.top3_accuracy) for result in results])
    loss, accuracy, top3 = rows @ values / rows.sum()
    return float(loss), float(accuracy), float(top3)


def _endless(
    records: TargetRecords, indices: Sequence[int], tokens: int, rng: np.random.Generator
) -> Iterator[list[int]]:
    """Yield packs for ever, in a new order every epoch."""
    while True:
        yield from _packs(records, [indices[i] for i in rng.permutation(len(indices))], tokens)


def _packs(records: TargetRecords, indices: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Yield all sequences in order, in packs of at most `tokens` tokens. A longer sequence is a pack of its
    own, uncut."""
    pack, size = list[int](), 0
    for index in indices:
        if pack and size + records.tokens[index] > tokens:
            yield pack
            pack, size = [], 0
        pack.append(index)
        size += records.tokens[index]
    if pack:
        yield pack
