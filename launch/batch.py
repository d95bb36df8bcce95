"""Which responses are asked for at once, and how they are named: prompts to requests and back.

Owns request ids: nothing else may take one apart. Prompts may have different numbers of samples. What a sample is
(prompt, noise) follows from its pick and its index among the pick's samples alone, never from how many others there
are: counts decide which samples exist, not which tokens they get.
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

EVAL_EPOCH = -1  # of the first held-out set, -2 of the second, ...: epochs of training count from 0


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


def stop_rule(options: SamplingOptions, tokenizer: Tokenizer) -> StopRule | None:
    """What ends a response beside stop tokens: rollout.sampling.stop_strings. Raises DataError."""
    return StopRule(strings=stop_strings(options.stop_strings, tokenizer)) if options.stop_strings else None


class Batch:
    """`counts[i]` samples of each `picks[i]`. Ids count from `first_id` in the driver's canonical order, by pick, then
    by sample: sorting by id gives that order, whatever worker answered first."""

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
        """`expected_tokens`: of a response, one entry per pick. `sampling`, `stop`: of every response, or one per pick.
        Requests of EVAL_EPOCH and below are an evaluation's. Batches that are sampled with the same weights must not
        share ids, since records of hidden states are known by them: a further one begins at `next_id` of the one
        before."""
        if not all(count > 0 for count in counts):
            raise ValueError("a pick without samples has no place in a batch: leave it out")
        self.picks = tuple(picks)
        params = sampling if isinstance(sampling, Sequence) else [sampling] * len(picks)
        rules = stop if isinstance(stop, Sequence) else [stop] * len(picks)
        self._earlier: dict[int, int] = {}  # tokens of responses that are not to be sampled to their end
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
        """A batch of these requests: some of its own, begun already, or to be sampled up to an earlier end."""
        batch, whole = copy(self), {request.request_id: request.sampling.max_new_tokens for request in self.requests}
        batch.requests = tuple(requests)
        ends = [(request.request_id, request.sampling.max_new_tokens) for request in batch.requests]
        batch._earlier = {request_id: end for request_id, end in ends if end < whole[request_id]}
        return batch

    def unfinished(self, rollout: Rollout) -> bool:
        """It has come to an earlier end, not to its own."""
        end = self._earlier.get(rollout.request_id)
        return rollout.finish_reason is FinishReason.LENGTH and len(rollout.tokens) == end

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def next_id(self) -> int:
        return self._first[-1]

    def ids(self, index: int) -> range:
        """Ids of the samples of picks[index], in their order."""
        return range(self._first[index], self._first[index + 1])

    def place(self, request_id: int) -> tuple[int, int]:
        """(index of the pick, index of the sample) that an id stands for."""
        if not self._first[0] <= request_id < self.next_id:
            raise KeyError(f"request {request_id} is not of this batch ({self._first[0]} to {self.next_id - 1})")
        index = bisect_right(self._first, request_id) - 1
        return index, request_id - self._first[index]

    def prompt(self, request_id: int) -> Prompt:
        return self.picks[self.place(request_id)[0]].prompt
