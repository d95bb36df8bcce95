"""What any answer at all means to each protocol: a notice only where it is documented, and never another exception."""

import json
import threading
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.notices.azure import NAME_PATH, AzureAdapter
from actors.notices.types import AnswerError, Ask, MetadataAnswer, News, Provider, SpotNotice, Withdrawn, unix_time
from actors.notices.watch import Trouble, WatchEvent, Watching, adapter_of, watch
from config.spot import SpotOptions

GOOGLE = {"metadata-flavor": "Google"}
NAME = MetadataAnswer(200, {}, b'{"name": "vm"}')

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
words = st.sampled_from(
    [
        *("action", "time", "noticeTime", "name", "Events", "EventId", "EventType", "Resources", "NotBefore"),
        *("terminate", "Preempt", "Freeze", "vm"),
    ]
)
near_json = st.recursive(
    words | json_values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=6),
    max_leaves=12,
).map(lambda value: json.dumps(value).encode())
bodies = st.binary(max_size=60) | near_json | st.sampled_from([b"TRUE", b"FALSE", b"NONE", b"AQAEtoken==", NAME.body])
answers = st.builds(
    MetadataAnswer,
    st.sampled_from([200, 200, 200, 204, 301, 302, 400, 401, 403, 404, 405, 429, 500, 503]),
    st.sampled_from([{}, GOOGLE, {**GOOGLE, "etag": "7"}]),
    bodies,
)


@given(st.sampled_from(get_args(Provider)), st.lists(answers, max_size=12))
@settings(max_examples=150)
def test_any_answers_lead_to_notices_or_to_one_kind_of_error_and_the_next_question(
    provider: Provider, heard: list[MetadataAnswer]
) -> None:
    adapter = adapter_of(provider)
    for answer in heard:
        ask = adapter.ask()
        assert ask.path.startswith("/")
        assert 0 < ask.timeout_s < 200
        try:
            notices, said = adapter.heard(answer), ""
        except AnswerError as error:
            notices, said = [], str(error)
        assert len(said) < 400
        for notice in notices:
            assert answer.status == 200
            assert "\n" not in notice.what
            assert len(notice.what) < 400
    assert isinstance(adapter.ask(), Ask)


@given(st.sampled_from(get_args(Provider)), st.lists(answers, max_size=6))
@settings(max_examples=100)
def test_a_notice_is_heard_whatever_was_answered_before(provider: Provider, before: list[MetadataAnswer]) -> None:
    """And in less than ten questions: no nonsense keeps an adapter from the truth that follows. What a machine is
    called is believed, if it reads like a name."""
    adapter = adapter_of(provider)
    ended = set[str]()
    for answer in before:
        if adapter.ask().path == NAME_PATH and b'"name"' in answer.body:
            continue
        try:
            _take(ended, adapter.heard(answer))
        except AnswerError:
            continue
    for _ in range(10):
        try:
            _take(ended, adapter.heard(truth(adapter.ask())))
        except AnswerError:
            continue
    assert ended


def _take(ended: set[str], news: list[News]) -> None:
    for each in news:
        if isinstance(each, Withdrawn):
            ended.remove(each.what)
        elif each.ends:
            ended.add(each.what)


def truth(ask: Ask) -> MetadataAnswer:
    """Of a machine whose end is announced."""
    path = ask.path.partition("?")[0]
    if ask.method == "PUT":
        return MetadataAnswer(200, {}, b"AQAEnew")
    records: dict[str, dict[str, Any]] = {
        "/latest/meta-data/spot/instance-action": {"action": "stop", "time": "2026-11-23T03:00:00Z"},
        "/metadata/instance/compute": {"name": "vm"},
        "/metadata/scheduledevents": {
            "Events": [{"EventId": "e1", "EventType": "Terminate", "Resources": ["vm", "vm2"], "NotBefore": ""}]
        },
    }
    if path in records:
        return MetadataAnswer(200, {}, json.dumps(records[path]).encode())
    if path.endswith("/preempted"):
        return MetadataAnswer(200, {**GOOGLE, "etag": "9"}, b"TRUE")
    if path.endswith("/maintenance-event"):
        return MetadataAnswer(200, GOOGLE, b"TERMINATE_ON_HOST_MAINTENANCE")
    return MetadataAnswer(404, {}, b"")


