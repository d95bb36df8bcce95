"""vLLM's scheduler with two hooks: drafts before a step is scheduled, ends of responses before its tokens are recorded.

`StepControl` makes the decisions. Drafts are made here, not in vLLM's proposer, because the step scheduled with them
verifies them: a strategy then applies to the step it is chosen for. There is also only one scheduler for any number of
ranks.
"""

from typing import Any, Protocol

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from actors.engine.vllm.drafter_passes import NETWORK_DRAFTS


class StepControl(Protocol):
    """Makes the decisions. vLLM's scheduler calls the methods in this order, for every step."""

    def before_schedule(self, running: list[Any]) -> None:
        """`running`: vLLM's requests in the batch. May set their `spec_token_ids`, which this step verifies as far as
        there is room."""

    def verifies_network(self) -> bool:
        """Return whether this step's drafts are those that vLLM's own drafter proposed, or the first of them, and not
        others in their place: then it verifies them by the probabilities with which they were drawn."""

    def drafts_to_make(self) -> int:
        """Return how many tokens vLLM's own drafter proposes per request at the end of this step, for the next."""

    def sampled(self, scheduled: Any, output: Any) -> set[str]:
        """Handle the model's draws. May shorten `output.sampled_token_ids`; returns the ids of requests that end with
        the remaining tokens."""


class PacelineScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler class for EngineArgs, with async_scheduling=False: drafts need the last step's draws."""

    control: StepControl | None = None
    preemptions = 0
    _ended: frozenset[str] | set[str] = frozenset()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.control is not None:
            self.control.before_schedule(self.running)
        scheduled = super().schedule(*args, **kwargs)
        if self.control is not None:
            scheduled.num_spec_tokens_to_schedule = self.control.drafts_to_make()
            setattr(scheduled, NETWORK_DRAFTS, self.control.verifies_network())
        return scheduled

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self.control is not None:
            self._ended = self.control.sampled(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _update_request_with_output(self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        tokens, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        if not stopped and request.request_id in self._ended:
            request.status, stopped = RequestStatus.FINISHED_STOPPED, True
        return tokens, stopped

    def _preempt_request(self, *args: Any, **kwargs: Any) -> None:
        self.preemptions += 1
        super()._preempt_request(*args, **kwargs)
