"""How far a simulation is: one line that is written over, where a person watches."""

import sys


class ProgressLine:
    """On stderr, if that is a terminal. `of`: what each text begins with."""

    def __init__(self) -> None:
        self._watched = sys.stderr.isatty()
        self.of = ""

    def say(self, what: str) -> None:
        if self._watched:
            sys.stderr.write(f"\r\x1b[K{self.of}{what}")
            sys.stderr.flush()

    def done(self) -> None:
        """The line is empty again."""
        if self._watched:
            sys.stderr.write("\r\x1b[K")
