"""The whole way from a metadata service to a notice, over HTTP, with a stand-in for each cloud and for what is none."""

import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from actors.notices.http import Http
from actors.notices.types import AnswerError, Ask, MetadataAnswer, SpotNotice, Withdrawn
from actors.notices.watch import Trouble, WatchEvent, Watching, watch
from config.spot import SpotOptions
from tests.notices.metadata import Aws, Azure, Cloud, Gcp, Strange, event, serving

WAIT_S = 20.0


@contextmanager
def watching(
    url: str, provider: str, drained: threading.Event | None = None, **more: object
) -> Iterator["queue.Queue[WatchEvent]"]:
    options = SpotOptions.model_validate({"provider": provider, "poll_s": 0.05, "base_url": url, **more})
    heard: queue.Queue[WatchEvent] = queue.Queue()
    over = threading.Event()

    def run() -> None:
        for one in watch(options, Http(url, "paceline test"), clock=time.monotonic, drained=drained):
            if not isinstance(one, float):
                heard.put(one)
            elif over.wait(one):
                return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield heard
    finally:
        over.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def rounds(cloud: Cloud, more: int = 4) -> None:
    """Wait until it has been asked some more."""
    wanted, end_s = len(cloud.asked) + more, time.monotonic() + WAIT_S
    while len(cloud.asked) < wanted:
        assert time.monotonic() < end_s, "nobody asks"
        threading.Event().wait(0.01)


@pytest.mark.parametrize(("cloud", "provider"), [(Aws(), "aws"), (Gcp(), "gcp"), (Azure(), "azure")])
def test_auto_finds_the_cloud_and_then_hears_its_notice_once(cloud: Cloud, provider: str) -> None:
    with serving(cloud) as url, watching(url, "auto") as heard:
        assert heard.get(timeout=WAIT_S) == Watching(provider)
        rounds(cloud, 3)
        cloud.end()
        notice = heard.get(timeout=WAIT_S)
        assert isinstance(notice, SpotNotice)
        assert notice.ends
        if provider != "gcp":  # whose next question waits for a change
            rounds(cloud)
        assert heard.empty()
        cloud.end(lambda agent: False)  # after all
        assert heard.get(timeout=WAIT_S) == Withdrawn(notice.what)
        cloud.end()
        assert heard.get(timeout=WAIT_S) == notice


def test_an_aws_token_that_is_over_is_renewed_and_nothing_is_said_about_it() -> None:
    cloud = Aws()
    with serving(cloud) as url, watching(url, "aws") as heard:
        rounds(cloud)
        cloud.expire()
        rounds(cloud)
        cloud.end()
        assert heard.get(timeout=WAIT_S) == Watching("aws")
        notice = heard.get(timeout=WAIT_S)
        assert isinstance(notice, SpotNotice), notice
        assert notice.what == "EC2 will terminate it"
        assert notice.at_s == 1795402800.0
    assert [ask for ask in cloud.asked if ask[0] == "PUT"]
    assert all("x-aws-ec2-metadata-token" in headers for method, _, headers in cloud.asked if method == "GET")


def test_a_rebalance_recommendation_is_advice() -> None:
    with serving(Aws(rebalance=True)) as url, watching(url, "aws") as heard:
        heard.get(timeout=WAIT_S)
        notice = heard.get(timeout=WAIT_S)
        assert isinstance(notice, SpotNotice)
        assert not notice.ends


def test_compute_engine_is_asked_to_wait_for_a_change_and_about_maintenance_besides() -> None:
    cloud = Gcp()
    with serving(cloud) as url, watching(url, "gcp") as heard:
        heard.get(timeout=WAIT_S)
        rounds(cloud, 3)
        assert cloud.held == 1
        asked = [path for _, path, _ in cloud.asked]
        assert asked[1:3] == [
            "/computeMetadata/v1/instance/maintenance-event",
            "/computeMetadata/v1/instance/preempted?wait_for_change=true&last_etag=e%2F0&timeout_sec=10",
        ]
        cloud.maintenance = "TERMINATE_ON_HOST_MAINTENANCE"
        cloud.end()
        notices = [heard.get(timeout=WAIT_S) for _ in range(2)]
        assert [n.ends for n in notices if isinstance(n, SpotNotice)] == [True, True]


