"""Prompts to requests and back: which responses an RL step or an evaluation asks for, and how they are named.

A request id is `prompt index in the batch * n + sample`: sorting by it gives the driver's canonical order, whatever
worker answered first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actors.data import Prompt
from actors.engine.options import SamplingOptions
from actors.engine.types import Request, SamplingParams
from models.noise import noise_key

EVAL_EPOCH = -1  # its noise never meets that of training, whose epochs count from 0


@dataclass(frozen=True, slots=True)
class Pick:
    """One prompt of a batch: the epoch in which the data order served it decides its noise."""

    epoch: int
    prompt: Prompt


def sampling_params(options: SamplingOptions, stop_tokens: Sequence[int]) -> SamplingParams:
    """`stop_tokens`: those of the configuration, else what the model's files say (launch.run.inputs.stop_tokens_of)."""
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop_token_ids=tuple(stop_tokens),
    )


def build_requests(
    picks: Iterable[Pick], samples: int, sampling: SamplingParams, *, seed: int, expected_tokens: Sequence[float]
) -> list[Request]:
    """`samples` requests per pick, in canonical order; `expected_tokens` has one entry per pick. Those of
    EVAL_EPOCH are an evaluation's."""
    return [
        Request(
            request_id=index * samples + sample,
            prompt_id=pick.prompt.prompt_id,
            prompt_tokens=pick.prompt.tokens,
            noise_key=noise_key(seed, pick.epoch, pick.prompt.prompt_id, sample),
            sampling=sampling,
            expected_tokens=expected,
            evaluation=pick.epoch == EVAL_EPOCH,
        )
        for index, (pick, expected) in enumerate(zip(picks, expected_tokens, strict=True))
        for sample in range(samples)
    ]
