"""The places of a simulated run's workers, as what takes them away and gives them back sees them: cloud and elastic.

Exists because the run makes both and they act on the run.
"""

from typing import Protocol


class Places(Protocol):
    """The places of workers, by name. The fleet of a simulated run, and that of a test, implement it."""

    def up(self) -> list[list[str]]:
        """Return the places that are up, in groups that one interruption takes together: by node, or alone."""

    def withhold(self, name: str) -> None:
        """Give this worker no further requests."""

    def drain(self, name: str) -> None:
        """Take its requests back and let it leave."""

    def fall_silent(self, name: str) -> None:
        """Lose it without a message to the driver."""

    def lose(self, name: str) -> None:
        """Tell the driver that it is lost."""

    def let_go(self, name: str) -> None:
        """Let it leave by itself."""

    def ready(self, name: str) -> None:
        """Put a successor in its place."""

    def standing(self) -> tuple[list[str], list[tuple[float, str]]]:
        """Return the names of all that are up, and (idle seconds, name) of the idle ones, longest first."""

    def waiting(self) -> tuple[int, float]:
        """Return the number of unassigned requests, and their expected tokens."""

    def tokens_per_s(self) -> float:
        """Return the decoding speed of one worker; 0: not known yet."""

    def node_of(self, name: str) -> int:
        """Return its node, from 0."""
