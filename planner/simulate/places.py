"""The places of a simulated run's workers, as what takes them away and gives them back sees them: cloud and elastic.

Exists because the run makes both and they act on the run.
"""

from typing import Protocol


class Places(Protocol):
    """By the names of workers."""

    def up(self) -> list[list[str]]:
        """What one interruption may take: the places that are up, by node or alone."""

    def withhold(self, name: str) -> None:
        """It gets nothing more."""

    def drain(self, name: str) -> None:
        """It gives everything back and is gone."""

    def fall_silent(self, name: str) -> None:
        """It is lost, and nobody knows."""

    def lose(self, name: str) -> None:
        """The driver has found out."""

    def let_go(self, name: str) -> None:
        """It goes of its own accord."""

    def ready(self, name: str) -> None:
        """A successor sits there."""

    def standing(self) -> tuple[list[str], list[tuple[float, str]]]:
        """Names of all that are up, and (seconds without a request, name) of those that have none, longest first."""

    def waiting(self) -> tuple[int, float]:
        """Requests that nobody has, and their expected tokens."""

    def tokens_per_s(self) -> float:
        """Of one worker; 0: nothing is known yet."""

    def node_of(self, name: str) -> int:
        """From 0."""
