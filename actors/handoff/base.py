"""The whole buffer of weights that a worker's engine got last, kept so that a delta can change it. Owns whether it is
changed in place; what a worker does when a delta does not fit is the worker's."""

import numpy as np

from models.delta import Bytes, DeltaError, apply
from models.manifest import WeightsManifest


class BaseWeights:
    """Holds nothing at first. One caller at a time."""

    def __init__(self) -> None:
        self._manifest: WeightsManifest | None = None
        self._buffer: Bytes = np.zeros(0, np.uint8)

    @property
    def version(self) -> int | None:
        return self._manifest.version if self._manifest is not None else None

    def keep(self, manifest: WeightsManifest, buffer: Bytes) -> None:
        """These came whole. They are not copied: whoever made `buffer` leaves it as it is."""
        self._manifest, self._buffer = manifest, buffer

    def forget(self) -> None:
        self._manifest, self._buffer = None, np.zeros(0, np.uint8)

    def change(self, manifest: WeightsManifest, delta: Bytes) -> Bytes:
        """The buffer that `manifest` describes, made of the one that is held; it is held from now on.

        It is a new one, since readers may have the last one still: beside it there are two for that long. Raises
        DeltaError; what was held stays held.
        """
        if self._manifest is None:
            raise DeltaError(f"a delta to version {manifest.version} came, no weights are held")
        buffer = self._buffer.copy()
        apply(delta, manifest, self._manifest, buffer)
        self.keep(manifest, buffer)
        return buffer
