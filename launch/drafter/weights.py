"""The drafter weights that a run may hand out again, in its checkpoint. Owns their files; never decides about them.

The driver holds references to them. Only here do their bytes pass through it, one version at a time.
"""

import json
import logging
import zlib
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import ray
from ray.exceptions import RayError

from launch.dispatch import Weights
from models.checksum import checksum
from models.manifest import TensorSpec, WeightsManifest

WEIGHTS_DIR = "drafter_weights"  # in a checkpoint; may be missing
_FETCH_TIMEOUT_S = 60.0  # of one version, from another node's store
_log = logging.getLogger(__name__)


def save_weights(directory: Path, kept: Iterable[Weights]) -> None:
    """Write the weights, without those that were lost with their node. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    for weights in kept:
        version = weights.manifest.version
        try:
            payload = ray.get(weights.ref, timeout=_FETCH_TIMEOUT_S)
        except RayError as error:
            _log.warning("the drafter's weights of version %d are lost: %s", version, error)
            continue
        name = directory / str(version)
        np.save(name.with_suffix(".npy"), payload)
        name.with_suffix(".json").write_text(json.dumps(asdict(weights.manifest)), encoding="utf-8")


def load_weights(directory: Path) -> list[Weights]:
    """Put all intact weights of the directory into the object store and return them; [] without such a directory."""
    found = []
    for path in sorted(directory.glob("*.json")):
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            tensors = tuple(TensorSpec(**spec | {"shape": tuple(spec["shape"])}) for spec in facts["tensors"])
            manifest = WeightsManifest(**facts | {"tensors": tensors})
            payload = np.load(path.with_suffix(".npy"), allow_pickle=False)
        except (OSError, ValueError, TypeError, KeyError):
            continue
        found_sum = checksum(payload)
        if manifest.checksum != found_sum and manifest.checksum == zlib.crc32(
            payload.data
        ):  # of a run that an earlier version began
            manifest = replace(manifest, checksum=found_sum)
        if found_sum == manifest.checksum:
            found.append(Weights(manifest, ray.put(payload)))
    return found
