"""The judge against a stand-in for its endpoint: what it asks, how often, and what becomes of the replies."""

import gzip
import json
import logging
from typing import Any

import pytest
from aiohttp import web

from actors.rewards import Grade, GradeItem, build, judge
from config.rewards import RewardOptions
from tests.rewards.stand_in import Endpoint, endpoint, reply, said, score_of_length, term_of


def grades(url: str, *responses: str, **more: Any) -> list[Grade]:
    record = {"answer": "4", "rubric": {"points": "short"}}
    items = [GradeItem(prompt="2+2?", response=text, record=record, sample=i) for i, text in enumerate(responses)]
    with build(RewardOptions.model_validate({"terms": [term_of(url, **more)]})) as grader:
        return grader.grade_group(items)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry waits for nothing, and no proxy stands between the judge and this machine."""
    monkeypatch.setattr(judge, "backoff_s", lambda attempt: 0.0)
    monkeypatch.setattr(judge, "MOST_BACKOFF_S", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_the_last_score_of_the_reply_counts_and_the_request_is_what_the_term_says() -> None:
    def answer(body: dict[str, Any], asked: int) -> web.Response:
        return reply("A score: 3 would be harsh. **Score:** 7.5")

    with endpoint(answer) as there:
        template = "{prompt} {record[answer]} {record[rubric][points]} {response} {{}}"
        more = {"template": template, "arguments": {"max_tokens": 9, "temperature": 0.2}, "weight": 0.1}
        (grade,) = grades(there.url, "{four}", **more)
    assert (grade.parts, grade.error) == ({"judge": 7.5}, None)
    assert grade.value == 0.1 * 7.5
    assert there.requests == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "2+2? 4 short {four} {}"}],
            "temperature": 0.2,
            "max_tokens": 9,
        }
    ]


def test_many_are_asked_at_once_and_no_more_than_the_limit() -> None:
    with endpoint(full=6) as there:
        got = grades(there.url, *("x" * n for n in range(1, 20)), concurrency=6)
    assert [grade.value for grade in got] == list(range(1, 20))
    assert there.most == 6


def test_what_passes_is_asked_again_and_what_does_not_is_told_once() -> None:
    def answer(body: dict[str, Any], asked: int) -> web.Response:
        if said(body).endswith("busy") and asked < 3:
            return web.Response(status=(429, 503, 500)[asked], headers={"Retry-After": "1"})
        return web.Response(status=400, text="no such model") if said(body).endswith("bad") else reply("Score: 1")

    with endpoint(answer) as there:
        busy, bad = grades(there.url, "busy", "bad", retries=3)
        assert (busy.value, busy.error) == (1.0, None)
        assert bad.error == f"judge: {there.url}/chat/completions: status 400: 'no such model', asked 1 times"
        assert len(there.requests) == 4 + 1
        (busy,) = grades(there.url, "very busy", retries=2)
        assert "status 500: '', asked 3 times" in str(busy.error)


def test_an_endpoint_that_hangs_or_is_not_there_fails_its_rollouts_only() -> None:
    with endpoint(full=None) as there:
        (late,) = grades(there.url, "x", retries=1, timeout_s=0.2)
        assert str(late.error).endswith("no answer within 0.2 s, asked 2 times")
    (gone,) = grades(there.url, "x", retries=0)
    assert "ClientConnectorError" in str(gone.error)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I do not know.", "the reply has no score as "),
        (None, "the reply has no text"),
    ],
)
def test_a_reply_without_a_score_is_an_error(text: Any, words: str) -> None:
    with endpoint(lambda body, asked: reply(text)) as there:
        (grade,) = grades(there.url, "x")
    assert grade.value == 0.0
    assert words in str(grade.error)


def test_other_replies_and_records_that_do_not_fit_are_errors() -> None:
    with endpoint(lambda body, asked: web.Response(text="<html>")) as there:
        (grade,) = grades(there.url, "x")
        assert "is not one of chat completions: '<html>'" in str(grade.error)
        (grade,) = grades(there.url, "x", template="{record[gold]} {response}")
        assert "the template does not fit the record: KeyError('gold')" in str(grade.error)
        (grade,) = grades(there.url, "x", pattern="(<html>)")
    with endpoint(lambda body, asked: reply("grade: A")) as there:
        (grade,) = grades(there.url, "x", pattern="grade: (.)")
        assert "the score is no number: 'grade: A'" in str(grade.error)


@pytest.mark.parametrize(
    ("body", "headers", "says"),
    [
        (b"\xff\xfe{", {}, "is not one of chat completions"),
        (b"[" * 200_000, {}, "is not one of chat completions: '[[["),
        (b" " * (5 << 20), {}, "the reply is longer than 4 MiB"),
        (gzip.compress(b" " * (50 << 20)), {"Content-Encoding": "gzip"}, "the reply is longer than 4 MiB"),
        (b"no gzip", {"Content-Encoding": "gzip"}, "claims to be compressed (gzip) and cannot be read"),
        (b"\xff" * 400, {"status": "400"}, "status 400: '\ufffd"),
    ],
    ids=["not UTF-8", "nested", "long", "gzip bomb", "no gzip", "status"],
)
def test_a_reply_that_no_endpoint_should_give_is_an_error_of_that_rollout(
    body: bytes, headers: dict[str, str], says: str
) -> None:
    def answer(asked: dict[str, Any], count: int) -> web.Response:
        if said(asked).endswith("good"):
            return reply("Score: 2")
        more = dict(headers)
        return web.Response(body=body, status=int(more.pop("status", "200")), headers=more)

    with endpoint(answer, full=1) as there:
        bad, good = grades(there.url, "bad", "good", retries=0)
    assert says in str(bad.error)
    assert len(str(bad.error)) < 1000
    assert (good.value, good.error) == (2.0, None)


def test_a_compressed_reply_is_read_and_a_group_that_found_nothing_is_no_score() -> None:
    packed = gzip.compress(json.dumps({"choices": [{"message": {"content": "Score: 3"}}]}).encode())
    with endpoint(lambda body, asked: web.Response(body=packed, headers={"Content-Encoding": "gzip"})) as there:
        assert [grade.value for grade in grades(there.url, "x")] == [3.0]
        (grade,) = grades(there.url, "x", pattern=r"Score: (\d)x|Score")
        assert "the score is no number: 'Score'" in str(grade.error)


def test_the_key_is_sent_and_told_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def answer(body: dict[str, Any], asked: int) -> web.Response:
        return web.Response(status=401, text="wrong key: s3cret")

    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    caplog.set_level(logging.DEBUG)
    made: Endpoint
    with endpoint(answer) as made:
        (grade,) = grades(made.url, "x", key_env="JUDGE_KEY")
    assert made.keys == ["Bearer s3cret"]
    assert "wrong key: ***" in str(grade.error)
    assert "s3cret" not in f"{caplog.text}{capfd.readouterr()}{grade}"
    with endpoint(score_of_length) as made:
        grades(made.url, "x")
    assert made.keys == [None]
