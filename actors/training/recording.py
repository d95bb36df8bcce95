"""Hidden states from the learner's own log-prob pass: the other source of drafter training data (TLT's own).

Chooses which of a rank's sequences to keep in an RL step, and makes their records. It computes nothing: every sequence
passes the network once under the weights that sampled it anyway, and the kept rows are copied to the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.training.batches import TokenBatch
from actors.training.packing import input_tokens
from actors.training.parallel import Rank
from contracts.records import SequenceRecord
from contracts.training import Demonstration, TrainSequence
from models.transfer import start_download, upload


@dataclass(frozen=True, slots=True)
class RecordingPlan:
    """Settings of the recording in every RL step. `layers`: their outputs precede the final state in every row."""

    max_bytes: int  # per rank and RL step
    layers: tuple[int, ...] = ()
    seed: int = 0


class StepRecording:
    """Recording of one rank in one RL step, whose first forward has the target's `version`.

    Sequences are kept in a random order that depends on `plan.seed` and the version only, up to the first that exceeds
    the budget, so the choice is independent of length.
    """

    def __init__(self, plan: RecordingPlan, version: int, dtype: torch.dtype) -> None:
        """`dtype`: of the states in the records, equal to the engines'."""
        self.layers, self.records = plan.layers, list[SequenceRecord]()
        self.seconds = 0.0  # recording's part of the learner's step
        self._plan, self._version, self._dtype = plan, version, dtype
        self._kept: set[int] = set()  # by id(): the sequences live as long as the step

    def choose(self, sequences: Sequence[TrainSequence | Demonstration], hidden_size: int) -> None:
        """Choose which of the rank's own sequences to keep."""
        row_bytes = (len(self.layers) + 1) * hidden_size * self._dtype.itemsize
        room = self._plan.max_bytes
        for i in np.random.default_rng((self._plan.seed, self._version)).permutation(len(sequences)):
            rows = _rows(sequences[i])
            room -= rows * row_bytes + 4 * (rows + 1)
            if room < 0:
                return
            self._kept.add(id(sequences[i]))

    def take(self, states: Tensor, batch: TokenBatch) -> None:
        """Record the network's states at the tokens of a micro-batch, [T, W]."""
        start_s = perf_counter()
        for sequence, places in zip(batch.sequences, batch.places, strict=True):
            if id(sequence) in self._kept:
                self.records.append(self._record(sequence, _taken(states, places)))
        self.seconds += perf_counter() - start_s

    def metrics(self, rank: Rank) -> dict[str, float]:
        """Return `recording/*`: sequences and bytes of all ranks, mean seconds per rank. Every rank must call it at the
        end of its step: it waits for the device, and thus for the records' states."""
        own = [len(self.records), sum(record.bytes for record in self.records), self.seconds / rank.size]
        sums = rank.sum(torch.tensor(own, dtype=torch.float64, device=rank.device)).tolist()
        return dict(zip(("recording/sequences", "recording/bytes", "recording/seconds"), sums, strict=True))

    def _record(self, sequence: TrainSequence | Demonstration, states: Tensor) -> SequenceRecord:
        # A copy, so that the micro-batch's memory is freed. `metrics` waits for its completion.
        host = start_download(states, self._dtype)
        return SequenceRecord(
            tokens=np.concatenate((sequence.prompt_tokens, sequence.response_tokens)).astype(np.int32),
            prompt_length=len(sequence.prompt_tokens),
            first=0,
            states=host.view(torch.uint8).numpy(),
            dtype=str(self._dtype).removeprefix("torch."),
            width=host.shape[1],
            target_version=self._version,
        )


def _taken(states: Tensor, places: NDArray[np.int64]) -> Tensor:
    """Return the rows of one sequence: a view if they are contiguous, so not on devices."""
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places):
        return states[first : last + 1]
    return states.index_select(0, upload({"places": places}, states.device)["places"])


def _rows(sequence: TrainSequence | Demonstration) -> int:
    return input_tokens(len(sequence.prompt_tokens), len(sequence.response_tokens))
