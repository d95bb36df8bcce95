"""What vLLM takes for its drafter where ours draft in the scheduler (`actors.engine.vllm.scheduler`): it makes vLLM
allocate for drafts and build its rejection sampler, and proposes nothing. Imports nothing of vLLM."""

from typing import Any

NO_PROPOSER = f"{__name__}.NoProposer"  # speculative_config: {"method": "custom_class", "model": ...}


class NoProposer:
    def __init__(self, vllm_config: Any) -> None:
        pass

    def load_model(self, target_model: Any) -> None:
        """vLLM's model runners call it."""

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """For each request: nothing."""
        return [[]] * len(sampled_token_ids)
