"""Convert sequences to this rank's inputs of one optimizer step: the split into mini-batches, and the tensors.

Every rank holds all sequences of the step (in shared memory), makes the same plan from their lengths, and lays out its
own share. So the plan is never communicated, and normalisers are exact for the whole mini-batch over micro-batches and
ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actors.training.packing import build_micro_batch, bundles_of, input_tokens, plan_packed, plan_padded
from actors.training.parallel import Rank
from contracts.training import Demonstration, TrainSequence
from models.packed import PackedContext, packed_arrays
from models.transfer import upload


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """One micro-batch on the device, uploaded in one copy; [T] all tokens, [R] response tokens that the model drew."""

    tokens: Tensor  # int64 [T]
    context: PackedContext
    rows: Tensor  # int64 [R]
    targets: Tensor  # int64 [R]
    coefficients: Tensor  # float32 [R], factor of each token's loss in the mini-batch's loss
    advantages: Tensor  # float32 [R]; zeros for demonstrations
    sampler_logprobs: Tensor  # float32 [R], of the sampling distribution; zeros for demonstrations
    sampler_logprobs_t1: Tensor | None  # float32 [R]; zeros for demonstrations; None if the engine has none
    segments: Tensor  # int64 [S + 1], from 0 to R: bounds of the S sequences' response tokens
    samplers: Tensor  # int64 [R], the number of the rollout worker that drew each token; zeros for demonstrations
    response_lengths: tuple[int, ...]  # [S]
    indices: tuple[int, ...]  # [S], each sequence's index in the mini-batch
    sequences: tuple[TrainSequence | Demonstration, ...]  # [S]; none on a rank without work
    places: tuple[NDArray[np.int64], ...]  # [S], positions of each sequence's input in `tokens`


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """This rank's part of one optimizer step."""

    micro: tuple[TokenBatch, ...]
    response_tokens: int  # drawn by the model, all ranks
    computed_tokens: int  # of all ranks, with padding


