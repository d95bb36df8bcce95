"""vLLM's scheduler with our hand in it: drafts before a step is scheduled, ends before its tokens are entered.

Owns the places where vLLM is told; what it is told is `StepControl`'s. Drafts are made here and not in vLLM's proposer:
the step that is scheduled with them verifies them, so the strategy chosen for a step is that step's; and there is one
scheduler, however many ranks compute.
"""

from typing import Any, Protocol

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus


class StepControl(Protocol):
    """Who decides. Called in vLLM's scheduler, in this order, for every step."""

    def before_schedule(self, running: list[Any]) -> None:
        """`running`: vLLM's requests with a place in the batch. May set their `spec_token_ids`: what is there is
        verified in this step, as far as there is room."""

    def drafts_to_make(self) -> int:
        """How many tokens a drafter of vLLM's own proposes per request at the end of this step, for the next."""

    def sampled(self, scheduled: Any, output: Any) -> set[str]:
        """What the model drew. May shorten `output.sampled_token_ids`; returns the ids of requests that end with what
        is left of them."""


class PacelineScheduler(Scheduler):  # type: ignore[misc]
    """EngineArgs: scheduler_cls, with async_scheduling=False: drafts are made from what the last step drew."""

    control: StepControl | None = None
    preemptions = 0
    _ended: frozenset[str] | set[str] = frozenset()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self.control is not None:
            self.control.before_schedule(self.running)
        scheduled = super().schedule(*args, **kwargs)
        if self.control is not None:
            scheduled.num_spec_tokens_to_schedule = self.control.drafts_to_make()
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