def test_an_azure_event_counts_only_where_it_names_this_machine() -> None:
    cloud = Azure(events=[event("a", "Preempt", ["workers_8"]), event("b", "Freeze", ["WORKERS_7", "workers_8"])])
    empty = threading.Event()
    with serving(cloud) as url, watching(url, "azure", empty, acknowledge=True) as heard:
        heard.get(timeout=WAIT_S)
        assert heard.get(timeout=WAIT_S) == SpotNotice("Azure will pause it for a few seconds (Freeze)", False)
        rounds(cloud)
        assert cloud.posted == []
        cloud.end()
        assert heard.get(timeout=WAIT_S) == SpotNotice("Azure announces Preempt", True, 1795402800.0)
        rounds(cloud)
        assert cloud.posted == []  # its work is there still
        empty.set()
        rounds(cloud, 8)
    assert [json.loads(body) for body in cloud.posted] == [{"StartRequests": [{"EventId": "ends"}]}]


def test_azure_is_told_nothing_unless_that_is_wanted() -> None:
    cloud = Azure()
    cloud.end()
    empty = threading.Event()
    empty.set()
    with serving(cloud) as url, watching(url, "azure", empty) as heard:
        heard.get(timeout=WAIT_S)
        heard.get(timeout=WAIT_S)
        rounds(cloud)
    assert cloud.posted == []


@pytest.mark.parametrize(
    "strange",
    [
        Strange(),
        Strange(answer=(200, {}, b"<html>Welcome to the hotel</html>")),
        Strange(answer=(200, {}, b"\xff\xfe\x00")),
        Strange(answer=(200, {}, b"{" * 5000)),
        Strange(answer=(500, {}, b"")),
        Strange(answer=(200, {}, b"a" * 300_000)),
    ],
)
def test_what_is_no_metadata_service_is_taken_for_none_and_auto_gives_up(strange: Strange) -> None:
    with serving(strange) as url, watching(url, "auto") as heard:
        found = heard.get(timeout=WAIT_S)
        assert isinstance(found, Watching)
        assert found.provider is None
        assert url in found.detail


@pytest.mark.parametrize("provider", ["aws", "gcp", "azure"])
def test_a_service_that_answers_nonsense_is_named_once_and_asked_on(provider: str) -> None:
    cloud = Strange()
    with serving(cloud) as url, watching(url, provider) as heard:
        assert isinstance(heard.get(timeout=WAIT_S), Watching)
        trouble = heard.get(timeout=WAIT_S)
        assert isinstance(trouble, Trouble)
        assert "302" in trouble.reason
        rounds(cloud, 3)
        assert heard.empty()


def test_a_service_that_comes_back_is_heard_again() -> None:
    cloud = Aws()
    good, cloud.reply = cloud.reply, lambda *_: (503, {}, b"")  # type: ignore[method-assign]
    with serving(cloud) as url, watching(url, "aws") as heard:
        assert [type(heard.get(timeout=WAIT_S)) for _ in range(2)] == [Watching, Trouble]
        cloud.reply = good  # type: ignore[method-assign]
        cloud.end()
        assert isinstance(heard.get(timeout=WAIT_S), SpotNotice)


def test_a_server_that_hangs_or_drips_costs_its_deadline_only() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def drip() -> None:
            for _ in range(2):
                peer, _ = server.accept()
                with peer:
                    peer.recv(4096)
                    try:
                        peer.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                        while not over.wait(0.05):
                            peer.sendall(b"x")
                    except OSError:
                        continue

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        http = Http(f"http://127.0.0.1:{server.getsockname()[1]}", "paceline test")
        for _ in range(2):
            with pytest.raises(TimeoutError, match=r"in 0\.3 s"):
                http(Ask(method="GET", path="/", headers={}, timeout_s=0.3))
        over.set()
        thread.join(WAIT_S)


def test_what_does_not_speak_http_and_what_is_not_there_are_errors_of_their_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def greet() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        http = Http(f"http://127.0.0.1:{port}", "paceline test")
        ask = Ask(method="GET", path="/", headers={}, timeout_s=5.0)
        with pytest.raises(AnswerError, match="no HTTP answer"):
            http(ask)
        thread.join(WAIT_S)
    with pytest.raises(ConnectionRefusedError):
        http(ask)


def test_no_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with serving(Strange(answer=(200, {}, b"here"))) as url:
        answer = Http(url + "/prefix/", "paceline test")(Ask(method="GET", path="/x", headers={}, timeout_s=5.0))
    assert (answer.status, answer.text) == (200, "here")
    assert isinstance(answer, MetadataAnswer)
