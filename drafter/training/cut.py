"""The tensors of a target that a drafter shares, cut out of the weights that travel to engines. No torch: a supervisor
does it, so that megabytes are sent to a trainer instead of gigabytes."""

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from models.manifest import ITEM_BYTES, WeightsManifest, aligned

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
HEAD_TENSORS = (EMBEDDING, NORM, HEAD)


def cut_head(manifest: WeightsManifest, buffer: NDArray[np.uint8]) -> tuple[WeightsManifest, NDArray[np.uint8]]:
    """The same version with `HEAD_TENSORS` only, copied. The checksum is left at 0: it is the engine's to verify the
    whole."""
    specs, parts, offset = [], [], 0
    for spec in manifest.tensors:
        if spec.name in HEAD_TENSORS:
            padded = aligned(math.prod(spec.shape) * ITEM_BYTES[spec.dtype])
            parts.append(buffer[spec.offset_bytes : spec.offset_bytes + padded])
            specs.append(dataclasses.replace(spec, offset_bytes=offset))
            offset += padded
    memory = np.concatenate(parts) if parts else np.empty(0, np.uint8)
    return WeightsManifest(manifest.version, 0, tuple(specs), offset), memory
