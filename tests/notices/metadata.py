"""A metadata service on loopback that speaks the documented protocol of each cloud, and of what is none.

It demands what the real ones demand: tokens and headers. Who asks is known by the User-Agent, so that one stand-in can
give a notice to one of several nodes of a machine.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

NOW = "2026-11-23T03:00:00Z"
Reply = tuple[int, dict[str, str], bytes]
NOT_FOUND: Reply = (404, {}, b"")


@dataclass
class Cloud:
    """Its state. `given`: agents who have got a notice, and when (monotonic seconds). `ending`: who gets one."""

    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # method, path, headers
    posted: list[bytes] = field(default_factory=list)
    given: dict[str, float] = field(default_factory=dict)
    ending: Callable[[str], bool] = lambda agent: False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def end(self, who: Callable[[str], bool] = lambda agent: True) -> None:
        with self.changed:
            self.ending = who
            self.changed.notify_all()

    def notice(self, agent: str) -> bool:
        if not self.ending(agent):
            return False
        self.given.setdefault(agent, time.monotonic())
        return True

    def reply(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        raise NotImplementedError


@dataclass
class Aws(Cloud):
    tokens: set[str] = field(default_factory=set)
    rebalance: bool = False
    action: str = "terminate"

    def expire(self) -> None:
        self.tokens.clear()

    def reply(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if path == "/latest/api/token":
            ttl = headers.get("x-aws-ec2-metadata-token-ttl-seconds", "")
            if method != "PUT":
                return 405, {}, b""
            if not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
                return 400, {}, b""
            token = f"AQAEA{len(self.asked):04d}=="
            self.tokens.add(token)
            return 200, {"X-aws-ec2-metadata-token-ttl-seconds": ttl}, token.encode()
        if headers.get("x-aws-ec2-metadata-token") not in self.tokens:
            return 401, {}, b""
        if path == "/latest/meta-data/spot/instance-action" and self.notice(headers["user-agent"]):
            return 200, {}, json.dumps({"action": self.action, "time": NOW}).encode()
        if path == "/latest/meta-data/events/recommendations/rebalance" and self.rebalance:
            return 200, {}, json.dumps({"noticeTime": NOW}).encode()
        return NOT_FOUND


@dataclass
class Gcp(Cloud):
    maintenance: str = "NONE"
    held: int = 0  # questions that waited for a change

    def reply(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if headers.get("metadata-flavor") != "Google":
            return 403, {}, b"<html>Missing Metadata-Flavor:Google header.</html>"
        parts = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        agent, flavour = headers["user-agent"], {"Metadata-Flavor": "Google"}
        if parts.path == "/computeMetadata/v1/instance/maintenance-event":
            return 200, {**flavour, "ETag": "m"}, self.maintenance.encode()
        if parts.path != "/computeMetadata/v1/instance/preempted":
            return 404, flavour, b""
        with self.changed:
            if query.get("wait_for_change") == "true" and query.get("last_etag") == self._etag(agent):
                self.held += 1
                self.changed.wait_for(lambda: self.ending(agent), float(query.get("timeout_sec", "3600")))
            value = "TRUE" if self.notice(agent) else "FALSE"
            return 200, {**flavour, "ETag": self._etag(agent)}, value.encode()

    def _etag(self, agent: str) -> str:
        return "e/1" if self.ending(agent) else "e/0"


@dataclass
class Azure(Cloud):
    name: str = "workers_7"
    events: list[dict[str, object]] = field(default_factory=list)
    kind: str = "Preempt"

    def reply(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        if headers.get("metadata") != "true" or "x-forwarded-for" in headers:
            return 400, {}, b'{"error": "Bad request. Required metadata header not specified"}'
        parts = urlsplit(path)
        version = parse_qs(parts.query).get("api-version", [""])[0]
        if parts.path == "/metadata/instance/compute" and version:
            return 200, {}, json.dumps({"name": self.name, "vmId": "0-1"}).encode()
        if parts.path != "/metadata/scheduledevents" or version != "2020-07-01":
            return 400, {}, b""
        if method == "POST":
            self.posted.append(body)
            return 200, {}, b""
        events = list(self.events)
        if self.notice(headers["user-agent"]):
            events.append(event("ends", self.kind, [self.name]))
        return 200, {}, json.dumps({"DocumentIncarnation": len(events), "Events": events}).encode()


def event(event_id: str, kind: str, resources: list[str], *, status: str = "Scheduled") -> dict[str, object]:
    return {
        "EventId": event_id,
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": resources,
        "EventStatus": status,
        "NotBefore": "Mon, 23 Nov 2026 03:00:00 GMT" if status == "Scheduled" else "",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


@dataclass
class Strange(Cloud):
    """Whatever is none of them: a captive portal, a broken service, another one."""

    answer: Reply = (302, {"Location": "http://login.example/"}, b"<html>Please log in</html>")

    def reply(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Reply:
        return self.answer


@contextmanager
def serving(cloud: Cloud) -> Iterator[str]:
    """Its base URL."""

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", "0")))
            cloud.asked.append((self.command, self.path, headers))
            status, more, text = cloud.reply(self.command, self.path, headers, body)
            self.send_response(status)
            for name, value in {**more, "Content-Length": str(len(text))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_PUT = do_POST = _serve  # noqa: N815 - the names that http.server looks for

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(ConnectionError):  # whoever asked has gone
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        cloud.end()
        server.shutdown()
        server.server_close()
        thread.join()
