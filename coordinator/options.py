"""The `coordinator:` section of the configuration. Owns names and ranges only."""

from typing import Annotated

from pydantic import BaseModel, Field


class CurveOptions(BaseModel, frozen=True, extra="forbid"):
    """Encryption of the workers' connections (CURVE): key pairs, and an allow-list that is these keys."""

    directory: Annotated[
        str | None, Field(description="key files made by `python -m coordinator keys`; default: no encryption")
    ] = None


class CoordinatorOptions(BaseModel, frozen=True, extra="forbid"):
    """When idle rollout workers train the drafter, and how long anything may take."""

    threshold: Annotated[int, Field(ge=1, description="idle workers of one group that start a session")] = 1
    max_members: Annotated[int, Field(ge=1, le=1024, description="workers that train in one session at most")] = 16
    heartbeat_s: Annotated[float, Field(gt=0, description="between two signs of life of a worker")] = 2.0
    lease_s: Annotated[float, Field(gt=0, description="a worker silent for so long is lost, and stops training")] = 10.0
    start_deadline_s: Annotated[float, Field(gt=0, description="from the command to train to its answer")] = 30.0
    stop_deadline_s: Annotated[
        float, Field(gt=0, description="from the command to stop to its answer; then the trainer is killed")
    ] = 2.0
    retry_after_s: Annotated[float, Field(ge=0, description="a worker whose trainer failed rests so long")] = 30.0
    host: Annotated[str, Field(description="address on which workers reach the coordinator")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="for workers; 0: any free one")] = 0
    admin_host: Annotated[str, Field(description="address of the admin service (no authentication)")] = "127.0.0.1"
    admin_port: Annotated[int, Field(ge=0, le=65535, description="for `paceline status`; 0: any free one")] = 0
    curve: CurveOptions = CurveOptions()

    def contradiction(self) -> str:
        """What the keys together make impossible; empty if nothing."""
        least_s = 2 * self.heartbeat_s + self.stop_deadline_s
        if self.lease_s >= least_s:
            return ""
        return (
            f"{self.lease_s:g} is less than 2 heartbeat_s + stop_deadline_s = {least_s:g}: one late heartbeat would be "
            "a loss, or a worker that is given up would still train"
        )
