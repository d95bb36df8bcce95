"""Records of whole sequences by a forward pass of the target: for offline training, benchmarks and tests.

While rollouts run, records come from the engine or the learner instead, without an extra pass.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from contracts.records import SequenceRecord
from models.dtypes import DTYPE_NAMES
from models.packed import PackedContext
from models.transformer import Transformer


@torch.no_grad()
def collect_records(
    target: Transformer,
    prompts: Sequence[NDArray[np.int32]],
    responses: Sequence[NDArray[np.int32]],
    *,
    layers: Sequence[int] = (),
    version: int = 0,
    batch_tokens: int = 4096,
) -> Iterator[SequenceRecord]:
    """Yield one record per pair, in order, of all positions but the last token's. Sequences are packed for the forward
    pass.

    Pairs with fewer than two tokens in total give none. bfloat16 or float32, as the target computes.
    """
    device = target.embed_tokens.weight.device
    sequences = [np.concatenate(pair).astype(np.int32) for pair in zip(prompts, responses, strict=True)]
    wanted = [i for i, sequence in enumerate(sequences) if len(sequence) >= 2]
    start = 0
    while start < len(wanted):
        end, size = start, 0
        while end < len(wanted) and (end == start or size + len(sequences[wanted[end]]) <= batch_tokens):
            size += len(sequences[wanted[end]])
            end += 1
        chosen = wanted[start:end]
        start = end
        fed = [sequences[i][:-1] for i in chosen]
        tokens = torch.from_numpy(np.concatenate(fed).astype(np.int64)).to(device)
        context = PackedContext.from_lengths([len(sequence) for sequence in fed], device)
        states = target(tokens, context, tuple(layers)).contiguous().cpu()
        rows = states.view(torch.uint8).numpy()
        at = 0
        for i, sequence in zip(chosen, fed, strict=True):
            own = rows[at : at + len(sequence)].copy()
            at += len(sequence)
            yield SequenceRecord(
                tokens=sequences[i],
                prompt_length=len(prompts[i]),
                first=0,
                states=own,
                dtype=DTYPE_NAMES[states.dtype],
                width=states.shape[1],
                target_version=version,
                request_id=i,
            )
