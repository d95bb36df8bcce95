"""Drafter weights in a run's checkpoint, without Ray."""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.dispatch import Weights
from launch.drafter.weights import load_weights, save_weights
from models.checksum import checksum
from models.manifest import WeightsManifest


def test_weights_in_a_checkpoint_of_an_earlier_version_are_taken_and_damaged_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That version's checksum was a CRC-32."""
    monkeypatch.setattr("ray.put", lambda value: value)
    monkeypatch.setattr("ray.get", lambda value, timeout=None: value)
    given: Any = np.frombuffer(b"weights 20", np.uint8)
    save_weights(tmp_path, [Weights(WeightsManifest(20, checksum(given), (), given.size), given)])
    (facts,) = tmp_path.glob("*.json")
    payload = np.load(facts.with_suffix(".npy"))
    for damage, count in ((0, 1), (1, 0)):
        said = json.loads(facts.read_text()) | {"checksum": zlib.crc32(payload.data) ^ damage}
        facts.write_text(json.dumps(said))
        loaded = load_weights(tmp_path)
        assert [weights.manifest.checksum for weights in loaded] == [checksum(payload)] * count
