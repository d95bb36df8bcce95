"""Compare packed drafter training with the same sequences in batches of 8 padded to the longest.

    python -m benchmarks.drafter_packing [--target runs/demo/model ...] [--threads 1] [--repeats 7] [--sequences 384]

Counts supervised tokens per second of whole micro-steps: packing or padding, forward, losses, backward, AdamW. Both
train the same network on the same sequences in the same order. Equal sums of losses are checked. Three ways take turns
within one process. Ratios are taken within a round, and the figure is their median:

- packed: the trainer's own micro-step;
- padded: like TLT's vanilla batching (Figure 17b), one update per batch of 8, attention with a dense mask;
- padded, favoured: only padding costs. The padded batches use our kernel for packed segments, and are summed to as few
  updates as packed makes.

Lengths: the demo's own rollouts (prompt and response) of every given target, since its responses are short when RL
starts and longer later. Also log-normal ones with a long tail, whose states are random.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import RESULTS, command, in_turns, paired, write
from benchmarks.tools.drafting import random_record
from benchmarks.tools.rollouts import record_history
from benchmarks.tools.targets import find_demo, load_target, load_task
from config.drafter import DrafterOptions
from contracts.records import SequenceRecord
from drafter.training.collect import collect_records
from drafter.training.head import TargetHead
from drafter.training.packing import pack_records
from drafter.training.passes import run_passes
from drafter.training.trainer import DrafterTrainer
from models.rope import RopeTable

BATCH = 8
TAIL_MEDIAN, TAIL_SIGMA, TAIL_MAX = 256, 1.0, 2048  # tokens; sigma of the logarithm
SEED = 0


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences in training order, for one target."""

    name: str
    head: TargetHead
    records: list[SequenceRecord]

    @property
    def rows(self) -> int:
        """The number of supervised tokens."""
        return sum(record.rows - 1 for record in self.records)


def demo_case(directory: Path, count: int) -> Case:
    """Return `count` rollouts of the demo in random order, like an epoch of training."""
    target = load_target(directory, "demo", "float32")
    prompts, responses = record_history(target, load_task(directory))
    records = list(collect_records(target.model, prompts, responses))
    order = np.random.default_rng(SEED).permutation(len(records))[:count]
    usable = [records[int(i)] for i in order if records[int(i)].rows >= 3]
    middle = int(np.median([len(record.tokens) for record in records]))
    return Case(f"demo, median {middle} tokens", TargetHead.of(target.model, 0), usable)


def tail_case(demo: Case, count: int) -> Case:
    """Return the demo's network with more positions, and log-normal lengths."""
    rng = np.random.default_rng(SEED)
    config = replace(demo.head.config, max_position_embeddings=TAIL_MAX)
    lengths = np.clip(np.rint(rng.lognormal(np.log(TAIL_MEDIAN), TAIL_SIGMA, count)), 8, TAIL_MAX).astype(int)
    records = [random_record(int(n) - 1, config, i) for i, n in enumerate(lengths)]
    return Case("long tail", replace(demo.head, config=config, rope=RopeTable(config)), records)


def packs(records: Sequence[SequenceRecord], tokens: int) -> Iterator[list[SequenceRecord]]:
    """Yield packs in order, each of at most `tokens` tokens or one sequence."""
    pack, size = list[SequenceRecord](), 0
    for record in records:
        if pack and size + len(record.tokens) > tokens:
            yield pack
            pack, size = [], 0
        pack.append(record)
        size += len(record.tokens)
    if pack:
        yield pack


def batches(records: Sequence[SequenceRecord]) -> list[list[SequenceRecord]]:
    return [list(records[i : i + BATCH]) for i in range(0, len(records), BATCH)]


def padded(records: Sequence[SequenceRecord]) -> tuple[list[SequenceRecord], Tensor]:
    """Pad all to the longest. Also returns which rows are real, bool [batch * rows]."""
    longest = max(record.rows for record in records)
    full, real = [], []
    for record in records:
        states = np.zeros((longest, record.states.shape[1]), np.uint8)
        states[: record.rows] = record.states
        tokens = np.zeros(longest + 1, np.int32)
        tokens[: len(record.tokens)] = record.tokens
        full.append(replace(record, tokens=tokens, states=states))
        real.append(torch.arange(longest - 1) < record.rows - 1)
    return full, torch.cat(real)


