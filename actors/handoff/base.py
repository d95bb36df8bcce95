"""The last whole weight buffer of a worker's engine, kept as the base of deltas. The worker handles deltas that do not
apply."""

import numpy as np

from models.delta import Bytes, DeltaError, apply
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

    def change(self, manifest: WeightsManifest, delta: Bytes) -> Bytes:
        """Return the buffer that `manifest` describes, made from the held one by the delta, and hold it from now on.

        It is a new buffer, since readers may still have the last one, so two exist for a while. Raises DeltaError; the
        held buffer is then unchanged.
        """
        if self._manifest is None:
            raise DeltaError(f"a delta to version {manifest.version} came, no weights are held")
        buffer = self._buffer.copy()
        apply(delta, manifest, self._manifest, buffer)
        self.keep(manifest, buffer)
        return buffer
