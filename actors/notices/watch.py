"""Watch of one node: detects its cloud, then polls for notices. Schedules requests and pauses.

Sockets and time are passed in. A failure is reported once, and retried more and more slowly; it never raises.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from actors.notices.aws import AwsAdapter
from actors.notices.azure import AzureAdapter
from actors.notices.gcp import GcpAdapter
from actors.notices.http import Http
from actors.notices.types import AnswerError, News, Provider
from config.spot import SpotOptions

DETECT_TIMEOUT_S = 1.0
TIMEOUT_S = 2.0
SLOWEST_S = 30.0


@dataclass(frozen=True, slots=True)
class Watching:
    """The cloud whose notices the node polls; None: no cloud, with the reason, and the watch ends."""

    provider: Provider | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Trouble:
    """The service is unreachable or gives invalid answers; it is retried more slowly."""

    reason: str


WatchEvent = Watching | News | Trouble


def watch(
    options: SpotOptions,
    http: Http,
    *,
    clock: Callable[[], float],
    drained: threading.Event | None = None,
) -> Iterator[WatchEvent | float]:
    """Yield the events, and between them pauses in seconds, which the caller makes. Ends if no cloud answers, with
    `auto`.

    drained: set while nothing of the run is left on the node, so that its end may begin; None: never. clock:
    monotonic seconds.
    """
    if options.provider == "none":
        yield Watching(None, "cluster.spot.provider is none")
        return
    if options.provider == "auto":
        adapter, why = detect(options, http)
        if adapter is None:
            yield Watching(None, why)
            return
    else:
        adapter = adapter_of(options.provider)
    if adapter.provider == "azure" and options.acknowledge:
        adapter = AzureAdapter(TIMEOUT_S, drained)
    yield Watching(adapter.provider)
    failures, said = 0, False
    began_s = clock()
    while True:
        try:
            yield from adapter.heard(http(adapter.ask()))
            failures = 0
            if not adapter.wait:
                continue
        except (OSError, AnswerError) as error:
            failures += 1
            if not said:
                said = True
                yield Trouble(f"{adapter.provider}: {_words(error)}")
        period_s = min(max(options.poll_s, SLOWEST_S), options.poll_s * 2 ** min(failures, 16))
        # A service that holds a request until a change has done the waiting, unless it failed.
        yield period_s if failures else max(0.0, began_s + period_s - clock())
        began_s = clock()


# The protocol of one cloud, without sockets or a clock: `ask`, then `heard` with the answer (after AnswerError the next
# `ask` starts a round), until `wait`: no further request before the next period.
NoticeAdapter = AwsAdapter | GcpAdapter | AzureAdapter


def adapter_of(provider: Provider, timeout_s: float = TIMEOUT_S) -> NoticeAdapter:
    match provider:
        case "aws":
            return AwsAdapter(timeout_s)
        case "gcp":
            return GcpAdapter(timeout_s)
        case "azure":
            return AzureAdapter(timeout_s)


def detect(options: SpotOptions, http: Http) -> tuple[NoticeAdapter | None, str]:
    """Send each cloud's first request once; return the adapter of the one with a documented answer, or why there is
    none."""
    providers: tuple[Provider, ...] = ("aws", "gcp", "azure")
    heard: dict[str, list[str]] = {}
    for provider in providers:
        adapter = adapter_of(provider, DETECT_TIMEOUT_S)
        try:
            adapter.heard(http(adapter.ask()))
        except (OSError, AnswerError) as error:
            heard.setdefault(_words(error), []).append(provider)
            continue
        return adapter_of(provider), ""
    answers = "; ".join(f"{', '.join(names)}: {words}" for words, names in heard.items())
    return None, f"no cloud's metadata service at {options.base_url} ({answers})"


def _words(error: Exception) -> str:
    if isinstance(error, AnswerError | TimeoutError):
        return str(error)
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
