"""Batches of requests: how prompts become numbered requests, and how an id maps back to its prompt.

Owns request ids: no other module takes one apart. Prompts may have different numbers of samples. A sample's prompt and
noise depend only on its pick and its index among that pick's samples, never on the number of other samples. So counts
decide which samples exist, not which tokens they get.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate

from actors.data import Prompt
from actors.data.stop_strings import stop_strings
from actors.data.tokenizers import Tokenizer
from config.rollout import SamplingOptions
from contracts.rollout import FinishReason, Request, Rollout, SamplingParams, StopRule
from models.noise import noise_key

EVAL_EPOCH = -1  # epoch of the first held-out set (-2: of the second, ...); epochs of training count from 0


@dataclass(frozen=True, slots=True)
class Pick:
    """One prompt of a batch. `epoch`, in which the data order served the prompt, decides its noise."""

    epoch: int
    prompt: Prompt


def sampling_params(options: SamplingOptions, stop_tokens: Sequence[int]) -> SamplingParams:
    """Return the sampling parameters. `stop_tokens`: the configuration's, else those of the model's files
    (launch.run.inputs.stop_tokens_of)."""
    return SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        stop_token_ids=tuple(stop_tokens),
    )


def stop_rule(options: SamplingOptions, tokenizer: Tokenizer) -> StopRule | None:
    """Return the rule that ends a response besides stop tokens: rollout.sampling.stop_strings. Raises DataError."""
    return StopRule(strings=stop_strings(options.stop_strings, tokenizer)) if options.stop_strings else None


class Batch:
    """`counts[i]` samples of each `picks[i]`. Ids count from `first_id` by pick, then by sample. Sorting by id
    therefore gives this canonical order, whichever worker answered first."""

    def __init__(
        self,
        picks: Sequence[Pick],
        counts: Sequence[int],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        seed: int,
        expected_tokens: Sequence[float],
        stop: StopRule | Sequence[StopRule | None] | None = None,
        first_id: int = 0,
    ) -> None:
        """`expected_tokens`: expected length of a response, one entry per pick. `sampling`, `stop`: for all responses,
        or one per pick. Requests of epochs up to EVAL_EPOCH belong to an evaluation. Batches sampled with the same
        weights must not share ids, since ids identify records of hidden states: start each further batch at the
        `next_id` of the last."""
        if not all(count > 0 for count in counts):
            raise ValueError("a pick without samples has no place in a batch: leave it out")
        self.picks = tuple(picks)
        params = sampling if isinstance(sampling, Sequence) else [sampling] * len(picks)
        rules = stop if isinstance(stop, Sequence) else [stop] * len(picks)
        self._earlier: dict[int, int] = {}  # token limit of responses that end earlier than their request says
        self._first = list(accumulate(counts, initial=first_id))  # id of each pick's first sample; then next_id
        self.requests = tuple(
            Request(
                request_id=first + sample,
                prompt_id=pick.prompt.prompt_id,
                prompt_tokens=pick.prompt.tokens,
                noise_key=noise_key(seed, pick.epoch, pick.prompt.prompt_id, sample),
                sampling=drawn,
                expected_tokens=expected,
                evaluation=pick.epoch <= EVAL_EPOCH,
                stop=rule,
            )
            for pick, count, drawn, expected, rule, first in zip(
                picks, counts, params, expected_tokens, rules, self._first[:-1], strict=True
            )
            for sample in range(count)
        )

    def only(self, requests: Iterable[Request]) -> "Batch":
        """Return a batch of these requests. They are requests of this batch that have begun, or end at an earlier
        limit."""
        batch, whole = copy(self), {request.request_id: request.sampling.max_new_tokens for request in self.requests}
        batch.requests = tuple(requests)
        ends = [(request.request_id, request.sampling.max_new_tokens) for request in batch.requests]
        batch._earlier = {request_id: end for request_id, end in ends if end < whole[request_id]}
        return batch

    def unfinished(self, rollout: Rollout) -> bool:
        """Whether the rollout ended at an earlier limit from `only`, not at its own end."""
        end = self._earlier.get(rollout.request_id)
        return rollout.finish_reason is FinishReason.LENGTH and len(rollout.tokens) == end

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def next_id(self) -> int:
        return self._first[-1]

    def ids(self, index: int) -> range:
        """Return the ids of the samples of picks[index], in order."""
        return range(self._first[index], self._first[index + 1])

    def place(self, request_id: int) -> tuple[int, int]:
        """Return (index of the pick, index of the sample) of an id."""
        if not self._first[0] <= request_id < self.next_id:
            raise KeyError(f"request {request_id} is not of this batch ({self._first[0]} to {self.next_id - 1})")
        index = bisect_right(self._first, request_id) - 1
        return index, request_id - self._first[index]

    def prompt(self, request_id: int) -> Prompt:
        return self.picks[self.place(request_id)[0]].prompt
