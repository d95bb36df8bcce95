"""Who receives what the parts of a run report. Imports nothing: what needs no Ray has an observer too."""


class RunObserver:
    """Receives what actors report. This one keeps nothing; a run's is launch.observe.Observer."""

    def event(self, kind: str, message: str) -> None:
        """Something worth knowing happened; kind is one word."""

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        """How far what is under way has come; total 0: nobody knows."""

    def stopping(self, signal_name: str) -> None:
        """The run was asked to stop, and has not yet."""

    def worked(self, actor: str, kind: str, start_s: float, end_s: float) -> None:
        """For the timeline; seconds since the epoch."""


UNOBSERVED = RunObserver()
