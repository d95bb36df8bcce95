"""The learner's errors, with messages for the driver. Importable without torch."""

from typing import Literal


class NonFiniteError(RuntimeError):
    """Loss or gradient norm is inf or nan; that optimizer step did not change the weights."""


LossKind = Literal["ended", "memory", "silent"]  # its process, by whatever; for lack of memory; or it does not answer


class LearnerLostError(RuntimeError):
    """A learner rank died or did not answer in time. The group cannot continue: a new one starts from a checkpoint."""

    def __init__(
        self, rank: int, node: str, call: str, reason: str, kind: LossKind = "ended", remedy: str | None = None
    ) -> None:
        super().__init__(f"learner rank {rank} on node {node} was lost in {call}: {reason}")
        self.rank = rank
        self.node = node
        self.call = call
        self.reason = reason
        self.kind = kind
        self.remedy = remedy

    def with_remedy(self, remedy: str) -> "LearnerLostError":
        return LearnerLostError(self.rank, self.node, self.call, self.reason, self.kind, remedy or None)

    def __reduce__(self) -> tuple[type["LearnerLostError"], tuple[int, str, str, str, LossKind, str | None]]:
        return LearnerLostError, (self.rank, self.node, self.call, self.reason, self.kind, self.remedy)
