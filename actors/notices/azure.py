"""Scheduled events of Azure's instance metadata service.

    GET  /metadata/instance/compute?api-version=2021-02-01    the VM's own name in events
    GET  /metadata/scheduledevents?api-version=2020-07-01     {"DocumentIncarnation": 7, "Events": [...]}
    POST /metadata/scheduledevents?api-version=2020-07-01     {"StartRequests": [{"EventId": "..."}]}: it may begin

Every request has the header `Metadata: true`. All VMs of a scale set receive its events: one applies if its `Resources`
name this VM. The first request turns the service on, which may take two minutes. An acknowledgement lets an event begin
for all VMs it names. So it is sent only if enabled, when the VM is empty, and only for an event that names this VM
alone.

Source: Microsoft Learn, "Azure Metadata Service: Scheduled Events for Linux VMs" and "Azure Instance Metadata Service".
"""

import json
import threading
from typing import Any

from actors.notices.types import (
    AnswerError,
    Ask,
    MetadataAnswer,
    News,
    Provider,
    SpotNotice,
    changes,
    ordinary,
    unix_time,
)

NAME_PATH = "/metadata/instance/compute?api-version=2021-02-01"
EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
HEADERS = {"Metadata": "true"}
FIRST_ANSWER_S = 125.0
_ENDS = ("Preempt", "Terminate", "Reboot", "Redeploy")


class AzureAdapter:
    """drained: while it is set, Azure need not wait with an event that ends this VM; None: it always waits."""

    provider: Provider = "azure"

    def __init__(self, timeout_s: float, drained: threading.Event | None = None) -> None:
        self._timeout_s, self._drained = timeout_s, drained
        self._name = ""
        self._on = False  # the service has answered a request for events
        self._said: list[SpotNotice] = []
        self._agreed: list[str] = []  # events to acknowledge now
        self._done: set[str] = set()  # acknowledged events

    @property
    def wait(self) -> bool:
        return bool(self._name) and not self._agreed

    def ask(self) -> Ask:
        if not self._name:
            return Ask(method="GET", path=NAME_PATH, headers=HEADERS, timeout_s=self._timeout_s)
        if self._agreed:
            body = json.dumps({"StartRequests": [{"EventId": event} for event in self._agreed]}).encode()
            return Ask(
                method="POST",
                path=EVENTS_PATH,
                headers={**HEADERS, "Content-Type": "application/json"},
                timeout_s=self._timeout_s,
                body=body,
            )
        timeout_s = self._timeout_s if self._on else max(self._timeout_s, FIRST_ANSWER_S)
        return Ask(method="GET", path=EVENTS_PATH, headers=HEADERS, timeout_s=timeout_s)

    def heard(self, answer: MetadataAnswer) -> list[News]:
        if not self._name:
            self._name = name_of(answer)
            return []
        if self._agreed:
            agreed, self._agreed = self._agreed, []
            if answer.status != 200:  # the next list of events shows whether to try again
                raise AnswerError(f"an acknowledgement was refused: {answer.shown}")
            self._done.update(agreed)
            return []
        if answer.status != 200:
            raise AnswerError(answer.shown)
        events = events_of(answer)
        self._on = True
        # A complete list drops past events, so that nothing grows.
        mine = [event for event in events if _names(event, self._name)]
        before, self._said = self._said, [_notice(event) for event in mine]
        self._done &= {event["EventId"] for event in mine}
        own = [e["EventId"] for e in mine if e["EventType"] in _ENDS and len(e["Resources"]) == 1]
        held = [event for event in own if event not in self._done]
        self._agreed = held if self._drained is not None and self._drained.is_set() else []
        return changes(before, self._said)


def name_of(answer: MetadataAnswer) -> str:
    """Return the VM's name. Raises AnswerError."""
    if answer.status != 200:
        raise AnswerError(answer.shown)
    name = answer.record().get("name")
    if not isinstance(name, str) or not name:
        raise AnswerError(f"no name of a VM: {answer.shown}")
    return name


def events_of(answer: MetadataAnswer) -> list[dict[str, Any]]:
    """Return events with an id, a type and resources. Raises AnswerError for an invalid list or event."""
    events = answer.record().get("Events")
    if not isinstance(events, list):
        raise AnswerError(f"no list of events: {answer.shown}")
    for event in events:
        if not (
            isinstance(event, dict)
            and isinstance(event.get("EventId"), str)
            and isinstance(event.get("EventType"), str)
            and isinstance(event.get("Resources"), list)
        ):
            raise AnswerError(f"an event without EventId, EventType and Resources: {answer.shown}")
    return events


def _names(event: dict[str, Any], name: str) -> bool:
    return any(isinstance(other, str) and other.lower() == name.lower() for other in event["Resources"])


def _notice(event: dict[str, Any]) -> SpotNotice:
    kind = ordinary(event["EventType"])
    if kind == "Freeze":
        return SpotNotice("Azure will pause it for a few seconds (Freeze)", False)
    why = f": {ordinary(event['Description'])}" if event.get("Description") else ""
    return SpotNotice(f"Azure announces {kind}{why}", kind in _ENDS, unix_time(event.get("NotBefore")))
