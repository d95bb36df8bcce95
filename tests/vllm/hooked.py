"""The least that makes a vLLM engine verify drafts which a test chooses. Imports vLLM: named to it, not imported.

Owns a scheduler with a hook and a proposer that proposes nothing; vLLM finds both by their names.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class HookedScheduler(Scheduler):
    """Calls `control` with the running requests before each schedule(); it may set their `spec_token_ids`."""

    control: Callable[[list[Any]], None] | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.control is not None:
            self.control(self.running)
        return super().schedule(*args, **kwargs)


class NoProposer:
    """Makes vLLM allocate for drafts and build its rejection sampler; the drafts come through the scheduler."""

    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, target_model: Any) -> None:
        pass

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]
