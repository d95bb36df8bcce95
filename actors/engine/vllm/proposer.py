"""Placeholder drafter for vLLM, when ours draft in the scheduler (`actors.engine.vllm.scheduler`).

It makes vLLM allocate for drafts and build its rejection sampler, and proposes nothing. Imports nothing of vLLM."""

from typing import Any

NO_PROPOSER = f"{__name__}.NoProposer"  # speculative_config: {"method": "custom_class", "model": ...}


class NoProposer:
    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, target_model: Any) -> None:
        """Called by vLLM's model runners."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Return an empty draft for each request."""
        return [[]] * len(sampled_token_ids)
