"""Spot notices of Amazon EC2, by version 2 of its instance metadata service (IMDSv2).

    PUT /latest/api/token                                    a token for TTL_S seconds; an expired one answers 401
    GET /latest/meta-data/spot/instance-action               404, or {"action": "terminate", "time": "..."}: 2 minutes
    GET /latest/meta-data/events/recommendations/rebalance   404, or {"noticeTime": "..."}: the risk has risen

Source: Amazon EC2 User Guide, "Spot Instance interruption notices", "EC2 instance rebalance recommendations" and "Use
the Instance Metadata Service". A container needs a hop limit of 2 to reach it. Version 1 (without a token) is not used.
"""

import re

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

TTL_S = 21_600  # the maximum
TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
_TTL_HEADER, _TOKEN_HEADER = "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"
_TOKEN = re.compile(r"[A-Za-z0-9+/=_-]{1,1024}")
_ENDS = ("terminate", "stop", "hibernate")


class AwsAdapter:
    provider: Provider = "aws"

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._token = ""
        self._paths = (ACTION_PATH, REBALANCE_PATH)
        self._next = 0  # index into _paths
        self._renewed = False  # the token, in this round
        self._said: dict[str, list[SpotNotice]] = {path: [] for path in self._paths}

    @property
    def wait(self) -> bool:
        return self._next == 0 and bool(self._token)

    def ask(self) -> Ask:
        if not self._token:
            return Ask(method="PUT", path=TOKEN_PATH, headers={_TTL_HEADER: str(TTL_S)}, timeout_s=self._timeout_s)
        path = self._paths[self._next]
        return Ask(method="GET", path=path, headers={_TOKEN_HEADER: self._token}, timeout_s=self._timeout_s)

    def heard(self, answer: MetadataAnswer) -> list[News]:
        if not self._token:
            self._token = token_of(answer)
            return []
        path = self._paths[self._next]
        if answer.status == 401 and not self._renewed:
            self._token, self._renewed = "", True
            return []
        self._next = (self._next + 1) % len(self._paths)
        if answer.status == 401:
            self._token, self._next, self._renewed = "", 0, False
            raise AnswerError("HTTP 401 with a token that is new")
        if self._next == 0:
            self._renewed = False
        now: list[SpotNotice] = []
        if answer.status != 404:
            try:
                if answer.status != 200:
                    raise AnswerError(answer.shown)
                now.append(action_of(answer) if path == ACTION_PATH else rebalance_of(answer))
            except AnswerError:
                self._next, self._renewed = 0, False
                raise
        before, self._said[path] = self._said[path], now
        return changes(before, now)


def token_of(answer: MetadataAnswer) -> str:
    """Return the token. Raises AnswerError."""
    if answer.status != 200 or not _TOKEN.fullmatch(answer.text):
        raise AnswerError(f"no token: {answer.shown}")
    return answer.text


def action_of(answer: MetadataAnswer) -> SpotNotice:
    """Return the interruption notice. Raises AnswerError."""
    record = answer.record()
    action = record.get("action")
    if not isinstance(action, str):
        raise AnswerError(f"no action: {answer.shown}")
    # An unknown action of a later protocol version is an interruption too, since the path only reports those.
    known = "" if action in _ENDS else " (an action that is not documented)"
    return SpotNotice(f"EC2 will {ordinary(action)} it{known}", True, unix_time(record.get("time")))


def rebalance_of(answer: MetadataAnswer) -> SpotNotice:
    """Return the rebalance notice. Raises AnswerError."""
    record = answer.record()
    if "noticeTime" not in record:
        raise AnswerError(f"no noticeTime: {answer.shown}")
    return SpotNotice("EC2 recommends to rebalance: the risk of an interruption has risen", False)
