"""A child whose computation never ends, for test_stacks.py."""

import time

from actors.processes.child import hear, run_child
from actors.processes.link import Link


def hangs_here() -> None:
    while True:
        time.sleep(60)


def serve(link: Link) -> None:
    link.receive()
    hear(link, lambda message: None)
    link.send(["ready"])
    hangs_here()


def main() -> None:
    run_child(serve, str)
