"""How the driver waits for Ray: in slices, between which it does what does not wait for it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

SLICE_S = 0.25
Refs = list["ray.ObjectRef[Any]"]


def wait_for_all(
    refs: "Sequence[ray.ObjectRef[Any]]", timeout_s: float, meanwhile: Callable[[], object]
) -> tuple[Refs, Refs]:
    """Those that are there within `timeout_s`, and those that are not."""
    deadline_s = time.monotonic() + timeout_s
    there, late = Refs(), list(refs)
    while late and (left_s := deadline_s - time.monotonic()) > 0:
        ready, late = ray.wait(late, num_returns=len(late), timeout=min(left_s, SLICE_S))
        there += ready
        if late:
            meanwhile()
    return there, late
