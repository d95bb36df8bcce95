"""What can go wrong in the learner, in words for the driver. Importable without torch."""


class NonFiniteError(RuntimeError):
    """Loss or gradient norm is inf or nan; the weights were not changed by that optimizer step."""


class CheckpointMismatchError(RuntimeError):
    """The checkpoint is not one of this model, optimizer and objective."""


class LearnerLostError(RuntimeError):
    """A learner rank died or did not answer in time. The group cannot go on; the run resumes from its checkpoint."""

    def __init__(self, rank: int, node: str, call: str, reason: str) -> None:
        super().__init__(f"learner rank {rank} on node {node} was lost in {call}: {reason}")
        self.rank = rank
        self.node = node
        self.call = call
        self.reason = reason

    def __reduce__(self) -> tuple[type["LearnerLostError"], tuple[int, str, str, str]]:
        return LearnerLostError, (self.rank, self.node, self.call, self.reason)
