"""The order of prompts: the permutation of each epoch and the position in it, resumable. Independent of the prompts.

An epoch's order is a function of (seed, epoch, n) alone: indices sorted by raw Philox words, a stream that numpy keeps
stable across versions and machines (unlike `Generator.permutation`).
"""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.data.errors import DataError


def epoch_order(n: int, seed: int, epoch: int, stream: str = "") -> NDArray[np.int64]:
    """Return a permutation of range(n), int64 [n]; different for every `stream`."""
    text = "/".join(["prompt order", str(seed), str(epoch), *([stream] if stream else [])])
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(n)
    return np.argsort(words, kind="stable")


class PromptOrder:
    """Yields every index of range(n) once per epoch, without end."""

    def __init__(self, n: int, seed: int, shuffle: bool, stream: str = "") -> None:
        self._n, self._seed, self._shuffle, self._stream = n, seed, shuffle, stream
        self._epoch = 0
        self._position = 0  # indices of this epoch already taken
        self._order = self._make_order()

    def take(self, k: int) -> list[tuple[int, int]]:
        """Return the next k (epoch, index) pairs. An index appears once per epoch; a batch may span epochs."""
        if k < 0:
            raise ValueError(f"cannot take {k} prompts")
        if k and not self._n:
            raise DataError("there are no prompts to order")
        taken: list[tuple[int, int]] = []
        while len(taken) < k:
            if self._position == self._n:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._make_order()
            part = self._order[self._position : self._position + k - len(taken)]
            taken.extend((self._epoch, int(index)) for index in part)
            self._position += len(part)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers: the position, and the parameters of the order."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "n": self._n,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state. Raises DataError if it belongs to other data or another seed."""
        if "n" not in state:
            raise DataError(
                "the checkpoint's data order is of data.sets, and this run has one set, data.train: resume with the "
                "same sets, or start a new run"
            )
        for name, mine, key in (
            ("n", self._n, "data.train (number of usable prompts)"),
            ("seed", self._seed, "run.seed"),
            ("shuffle", self._shuffle, "data.shuffle"),
        ):
            if state[name] != mine:
                raise DataError(
                    f"the checkpoint's data order was made with {key} = {state[name]}, this run has {mine}: "
                    "resume with the same data and seed, or start a new run"
                )
        if not 0 <= state["position"] <= self._n or state["epoch"] < 0:
            raise DataError(f"the checkpoint's data order is damaged: {state}")
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._make_order()

    def _make_order(self) -> NDArray[np.int64]:
        if not self._shuffle:
            return np.arange(self._n)
        return epoch_order(self._n, self._seed, self._epoch, self._stream)
