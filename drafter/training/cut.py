"""Cut the tensors that a drafter shares with its target out of the weights sent to engines. Needs no torch: a
supervisor runs it, so that a trainer receives megabytes instead of gigabytes.
"""

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from models.manifest import ITEM_BYTES, WeightsManifest, aligned

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
HEAD_TENSORS = (EMBEDDING, NORM, HEAD)


def cut_head(manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> tuple[WeightsManifest, NDArray[np.uint8]]:
    """Return the same version with `HEAD_TENSORS` only, copied. The checksum stays 0: the engine verifies the whole
    buffer."""
    specs, parts, offset = [], [], 0
    for spec in manifest.tensors:
        if spec.name in HEAD_TENSORS:
            padded = aligned(math.prod(spec.shape) * ITEM_BYTES[spec.dtype])
            parts.append(buffer[spec.offset_bytes : spec.offset_bytes + padded])
            specs.append(dataclasses.replace(spec, offset_bytes=offset))
            offset += padded
    memory = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    return WeightsManifest(manifest.version, 0, tuple(specs), offset), memory
