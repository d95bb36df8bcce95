"""The drafter weights that a run may hand out again, in its checkpoint. Owns their files; never decides about them."""

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from actors.spot_host import DrafterReady
from models.manifest import TensorSpec, WeightsManifest

WEIGHTS_DIR = "drafter_weights"  # in a checkpoint; may be missing


def save_weights(directory: Path, kept: Iterable[DrafterReady]) -> None:
    """Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    for ready in kept:
        name = directory / str(ready.manifest.version)
        np.save(name.with_suffix(".npy"), ready.payload)
        name.with_suffix(".json").write_text(json.dumps(asdict(ready.manifest)), encoding="utf-8")


def load_weights(directory: Path) -> list[DrafterReady]:
    """What is there and is what was written; [] where there is no such directory."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            tensors = tuple(TensorSpec(**spec | {"shape": tuple(spec["shape"])}) for spec in facts["tensors"])
            manifest = WeightsManifest(**facts | {"tensors": tensors})
            payload = np.load(path.with_suffix(".npy"))
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if zlib.crc32(payload.data) == manifest.checksum:
            found.append(DrafterReady(manifest, payload))
    return found
