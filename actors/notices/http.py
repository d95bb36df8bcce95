"""HTTP requests to a metadata service: one connection at a time, with a deadline. Independent of the protocols.

The service is one hop away, so no proxy is used. A redirect is not followed, since it comes from another server.
"""

import http.client
import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit

from actors.notices.types import AnswerError, Ask, MetadataAnswer

MAX_BYTES = 256 * 1024


class Http:
    """base_url: http://host[:port][/prefix]. agent: user agent, for a proxy or a log."""

    def __init__(self, base_url: str, agent: str) -> None:
        parts = urlsplit(base_url)
        assert parts.hostname, base_url  # checked by the configuration
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix, self._agent = parts.path.rstrip("/"), agent

    def __call__(self, ask: Ask) -> MetadataAnswer:
        """Send a request. Raises OSError (TimeoutError if the whole answer did not arrive in time) and AnswerError (no
        HTTP)."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=ask.timeout_s)
        late = threading.Event()

        def end() -> None:  # a socket's own timeout restarts with every byte
            late.set()
            if (peer := connection.sock) is not None:
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(ask.timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            headers = {**ask.headers, "User-Agent": self._agent, "Connection": "close"}
            connection.request(ask.method, self._prefix + ask.path, body=ask.body or None, headers=headers)
            response = connection.getresponse()
            body = response.read(MAX_BYTES + 1)
            if late.is_set():
                raise TimeoutError(f"no whole answer in {ask.timeout_s:g} s")
            if len(body) > MAX_BYTES:
                raise AnswerError(f"HTTP {response.status} with more than {MAX_BYTES} bytes")
            return MetadataAnswer(response.status, {name.lower(): value for name, value in response.getheaders()}, body)
        except (http.client.HTTPException, ValueError) as error:
            if late.is_set():
                raise TimeoutError(f"no whole answer in {ask.timeout_s:g} s") from None
            if isinstance(error, AnswerError):
                raise
            raise AnswerError(f"no HTTP answer: {type(error).__name__}") from None
        except OSError as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise TimeoutError(f"no whole answer in {ask.timeout_s:g} s") from None
            raise
        finally:
            timer.cancel()
            connection.close()
