"""The `judge` term: a language model behind an OpenAI-compatible endpoint scores a response.

Owns the request, the retries, the size limit of a reply, and the place of the score in it. The endpoint's key is sent
and written nowhere.
"""

import asyncio
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from actors.rewards.judge_template import FIELDS
from actors.rewards.lanes import MOST_BACKOFF_S, backoff_s
from config.rewards import RewardTerm
from contracts.rewards import GradeItem, GradingError, Score, Scored

DEFAULT_PATTERN = r"[Ss]core:?\W*?([-+]?\d+(?:\.\d+)?)"
_MOST_BYTES = 4 << 20  # of a reply, before and after decompression
_AGAIN = {408, 409, 425, 429}  # retried, as are all from 500


class JudgeTerm:
    """See module. The value is the last number in the reply that the term's pattern matches; weight scales it."""

    def __init__(self, options: RewardTerm, key: str | None) -> None:
        """`key`: the endpoint's, or None."""
        base = str(options.url).rstrip("/")
        self._url = base if base.endswith("/chat/completions") else f"{base}/chat/completions"
        self._options, self._key = options, key
        self._pattern = re.compile(options.pattern or DEFAULT_PATTERN)
        self._session: aiohttp.ClientSession | None = None

    async def scores(self, items: Sequence[GradeItem]) -> list[Scored]:
        return list(await asyncio.gather(*(self._scored(item) for item in items)))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _scored(self, item: GradeItem) -> Scored:
        try:
            reply = await self._reply(self._question(item))
            found = list(self._pattern.finditer(reply))
            if not found:
                raise GradingError(f"the reply has no score as {self._pattern.pattern!r} reads it: {reply[-200:]!r}")
        except GradingError as error:
            return error
        try:
            return Score(float(found[-1][1]), reply[-300:])
        except (ValueError, TypeError):  # TypeError: a pattern whose group did not take part in the match
            return GradingError(f"the score is no number: {found[-1][0][-200:]!r}")

    def _question(self, item: GradeItem) -> str:
        values = {name: getattr(item, name) for name in FIELDS}
        try:
            return str(self._options.template).format(**values)
        except (LookupError, AttributeError, ValueError) as error:
            raise GradingError(f"the template does not fit {item.where or 'the record'}: {error!r}") from error

    async def _reply(self, question: str) -> str:
        body = {
            "model": self._options.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            **self._options.arguments,
        }
        for attempt in range(self._options.retries + 1):
            wait_s = 0.0
            try:
                status, received, wait_s = await self._post(body)
                if status < 400:
                    return _content(received)
                reason = f"status {status}: {received[:1200].decode(errors='replace')[:300]!r}"
                if status < 500 and status not in _AGAIN:
                    break
            except TimeoutError:
                reason = f"no answer within {self._options.timeout_s:g} s"
            except aiohttp.ClientError as error:
                reason = f"{type(error).__name__}: {error}"
            if attempt < self._options.retries:
                await asyncio.sleep(min(max(wait_s, backoff_s(attempt)), MOST_BACKOFF_S))
        raise GradingError(self._without_key(f"{self._url}: {reason}, asked {attempt + 1} times"))

    async def _post(self, body: Mapping[str, Any]) -> tuple[int, bytes, float]:
        """Return (status, body, the Retry-After seconds of the reply). Raises GradingError."""
        if self._session is None:
            headers = {"Accept-Encoding": "gzip"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
            self._session = aiohttp.ClientSession(
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self._options.timeout_s),
                connector=aiohttp.TCPConnector(limit=0),  # the caller bounds the number of concurrent calls
                auto_decompress=False,  # it has no size limit
                trust_env=True,
            )
        async with self._session.post(self._url, json=body) as answer:
            after = answer.headers.get("Retry-After", "")
            received = bytearray()
            while part := await answer.content.read(1 << 16):
                received += part
                if len(received) > _MOST_BYTES:
                    raise GradingError(_too_long(self._url))
            plain = _plain(bytes(received), answer.headers.get("Content-Encoding", ""), self._url)
            return answer.status, plain, float(after) if after.isdecimal() else 0.0

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def _plain(received: bytes, encoding: str, url: str) -> bytes:
    """Return a reply's decompressed body. Raises GradingError."""
    if encoding.lower() in ("", "identity"):
        return received
    try:
        reader = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)  # gzip or zlib, whichever it is
        plain = reader.decompress(received, _MOST_BYTES)
    except zlib.error as error:
        raise GradingError(
            f"{url}: the reply claims to be compressed ({encoding}) and cannot be read: {error}"
        ) from None
    if reader.unconsumed_tail:
        raise GradingError(_too_long(url))
    return plain


def _too_long(url: str) -> str:
    return f"{url}: the reply is longer than {_MOST_BYTES >> 20} MiB: limit it by arguments.max_tokens"


def _content(received: bytes) -> str:
    """Return the message of a reply. Raises GradingError."""
    try:
        content = json.loads(received)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        shown = received[:800].decode(errors="replace")[:200]
        raise GradingError(f"the reply is not one of chat completions: {shown!r}") from error
    if not isinstance(content, str):
        shown = received[:800].decode(errors="replace")[:200]
        raise GradingError(f"the reply has no text: {shown!r}")
    return content
