"""Requests to a metadata service, its answers, and their meaning. Plain data with parsing only."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal

Provider = Literal["aws", "gcp", "azure"]


class AnswerError(ValueError):
    """An answer outside the protocol: from a proxy, a captive portal, another service, or a broken one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One HTTP request. `timeout_s`: for its whole answer."""

    method: Literal["GET", "PUT", "POST"]
    path: str  # with query
    headers: Mapping[str, str]
    timeout_s: float
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class MetadataAnswer:
    """An answer. Header names are in lower case. A redirect is an ordinary answer, and is not followed."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace").strip()

    def record(self) -> dict[str, Any]:
        """Return its JSON object. Raises AnswerError."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            raise AnswerError(f"no JSON: {self.shown}") from None
        if not isinstance(found, dict):
            raise AnswerError(f"no JSON object: {self.shown}")
        return found

    @property
    def shown(self) -> str:
        """Status and start of the text, for messages."""
        start = " ".join(self.text.split())
        return f"HTTP {self.status} {start[:77] + '...' if len(start) > 80 else start!r}"


@dataclass(frozen=True, slots=True)
class SpotNotice:
    """A notice to a node about itself.

    ends: the node, or what runs there, will be lost. Otherwise it is advice, which is passed on without effect.
    """

    what: str  # one readable line: the source, and its message
    ends: bool
    at_s: float | None = None  # Unix time before which it does not happen; None: unknown, or it happens already


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A notice (`SpotNotice.what`) no longer applies: the node is not lost for that reason."""

    what: str


News = SpotNotice | Withdrawn


def changes(before: Sequence[SpotNotice], now: Sequence[SpotNotice]) -> list[News]:
    """Return a service's new notices, and the announced ends that it withdraws."""
    withdrawn = {notice.what for notice in before if notice.ends} - {notice.what for notice in now}
    return [*(notice for notice in now if notice not in before), *map(Withdrawn, sorted(withdrawn))]


def unix_time(text: object) -> float | None:
    """Parse ISO 8601 (UTC by default) or an HTTP date; None if it is neither, or empty."""
    if not isinstance(text, str) or not text.strip():
        return None
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            moment = read(text.strip())
            return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError, TypeError, IndexError):
            continue
    return None


def ordinary(text: object, limit: int = 120) -> str:
    """Return a service's text fit for one line of a log: without control characters, and of limited length."""
    shown = "".join(c if c.isprintable() else "?" for c in str(text))
    return shown if len(shown) <= limit else shown[:limit] + "..."
