"""Preemption and maintenance notices of Google Compute Engine's metadata server.

    GET /computeMetadata/v1/instance/preempted           TRUE once a spot VM is being preempted: 30 s
    GET /computeMetadata/v1/instance/maintenance-event   NONE, MIGRATE_ON_HOST_MAINTENANCE, TERMINATE_ON_HOST_...

Every request has the header `Metadata-Flavor: Google`, and so has every genuine answer. `preempted` is requested with
`wait_for_change`: the server answers once the value differs from that of `last_etag`, or after `timeout_sec`.

Source: Google Cloud, "About VM metadata" (waiting for change, etags), "Preemptible VM instances" and "Query metadata
server for maintenance event notices". A VM with GPUs cannot migrate: it receives TERMINATE up to an hour ahead.
"""

from urllib.parse import quote

from actors.notices.types import AnswerError, Ask, MetadataAnswer, News, Provider, SpotNotice, changes, ordinary

ROOT = "/computeMetadata/v1/instance"
PREEMPTED_PATH, MAINTENANCE_PATH = f"{ROOT}/preempted", f"{ROOT}/maintenance-event"
HEADERS = {"Metadata-Flavor": "Google"}
HOLD_S = 10  # after each, maintenance is requested, which is announced 60 s ahead


class GcpAdapter:
    provider: Provider = "gcp"

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._etag = ""  # of the last answer about preemption; required to wait for a change
        self._maintenance = False  # whether maintenance is requested next
        self._said: dict[str, list[SpotNotice]] = {PREEMPTED_PATH: [], MAINTENANCE_PATH: []}

    @property
    def wait(self) -> bool:
        return not self._maintenance

    def ask(self) -> Ask:
        if self._maintenance:
            return Ask(method="GET", path=MAINTENANCE_PATH, headers=HEADERS, timeout_s=self._timeout_s)
        if not self._etag:
            return Ask(method="GET", path=PREEMPTED_PATH, headers=HEADERS, timeout_s=self._timeout_s)
        query = f"wait_for_change=true&last_etag={quote(self._etag, safe='')}&timeout_sec={HOLD_S}"
        path, timeout_s = f"{PREEMPTED_PATH}?{query}", HOLD_S + self._timeout_s
        return Ask(method="GET", path=path, headers=HEADERS, timeout_s=timeout_s)

    def heard(self, answer: MetadataAnswer) -> list[News]:
        path = MAINTENANCE_PATH if self._maintenance else PREEMPTED_PATH
        etag, self._etag, self._maintenance = self._etag, "", False
        value = value_of(answer)
        self._etag = etag
        if path == PREEMPTED_PATH:
            self._etag = answer.headers.get("etag", "")
            self._maintenance = True
        before, self._said[path] = self._said[path], _notices(path, value)
        return changes(before, self._said[path])


def _notices(path: str, value: str) -> list[SpotNotice]:
    if path == PREEMPTED_PATH:
        return [SpotNotice("Compute Engine preempts it", True)] if value == "TRUE" else []
    if value == "NONE":
        return []
    if value.startswith("TERMINATE"):
        return [SpotNotice(f"Compute Engine will end it for maintenance ({ordinary(value)})", True)]
    return [SpotNotice(f"Compute Engine's maintenance will pause it for a moment ({ordinary(value)})", False)]


def value_of(answer: MetadataAnswer) -> str:
    """Return the answer's one line of text. Raises AnswerError."""
    if answer.headers.get("metadata-flavor") != "Google":
        raise AnswerError(f"without the header Metadata-Flavor: Google, so not of a metadata server: {answer.shown}")
    if answer.status != 200 or not answer.text or len(answer.text) > 200 or "\n" in answer.text:
        raise AnswerError(answer.shown)
    return answer.text
