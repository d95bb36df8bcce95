"""A stand-in for an OpenAI-compatible endpoint on this machine: answers when it is told to, and counts."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any], int], web.Response]  # of a request's body and how often it was asked before


class Endpoint:
    """`requests`: bodies in the order of their coming; `most`: how many were under way at once."""

    def __init__(self, answer: Answer, full: int | None) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.at_once = self.most = 0
        self.url = ""
        self.open = threading.Event()  # nobody is answered before
        self._answer, self._full = answer, full

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        asked = self.requests.count(body)
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            if self.at_once == self._full:
                self.open.set()
            while not self.open.is_set():
                await asyncio.sleep(0.01)
            return self._answer(body, asked)
        finally:
            self.at_once -= 1

    async def _serve(self, up: threading.Event, over: threading.Event) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        up.set()
        while not over.is_set():
            await asyncio.sleep(0.02)
        await runner.cleanup()


def reply(text: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


def said(body: dict[str, Any]) -> str:
    """What the judge was asked."""
    return str(body["messages"][0]["content"])


def score_of_length(body: dict[str, Any], asked: int) -> web.Response:
    """The length of what stands behind "it: " in the question."""
    return reply(f"It is fine.\nScore: {len(said(body).partition('it: ')[2])}")


@contextmanager
def endpoint(answer: Answer = score_of_length, *, full: int | None = 1) -> Iterator[Endpoint]:
    """full: it answers nobody before so many are asking at once; None: before it is opened."""
    made = Endpoint(answer, full)
    up, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(made._serve(up, over)))
    thread.start()
    try:
        assert up.wait(30)
        yield made
    finally:
        made.open.set()
        over.set()
        thread.join()


def term_of(url: str, **more: Any) -> dict[str, Any]:
    return json.loads(
        json.dumps({"kind": "judge", "url": url, "model": "m", "template": "{prompt} Judge it: {response}", **more})
    )
