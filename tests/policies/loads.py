"""The load of an engine step, where only the number of requests matters."""

from policies.speculation.policy import Load


def load(running: int) -> Load:
    return Load(running, 0, 100 * running)
