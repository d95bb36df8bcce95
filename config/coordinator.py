"""The `coordinator:` section of the configuration. Names and ranges only."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, Field

OPEN_TO_ALL = ("0.0.0.0", "::", "*")
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


class CurveOptions(BaseModel, frozen=True, extra="forbid"):
    """Encryption of the workers' connections (CURVE). Only known keys connect."""

    enabled: Annotated[
        bool | None,
        Field(description="encrypt; default: always in a run; without a run, beyond loopback"),
    ] = None
    directory: Annotated[
        str | None,
        Field(description="key files of `python -m coordinator keys`; default: a run makes its own"),
    ] = None


class AdminOptions(BaseModel, frozen=True, extra="forbid"):
    """Access to the admin service. Beyond loopback it always requires a token and TLS."""

    token: Annotated[
        bool | None,
        Field(description="require the token in the run's admin-token; false: not on loopback"),
    ] = None
    certificate: Annotated[
        str | None, Field(description="PEM file for TLS; default beyond loopback: one made by the run")
    ] = None
    key: Annotated[str | None, Field(description="PEM file: the certificate's private key")] = None


class CoordinatorOptions(BaseModel, frozen=True, extra="forbid"):
    """When idle workers train the drafter, and deadlines."""

    threshold: Annotated[int, Field(ge=1, description="idle workers of a group that start a training session")] = 1
    max_members: Annotated[int, Field(ge=1, le=1024, description="workers per session at most")] = 16
    heartbeat_s: Annotated[float, Field(gt=0, description="seconds between heartbeats of a worker")] = 2.0
    lease_s: Annotated[float, Field(gt=0, description="a worker silent for longer is lost and stops training")] = 10.0
    start_deadline_s: Annotated[float, Field(gt=0, description="seconds to answer the command to train")] = 30.0
    stop_deadline_s: Annotated[
        float, Field(gt=0, description="seconds to answer the command to stop; then the trainer is killed")
    ] = 2.0
    retry_after_s: Annotated[float, Field(ge=0, description="pause after a failed trainer, seconds")] = 30.0
    host: Annotated[str, Field(description="address of the coordinator")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="port for workers; 0: any free one")] = 0
    admin_host: Annotated[str, Field(description="address of the admin service")] = "127.0.0.1"
    admin_port: Annotated[
        int, Field(ge=0, le=65535, description="port of the admin service (`paceline status`); 0: any free one")
    ] = 0
    curve: CurveOptions = CurveOptions()
    admin: AdminOptions = AdminOptions()

    @property
    def encrypts(self) -> bool:
        """Whether workers' connections are encrypted at `host`."""
        if self.curve.directory is not None:
            return True
        return self.host not in LOOPBACK if self.curve.enabled is None else self.curve.enabled

    def admin_asks(self, *, folder: bool) -> bool:
        """Return whether the admin service requires a token at `admin_host`. folder: there is a folder to write it
        to."""
        if self.admin.token is None:
            return folder or self.admin_host not in LOOPBACK
        return self.admin.token

    @property
    def admin_tls(self) -> bool:
        return self.admin.certificate is not None or self.admin_host not in LOOPBACK

    def contradictions(self) -> Iterator[tuple[str, str, str]]:
        """Yield impossible combinations of keys: the key, the reason, the remedy."""
        least_s = 2 * self.heartbeat_s + self.stop_deadline_s
        if self.lease_s < least_s:
            why = (
                f"{self.lease_s:g} is less than 2 heartbeat_s + stop_deadline_s = {least_s:g}: one late heartbeat "
                "would be a loss, or a worker that is given up would still train"
            )
            yield "lease_s", why, "raise it, or lower the others"
        if self.curve.enabled is False and self.curve.directory is not None:
            yield "curve.enabled", "false, but curve.directory names key files", "leave one of them out"
        if self.curve.enabled is False and self.host in OPEN_TO_ALL:
            why = f"{self.host} is open to everyone on every network, and curve.enabled=false"
            yield "host", why, "name the address of the workers' network, or leave curve.enabled out"
        if self.admin.token is False and self.admin_host not in LOOPBACK:
            why = f"false, but admin_host={self.admin_host} lets others reach the admin service"
            yield "admin.token", why, "leave it out; or leave admin_host out, and come through ssh -L"
        if (self.admin.certificate is None) != (self.admin.key is None):
            missing = "key" if self.admin.key is None else "certificate"
            yield f"admin.{missing}", "is missing: TLS needs a certificate and its key", "set both, or none of them"