class DenseContext:
    """Attention of a padded batch in the usual form: causal, and no row attends to padding keys."""

    def __init__(self, positions: Tensor, real: Tensor, batch: int) -> None:
        self.positions = positions
        rows = len(real) // batch
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        self._shape = batch, rows
        self._mask = causal & real.view(batch, 1, 1, rows) | torch.eye(rows, dtype=torch.bool)  # no empty row

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See models.transformer.AttentionContext."""
        queries, keys, values = (x.view(*self._shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        seen = F.scaled_dot_product_attention(queries, keys, values, self._mask, enable_gqa=True)
        return seen.transpose(1, 2).reshape(q.shape)


def padded_loss(trainer: DrafterTrainer, records: Sequence[SequenceRecord], *, dense: bool) -> tuple[Tensor, int]:
    """Return (the sum of EAGLE's losses over real rows of one padded batch, their number)."""
    head, model = trainer.head, trainer.model
    full, real = padded(records)
    batch = pack_records(full, head.version)
    assert batch is not None
    if dense:
        context = DenseContext(batch.positions, real, len(records))
        features = model.features(batch.states[batch.at])
        out = model.advance(head.embed(batch.tokens), features, head.rope.at(batch.positions), context)
    else:
        (out,) = run_passes(model, head, batch, 1)
    states = batch.states[batch.at + 1]
    with torch.no_grad():
        wanted = head.logits(states).softmax(-1)
    divergence = -(wanted * head.logits(out).log_softmax(-1)).sum(-1)
    distance = F.smooth_l1_loss(out, states, reduction="none").mean(-1)
    total = ((divergence + trainer.variant.hidden_weight * distance) * real).sum()
    return total, int(real.sum())


class Padded:
    """A trainer's update by padded batches."""

    def __init__(self, trainer: DrafterTrainer, *, dense: bool) -> None:
        self._trainer, self._dense, self._parameters = trainer, dense, list(trainer.model.parameters())
        self._optimizer = torch.optim.AdamW(self._parameters, trainer.options.learning_rate, weight_decay=0.0)

    def update(self, group: Sequence[Sequence[SequenceRecord]]) -> float:
        """Make one optimizer step with the mean over all batches of the group. Returns that mean."""
        self._optimizer.zero_grad(set_to_none=False)
        total, rows = 0.0, 0
        for records in group:
            loss, count = padded_loss(self._trainer, records, dense=self._dense)
            loss.backward()  # type: ignore[no-untyped-call]
            total, rows = total + float(loss.detach()), rows + count
        for parameter in self._parameters:
            assert parameter.grad is not None
            parameter.grad /= rows
        torch.nn.utils.clip_grad_norm_(self._parameters, self._trainer.options.max_grad_norm)
        self._optimizer.step()
        return total / rows


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Run every way over all sequences, `repeats` times, in turns."""
    options = DrafterOptions(algorithm="eagle")
    trainers = [DrafterTrainer(case.head, options) for _ in range(3)]
    packed, vanilla, favoured = trainers[0], Padded(trainers[1], dense=True), Padded(trainers[2], dense=False)
    groups = list(packs(case.records, options.micro_step_tokens))
    same_loss(case, groups)
    ways: dict[str, Callable[[], object]] = {
        "packed": lambda: [packed.micro_step(group) for group in groups],
        "padded": lambda: [vanilla.update([records]) for records in batches(case.records)],
        "padded, favoured": lambda: [favoured.update(batches(group)) for group in groups],
    }
    seconds = in_turns(ways, repeats)
    lengths = [len(record.tokens) for record in case.records]
    computed = sum(max(record.rows - 1 for record in batch) * len(batch) for batch in batches(case.records))
    return {
        "case": case.name,
        "sequences": len(lengths),
        "length_p50": float(np.median(lengths)),
        "length_p90": float(np.quantile(lengths, 0.9)),
        "length_max": max(lengths),
        "supervised_tokens": case.rows,
        "padded_tokens_over_supervised": round(computed / case.rows, 3),
        "updates": {"packed": len(groups), "padded": len(batches(case.records)), "padded, favoured": len(groups)},
        "tokens_per_s": {name: round(case.rows / median(taken)) for name, taken in seconds.items()},
        "packed_over_padded": paired(seconds["padded"], seconds["packed"]),
        "packed_over_padded_favoured": paired(seconds["padded, favoured"], seconds["packed"]),
    }


def same_loss(case: Case, groups: Sequence[Sequence[SequenceRecord]]) -> None:
    """Exit unless packed and padded give the same loss with fresh weights, so that they do the same work."""
    trainer = DrafterTrainer(case.head, DrafterOptions(algorithm="eagle"))
    with torch.no_grad():
        for group in groups[:3]:
            found = trainer.evaluate(group).loss
            for dense in (True, False):
                sums = [padded_loss(trainer, records, dense=dense) for records in batches(group)]
                expected = float(sum(loss for loss, _ in sums)) / sum(rows for _, rows in sums)
                if abs(found - expected) > 1e-4 * abs(expected):
                    raise SystemExit(f"{case.name}: the packed loss is {found}, the padded one {expected}")


def main(
    *,
    target: Annotated[Sequence[Path], "model directories of the demo; default: the newest in runs/"] = (),
    threads: int = 1,
    repeats: int = 7,
    sequences: int = 384,
    out: Path = RESULTS / "drafter_packing.json",
) -> None:
    torch.set_num_threads(threads)
    demos = [demo_case(given, sequences) for given in target or [find_demo(None)]]
    rows = []
    for case in (*demos, tail_case(demos[0], sequences // 2)):
        rows.append(measure(case, repeats))
        print(json.dumps(rows[-1], indent=1), flush=True)
    settings = {
        "threads": threads,
        "repeats": repeats,
        "micro_step_tokens": DrafterOptions().micro_step_tokens,
        "padded_batch": BATCH,
        "long_tail": {"median": TAIL_MEDIAN, "sigma": TAIL_SIGMA, "max": TAIL_MAX},
        "seed": SEED,
    }
    question = "supervised tokens per second of EAGLE training, packed against padded (TLT Figure 17b: 2.2x)"
    write(out, question, {"cases": rows}, settings=settings)


if __name__ == "__main__":
    command(main)
