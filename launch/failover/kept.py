"""What the learner was given since its last checkpoint, RL step by RL step: enough to repeat its updates without
sampling anything again. Owns where that is, memory first and then the run's folder, and what it takes; never looks at
the numbers."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contracts.training import StepResult, TrainSequence
from launch.arrays import Packed, flat, parts, read_arrays, write_arrays

IN_MEMORY_BYTES = 512 * 2**20  # of the driver's; later steps go to disk until the next checkpoint


@dataclass(frozen=True, slots=True)
class KeptStep:
    """One RL step's update: what it was called with, and what came of it."""

    step: int
    sequences: list[TrainSequence]
    asked: int | None
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    step: int
    asked: int | None
    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    packed: Packed | Path


class KeptSteps:
    """For the driver's thread. The folder is this object's own: it is emptied at the start, at each `clear`, and at the
    end, when it goes."""

    def __init__(self, folder: Path, in_memory_bytes: int = IN_MEMORY_BYTES) -> None:
        self._folder, self._limit_bytes = folder, in_memory_bytes
        self._entries: list[_Entry] = []
        self._in_memory_bytes = 0
        self.bytes = 0  # of all steps
        shutil.rmtree(folder, ignore_errors=True)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[KeptStep]:
        """Oldest first, one in memory at a time. Raises OSError if one that is on disk cannot be read."""
        for entry in self._entries:
            packed = entry.packed if isinstance(entry.packed, dict) else read_arrays(entry.packed)
            yield KeptStep(entry.step, unpack(packed), entry.asked, entry.losses, entry.grad_norms)

    def add(self, step: int, sequences: Sequence[TrainSequence], asked: int | None, result: StepResult) -> None:
        """After the update. The arrays are copied: they may lie in the object store, which is to forget them. Raises
        OSError if there is no room for it on disk; what was kept before stays."""
        packed = pack(sequences)
        size = sum(array.nbytes for array in packed.values())
        place: Packed | Path = packed
        if self._in_memory_bytes + size > self._limit_bytes:
            place = self._folder / f"step_{step:06d}.npz"
            write_arrays(place, packed)
        else:
            self._in_memory_bytes += size
        self._entries.append(_Entry(step, asked, result.losses, result.grad_norms, place))
        self.bytes += size

    def clear(self) -> None:
        self._entries.clear()
        self._in_memory_bytes = self.bytes = 0
        shutil.rmtree(self._folder, ignore_errors=True)


def pack(sequences: Sequence[TrainSequence]) -> Packed:
    """Flat arrays, which neither refer to the sequences' own nor cost an object each. Bytes per response token: 12, 4
    of them only where the engine gives log-probs at temperature 1; 8 more where tokens have advantages of their own."""
    own = [s.sampler_logprobs_t1 for s in sequences if s.sampler_logprobs_t1 is not None]
    advantages = [np.atleast_1d(np.asarray(s.advantage, np.float64)) for s in sequences]
    names = sorted({s.sampler for s in sequences})
    number = {name: i for i, name in enumerate(names)}
    return {
        "prompt_lengths": np.array([len(s.prompt_tokens) for s in sequences], np.int64),
        "response_lengths": np.array([len(s.response_tokens) for s in sequences], np.int64),
        "prompt_tokens": flat([s.prompt_tokens for s in sequences], np.int32),
        "response_tokens": flat([s.response_tokens for s in sequences], np.int32),
        "sampler_logprobs": flat([s.sampler_logprobs for s in sequences], np.float32),
        "has_logprobs_t1": np.array([s.sampler_logprobs_t1 is not None for s in sequences], np.bool_),
        "logprobs_t1": flat(own, np.float32),
        "by_token": np.array([isinstance(s.advantage, np.ndarray) for s in sequences], np.bool_),
        "advantages": flat(advantages, np.float64),
        "samplers": np.array(names, np.str_),
        "sampler": np.array([number[s.sampler] for s in sequences], np.int32),
        "weights": np.array([s.weight for s in sequences], np.float64),
        "masked": np.array([s.drawn is not None for s in sequences], np.bool_),
        "drawn": flat([s.drawn for s in sequences if s.drawn is not None], np.bool_),
    }


def unpack(packed: Packed) -> list[TrainSequence]:
    """What was packed, with every number as it was."""
    lengths, by_token = packed["response_lengths"].tolist(), packed["by_token"].tolist()
    prompts = parts(packed["prompt_tokens"], packed["prompt_lengths"].tolist())
    responses = parts(packed["response_tokens"], lengths)
    masked = packed["masked"].tolist()
    masks = iter(parts(packed["drawn"], [n for n, has in zip(lengths, masked, strict=True) if has]))
    drawn = [next(masks) if has else None for has in masked]
    lengths = [n if mask is None else int(np.count_nonzero(mask)) for n, mask in zip(lengths, drawn, strict=True)]
    logprobs = parts(packed["sampler_logprobs"], lengths)
    has_t1 = packed["has_logprobs_t1"].tolist()
    logprobs_t1 = iter(parts(packed["logprobs_t1"], [n for n, has in zip(lengths, has_t1, strict=True) if has]))
    each = [n if own else 1 for n, own in zip(lengths, by_token, strict=True)]
    advantages = parts(packed["advantages"], each)
    names = packed["samplers"].tolist()
    return [
        TrainSequence(
            prompt_tokens=prompts[i],
            response_tokens=responses[i],
            sampler_logprobs=logprobs[i],
            sampler_logprobs_t1=next(logprobs_t1) if has_t1[i] else None,
            advantage=advantages[i] if by_token[i] else float(advantages[i][0]),
            sampler=names[sampler],
            weight=float(packed["weights"][i]),
            drawn=drawn[i],
        )
        for i, sampler in enumerate(packed["sampler"].tolist())
    ]
