"""The `cluster.spot:` section of the configuration. Owns names and ranges only."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

METADATA_URL = "http://169.254.169.254"  # of all three clouds, reachable from the node itself only


class SpotOptions(BaseModel, frozen=True, extra="forbid"):
    """How notices are heard that a node will be taken back."""

    provider: Annotated[
        Literal["auto", "aws", "gcp", "azure", "none"],
        Field(
            description="whose metadata service every node asks for notices; auto: each node finds out, where the "
            "run is on a cluster that it did not start itself; none: nobody asks"
        ),
    ] = "auto"
    poll_s: Annotated[float, Field(ge=0.05, le=60, description="between two questions of a node")] = 1.0
    base_url: Annotated[
        str,
        Field(
            pattern=r"^http://(\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+)(:[0-9]{1,5})?(/[^\s?#]*)?$",
            description="of the metadata service: another one for a proxy, or http://[fd00:ec2::254] on IPv6",
        ),
    ] = METADATA_URL
    acknowledge: Annotated[
        bool,
        Field(
            description="tell Azure, once a node has no work any more, that its end may come (an event of one VM only)"
        ),
    ] = False
