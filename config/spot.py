"""The `cluster.spot:` section of the configuration. Names and ranges only."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

METADATA_URL = "http://169.254.169.254"  # the same for all three clouds, reachable from the node itself only


class SpotOptions(BaseModel, frozen=True, extra="forbid"):
    """Notices of a cloud that it will reclaim a node."""

    provider: Annotated[
        Literal["auto", "aws", "gcp", "azure", "none"],
        Field(description="cloud whose notices nodes poll; auto: each node finds out; none: no polling"),
    ] = "auto"
    poll_s: Annotated[float, Field(ge=0.05, le=60, description="seconds between two polls of a node")] = 1.0
    base_url: Annotated[
        str,
        Field(
            pattern=r"^http://(\[[0-9A-Fa-f:.]+\]|[^\s/?#@:\[\]]+)(:[0-9]{1,5})?(/[^\s?#]*)?$",
            description="URL of the metadata service, e.g. http://[fd00:ec2::254]",
        ),
    ] = METADATA_URL
    acknowledge: Annotated[
        bool,
        Field(description="acknowledge Azure's event once the node has no work"),
    ] = False