@given(st.text(max_size=40))
def test_a_time_is_read_or_it_is_none(text: str) -> None:
    assert unix_time(text) is None or isinstance(unix_time(text), float)


def test_both_documented_forms_of_a_time_are_read() -> None:
    assert unix_time("2026-11-23T03:00:00Z") == unix_time("Mon, 23 Nov 2026 03:00:00 GMT") == 1795402800.0
    assert unix_time("") is None
    assert unix_time(None) is None


def test_questions_become_rarer_while_a_service_fails_and_regular_again_when_it_answers() -> None:
    """In virtual time: 7 failures, then answers; the pauses are what the loop asked to wait for."""
    pauses: list[float] = []
    told: list[WatchEvent] = []
    asked = 0

    def http(ask: Ask) -> MetadataAnswer:
        nonlocal asked
        asked += 1
        if asked <= 7:
            raise ConnectionRefusedError(111, "Connection refused")
        return MetadataAnswer(200, {}, b"AQAEtoken") if ask.method == "PUT" else MetadataAnswer(404)

    for event in watch(SpotOptions(provider="aws", poll_s=1.0), http, clock=lambda: sum(pauses)):
        if not isinstance(event, float):
            told.append(event)
            continue
        pauses.append(event)
        if len(pauses) == 10:
            break
    assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 1.0, 1.0, 1.0]
    assert told == [Watching("aws"), Trouble("aws: Connection refused")]


def test_none_asks_nobody() -> None:
    def http(ask: Ask) -> MetadataAnswer:
        raise AssertionError(ask)

    told = list(watch(SpotOptions(provider="none"), http, clock=lambda: 0.0))
    assert [event.provider for event in told if isinstance(event, Watching)] == [None]


@pytest.mark.parametrize("url", ["https://a", "169.254.169.254", "http://a b", "http://u:p@a", "http://a?q=1", ""])
def test_a_base_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        SpotOptions(base_url=url)


@pytest.mark.parametrize("url", ["http://169.254.169.254", "http://[fd00:ec2::254]", "http://proxy:8080/imds"])
def test_base_urls_of_services_and_proxies_are_taken(url: str) -> None:
    assert SpotOptions(base_url=url).base_url == url


def test_an_unknown_cloud_is_refused_with_the_choices() -> None:
    with pytest.raises(ValidationError, match="'auto', 'aws', 'gcp', 'azure' or 'none'"):
        SpotOptions.model_validate({"provider": "alibaba"})


def test_notices_are_values() -> None:
    assert SpotNotice("x", True) == SpotNotice("x", True, None)


def test_an_acknowledgement_that_is_refused_is_sent_again_after_the_next_list_of_events() -> None:
    preempt = {"EventId": "a", "EventType": "Preempt", "Resources": ["vm"]}
    events = MetadataAnswer(200, {}, json.dumps({"Events": [preempt]}).encode())
    drained = threading.Event()
    drained.set()
    azure = AzureAdapter(1.0, drained)
    azure.heard(NAME)
    asked = []
    for answer in (events, MetadataAnswer(500, {}, b""), events, MetadataAnswer(200, {}, b""), events):
        asked.append(azure.ask().method)
        if answer.status == 500:
            with pytest.raises(AnswerError, match="refused"):
                azure.heard(answer)
        else:
            azure.heard(answer)
    assert asked == ["GET", "POST", "GET", "POST", "GET"]
    assert azure.ask().method == "GET", "once it was taken, no more"
