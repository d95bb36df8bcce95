"""What a worker computes less of is bitwise what it would have computed."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors.engine.vllm.lean_steps import _gather_logprobs, _logprobs
from tests.vllm.support import VLLM

pytestmark = VLLM
VOCAB = 301
# Of each request: drafts, and how many of them stood.
BATCHES = {
    "mixed": [(0, 0), (3, 3), (3, 1), (2, 0), (8, 5)],
    "all stood": [(2, 2), (4, 4)],
    "one request": [(1, 0)],
}


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs", "processed_logits"])
@pytest.mark.parametrize("wanted", [0, 3])
@pytest.mark.parametrize("batch", BATCHES)
def test_log_probs_of_drafts_are_vllms_own(batch: str, wanted: int, mode: Any) -> None:
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler

    drafts, stood = (torch.tensor(of) for of in zip(*BATCHES[batch], strict=True))
    draw = torch.Generator().manual_seed(3)
    ends = (drafts + 1).cumsum(0)
    bonus_at = ends - 1
    target_at = torch.tensor([row for row in range(int(ends[-1])) if row not in bonus_at.tolist()], dtype=torch.int64)
    logits = 4 * torch.randn(int(ends[-1]), VOCAB, generator=draw)
    tokens = torch.randint(0, VOCAB, (len(drafts), int(drafts.max()) + 1), generator=draw, dtype=torch.int32)
    tokens[torch.arange(tokens.shape[1]) > stood[:, None]] = -1
    metadata = SimpleNamespace(
        num_draft_tokens=drafts.tolist(),
        cu_num_sampled_tokens=ends.to(torch.int32),
        bonus_logits_indices=bonus_at,
        target_logits_indices=target_at,
    )
    sampler = RejectionSampler(Sampler(mode))
    sampler.sampler.gather_logprobs = _gather_logprobs
    read = []
    for compute in (sampler._get_logprobs_tensors, functools.partial(_logprobs, sampler)):
        found = compute(wanted, metadata, logits.clone(), logits[target_at], logits[bonus_at], tokens)
        read.append(RejectionSampler.parse_output(tokens, VOCAB, (), found))
    (their_tokens, theirs), (our_tokens, ours) = read
    assert our_tokens == their_tokens
    assert ours.cu_num_generated_tokens == theirs.cu_num_generated_tokens
    for name in ("logprob_token_ids", "logprobs", "sampled_token_ranks"):
        assert (getattr(ours, name) == getattr(theirs, name)).all(), name
