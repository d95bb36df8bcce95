"""Records of small targets, as an engine, a buffer and an older version would hand them over."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from config.drafter import Algorithm
from contracts.records import SequenceRecord
from drafter.eagle import Drafting, fused_layers, init_eagle
from drafter.training.collect import collect_records
from drafter.training.variants import VARIANTS
from models.transformer import Transformer
from tests.engine.support import VOCAB

ALGORITHMS: tuple[Algorithm, ...] = ("eagle", "hass", "eagle3", "osd")


def records_of(
    target: Transformer,
    lengths: Sequence[int],
    *,
    firsts: Sequence[int] | None = None,
    versions: Sequence[int] | None = None,
    seed: int = 0,
    all_layers: bool = True,
) -> list[SequenceRecord]:
    """One record per length (tokens), whose states begin at firsts[i]; all with the states eagle3 needs by default."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]
    layers = fused_layers(target.config.num_layers) if all_layers else ()
    prompts, responses = [t[:1] for t in texts], [t[1:] for t in texts]
    records = list(collect_records(target, prompts, responses, layers=layers, batch_tokens=64))
    return [
        replace(record, first=first, states=record.states[first:], target_version=version)
        for record, first, version in zip(
            records, firsts or [0] * len(texts), versions or [0] * len(texts), strict=True
        )
    ]


def drafter_for(target: Transformer, algorithm: Algorithm, seed: int = 7) -> Drafting:
    """A network of that variant whose weights are large enough that every input counts."""
    model = init_eagle(
        target.config, seed, VARIANTS[algorithm].network, dtype=torch.float32, device="cpu", batch_invariant=True
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model
