"""vLLM's `worker_extension_cls` with Model Runner V2. Only vLLM imports this module: in every process that executes the
model, before it makes its runner."""

from actors.engine.vllm.runner_v2 import install, take_drafts
from actors.engine.vllm.worker import PacelineWorker

install()


class PacelineWorkerV2(PacelineWorker):
    def paceline_take_drafts(self) -> None:
        """Have the runner verify the scheduler's drafts."""
        take_drafts(self.model_runner)
