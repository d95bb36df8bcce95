"""The receiver of a run's reports. It imports nothing, so parts without Ray have an observer too."""


class RunObserver:
    """Receives what actors report. This one keeps nothing; a run's is launch.observe.Observer."""

    def event(self, kind: str, message: str) -> None:
        """Report an event; kind is one word."""

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Report the progress of the present phase; total 0: unknown."""

    def stopping(self, signal_name: str) -> None:
        """Report that the run was asked to stop and is about to."""

    def worked(self, actor: str, kind: str, start_s: float, end_s: float) -> None:
        """For the timeline; seconds since the epoch."""


UNOBSERVED = RunObserver()
