"""The last whole weight buffer of a worker's engine, kept as the base of deltas. The worker handles deltas that do not
apply."""

from collections.abc import Sequence

import numpy as np

from models.delta import Bytes, DeltaError, apply, target
from models.manifest import WeightsManifest


class BaseWeights:
    """The base buffer, empty at first. Not thread-safe."""

    def __init__(self) -> None:
        self._manifest: WeightsManifest | None = None
        self._buffer: Bytes = np.zeros(0, np.uint8)

    @property
    def version(self) -> int | None:
        return self._manifest.version if self._manifest is not None else None

    def keep(self, manifest: WeightsManifest, buffer: Bytes) -> None:
        """Keep a whole buffer, without a copy: the caller must not change it."""
        self._manifest, self._buffer = manifest, buffer

    def forget(self) -> None:
        self._manifest, self._buffer = None, np.zeros(0, np.uint8)

    def holds(self, manifest: WeightsManifest) -> bool:
        """Whether it holds just these weights."""
        return self._manifest == manifest

    def change(self, manifest: WeightsManifest, deltas: Sequence[Bytes]) -> Bytes:
        """Return the buffer that `manifest` describes, made from the held one by these deltas, one after another, and
        hold it from now on. Without deltas the held one must be it.

        It is a new buffer, since readers may still have the last one, so two exist for a while. Raises DeltaError; the
        held buffer is then unchanged.
        """
        if self._manifest is None:
            raise DeltaError(f"a delta to version {manifest.version} came, no weights are held")
        if self.holds(manifest):
            return self._buffer
        if not deltas:
            raise DeltaError(f"held is version {self.version}, and no delta to version {manifest.version} came")
        buffer, held = self._buffer.copy(), self._manifest
        for delta in deltas[:-1]:
            between = target(delta, held)
            apply(delta, between, held, buffer, verify=False)
            held = between
        apply(deltas[-1], manifest, held, buffer)
        self.keep(manifest, buffer)
        return buffer
