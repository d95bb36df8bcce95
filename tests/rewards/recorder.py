"""Runs tests against programs, a process each and unconfined, and says which constants reached the program's process.

One JSON object a line from standard input, {code, source, stub, names, borrowed}; one a line to standard output,
{crossed, requests, message}.
"""

import json
import os
import pickletools
import sys
from typing import Any
from unittest import mock

from actors.rewards.confinement import wire
from actors.rewards.confinement.candidate import Candidate
from actors.rewards.confinement.judge import judge
from actors.rewards.confinement.remote import CandidateLink

# What pickle writes for a number or a text; other arguments of its are sizes and positions.
_CONSTANTS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "INT", "FLOAT",
}  # fmt: skip


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(reading)
            with os.fdopen(writing, "w") as stream:
                stream.write(json.dumps(_run(job)))
                stream.flush()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as stream:
            print(stream.read(), flush=True)
        os.wait()


def _run(job: dict[str, Any]) -> dict[str, Any]:
    requests, answers = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(requests[1])
        try:
            Candidate({"code": job["code"], "prelude": False}, requests[0], answers[1]).serve()
        finally:
            os._exit(0)
    for descriptor in (requests[0], answers[1]):
        os.close(descriptor)
    sent: list[bytes] = []
    real = wire.send

    def send(descriptor: int, payload: bytes) -> None:
        sent.append(payload)
        real(descriptor, payload)

    with mock.patch.object(wire, "send", send):
        verdict = judge({"token": "passed", "kind": "source", **job}, CandidateLink(requests[1], answers[0]))
    crossed = [
        argument for payload in sent for code, argument, _ in pickletools.genops(payload) if code.name in _CONSTANTS
    ]
    return {"crossed": [repr(value) for value in crossed], "requests": len(sent), "message": verdict["message"]}


if __name__ == "__main__":
    main()
