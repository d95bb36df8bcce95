"""Requests through a whole engine: two waves, of which the first warms up and captures."""

from typing import Any

import numpy as np

from actors.engine.native.engine import NativeEngine
from contracts.rollout import Request, SamplingParams
from models.noise import noise_key

PROMPT_TOKENS, NEW_TOKENS = 64, 96


def waves(
    engine: NativeEngine,
    records: list[Any],
    batch: int,
    rehearse: bool,
    tokens: dict[int, list[int]] | None = None,
) -> list[Any]:
    """Return records of the steps in which all of `batch` requests decode and nothing else happens; at least some.
    `tokens`: filled with those of each response."""
    rng, new_tokens = np.random.default_rng(0), 6 if rehearse else NEW_TOKENS
    for wave in range(2):
        records.clear()
        prompts = rng.integers(0, 500, (batch, PROMPT_TOKENS)).astype(np.int32)
        found = engine.generate(
            [
                Request(
                    request_id=wave * batch + i,
                    prompt_id=wave * batch + i,
                    prompt_tokens=prompt,
                    noise_key=noise_key(0, wave, i, 0),
                    sampling=SamplingParams(new_tokens),
                )
                for i, prompt in enumerate(prompts)
            ]
        )
        if tokens is not None:
            tokens |= {request_id: rollout.tokens.tolist() for request_id, rollout in found.items()}
    full = [record for record in records if not record.prefill_tokens and record.running == batch]
    return full or records