def split_mini_batches(count: int, mini_batches: int) -> list[range]:
    """Return consecutive non-empty ranges of nearly equal size, larger ones first."""
    parts = min(count, mini_batches)
    size, larger = divmod(count, max(1, parts))
    starts = [i * size + min(i, larger) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def build_mini_batch(
    sequences: Sequence[TrainSequence | Demonstration],
    coefficients: NDArray[np.float64],
    rank: Rank,
    *,
    budget_tokens: int,
    packing: bool,
    shared: bool = False,
    samplers: Mapping[str, int] | None = None,
) -> MiniBatch:
    """Plan for all ranks, lay out this rank's micro-batches and upload them. `shared`: with packing, common prefixes in
    a micro-batch are computed once. `samplers`: numbers of the rollout workers, by name; None: 0 for all."""
    prompts = [s.prompt_tokens for s in sequences]
    responses = [s.response_tokens for s in sequences]
    if packing and shared:
        bundles, lengths = bundles_of(prompts, responses, budget_tokens=budget_tokens, ranks=rank.size)
        planned = plan_packed(lengths, budget_tokens=budget_tokens, ranks=rank.size)
        plan = [[[i for b in bin for i in bundles[b]] for bin in bins] for bins in planned]
    else:
        lengths = [input_tokens(len(p), len(r)) for p, r in zip(prompts, responses, strict=True)]
        plan = (plan_packed if packing else plan_padded)(lengths, budget_tokens=budget_tokens, ranks=rank.size)

    drawn = [s.drawn for s in sequences]
    lay_out = partial(build_micro_batch, padded=not packing, shared=packing and shared)
    laid_out = [[lay_out(m, prompts, responses, drawn) for m in bins] for bins in plan]
    computed = sum(flat.tokens.size for flats in laid_out for flat in flats if flat.indices)
    micro = []
    for flat in laid_out[rank.index]:
        indices = flat.indices
        chosen = [sequences[i] for i in indices]
        learned = [s for s in chosen if isinstance(s, TrainSequence)]
        nothing = np.zeros(flat.rows.size)
        floats = {
            "coefficients": np.repeat(coefficients[list(indices)], flat.response_lengths),
            "advantages": _joined([np.broadcast_to(s.advantage, s.drawn_tokens) for s in learned], nothing),
            "sampler_logprobs": _joined([s.sampler_logprobs for s in learned], nothing),
        }
        at_1 = [s.sampler_logprobs_t1 for s in learned if s.sampler_logprobs_t1 is not None]
        if len(at_1) == len(learned):
            floats["sampler_logprobs_t1"] = _joined(at_1, nothing)
        drew = [samplers[s.sampler] if samplers and isinstance(s, TrainSequence) else 0 for s in chosen]
        integers = {
            "tokens": flat.tokens,
            "rows": flat.rows,
            "targets": flat.targets,
            "segments": np.cumsum([0, *flat.response_lengths]),
            "samplers": np.repeat(np.array(drew, np.int64), flat.response_lengths),
        }
        there = upload(
            packed_arrays(flat.lengths, flat.parents)
            | {name: values.astype(np.int64) for name, values in integers.items()}
            | {name: values.astype(np.float32) for name, values in floats.items()},
            rank.device,
        )
        micro.append(
            TokenBatch(
                tokens=there["tokens"],
                context=PackedContext.uploaded(flat.lengths, there["cu_seqlens"], there["positions"], flat.parents),
                rows=there["rows"],
                targets=there["targets"],
                coefficients=there["coefficients"],
                advantages=there["advantages"],
                sampler_logprobs=there["sampler_logprobs"],
                sampler_logprobs_t1=there.get("sampler_logprobs_t1"),
                segments=there["segments"],
                samplers=there["samplers"],
                response_lengths=tuple(flat.response_lengths.tolist()),
                indices=indices,
                sequences=tuple(chosen),
                places=flat.places,
            )
        )
    return MiniBatch(tuple(micro), sum(s.drawn_tokens for s in sequences), computed)


def compared_with_sampler(batch: TokenBatch, logprobs: Tensor, logprobs_t1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the learner's and the sampler's log-probs for comparison: at temperature 1 if the engine provides them,
    since scaling and truncation hide nothing there; else at the sampling temperature."""
    if batch.sampler_logprobs_t1 is None:
        return logprobs, batch.sampler_logprobs
    return logprobs_t1, batch.sampler_logprobs_t1


def check_sequences(sequences: Sequence[TrainSequence | Demonstration], vocab_size: int) -> None:
    """Raise ValueError that names the first invalid sequence, and why."""
    for i, s in enumerate(sequences):
        if len(s.prompt_tokens) < 1 or len(s.response_tokens) < 1:
            raise ValueError(f"sequence {i}: prompt and response need at least one token each")
        top = max(int(s.prompt_tokens.max()), int(s.response_tokens.max()))
        if top >= vocab_size or min(int(s.prompt_tokens.min()), int(s.response_tokens.min())) < 0:
            raise ValueError(f"sequence {i}: token {top} is outside the model's vocabulary of {vocab_size}")
        if s.drawn is not None and (len(s.drawn) != len(s.response_tokens) or not s.drawn.any()):
            raise ValueError(f"sequence {i}: {s.drawn_tokens} of {len(s.response_tokens)} response tokens were drawn")
        if isinstance(s, TrainSequence):
            for given in (s.sampler_logprobs, s.sampler_logprobs_t1):
                if given is not None and len(given) != s.drawn_tokens:
                    raise ValueError(f"sequence {i}: {len(given)} log-probs for {s.drawn_tokens} response tokens")
            if np.ndim(s.advantage) and np.shape(s.advantage) != (s.drawn_tokens,):
                raise ValueError(
                    f"sequence {i}: advantages of shape {np.shape(s.advantage)} for {s.drawn_tokens} response tokens"
                )
            if not np.isfinite(s.advantage).all():
                raise ValueError(f"sequence {i}: advantage is {s.advantage}")


def _joined(parts: Sequence[NDArray[np.floating]], nothing: NDArray[np.floating]) -> NDArray[np.floating]:
    return np.concatenate(parts) if parts else nothing
