"""A child whose computation never ends, for test_stacks.py."""

import queue
import time

from actors.processes.child import hear, parent_link
from actors.processes.link import Link


def hangs_here() -> None:
    while True:
        time.sleep(60)


def serve(link: Link) -> None:
    link.receive()
    hear(link, queue.SimpleQueue())
    link.send(["ready"])
    hangs_here()


def main() -> None:
    with parent_link(str) as link:
        serve(link)
