"""Which Ray a run uses, by cluster.address and RAY_ADDRESS. Imports no Ray."""

import os


def attaches(address: str | None) -> bool:
    """Whether `session.ray_session(address=address)` attaches to a cluster that was there before."""
    return (address or os.environ.get("RAY_ADDRESS") or "local") != "local"
