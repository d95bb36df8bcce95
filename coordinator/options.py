"""The `coordinator:` section of the configuration. Owns names and ranges only."""

from typing import Annotated

from pydantic import BaseModel, Field


class CoordinatorOptions(BaseModel, frozen=True, extra="forbid"):
    """When idle rollout workers train the drafter, and how long anything may take."""

    idle_workers: Annotated[int, Field(ge=1, description="idle workers of one group that start a session")] = 1
    lease_s: Annotated[float, Field(gt=0, description="a worker silent for so long is lost")] = 10.0
    start_timeout_s: Annotated[float, Field(gt=0, description="from the command to train to its answer")] = 30.0
    stop_timeout_s: Annotated[float, Field(gt=0, description="from the command to stop to its answer, then lost")] = 2.0
    retry_after_s: Annotated[float, Field(ge=0, description="a worker whose trainer failed rests so long")] = 30.0
