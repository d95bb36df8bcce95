"""Where the coordinator is, and data buffers that follow the nodes, without Ray."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from config.drafter import DrafterOptions
from launch import node_buffers
from launch.drafter.actors import home
from launch.node_buffers import NodeBuffers


class Buffers(NodeBuffers):
    """Buffers that are words."""

    def _start(self, node_id: str) -> str:
        return f"buffer of {node_id}"

    def _end(self, buffer: str) -> None:
        self.ended.append(buffer)

    def __init__(self) -> None:
        super().__init__(DrafterOptions(), Path(), ["refused"])
        self.ended: list[str] = []


def test_every_node_has_a_buffer_and_ray_is_asked_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, asked, alive = [0.0], list[float](), [{"a", "b", "refused"}]

    def nodes() -> set[str]:
        asked.append(now_s[0])
        if not alive[0]:
            raise RuntimeError("no head")
        return alive[0]

    monkeypatch.setattr(node_buffers, "live_nodes", nodes)
    monkeypatch.setattr(node_buffers, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    made = Buffers()
    buffers, ended = made.by_node, made.ended
    for _ in range(1024):  # workers that start
        made.follow()
    assert (list(buffers), asked) == (["a", "b"], [0.0])
    now_s[0] = 2.0
    alive[0] = set()  # the head restarts
    made.follow()
    assert list(buffers) == ["a", "b"]
    now_s[0] = 4.0
    alive[0] = {"b", "c"}
    made.follow()
    assert (list(buffers), ended) == (["b", "c"], ["buffer of a"])
    assert made.of("d") == "buffer of d", "a worker is there, whatever Ray listed a moment ago"
    assert made.of("b") == buffers["b"]
    now_s[0] = 6.0
    alive[0] = {"b", "c", "d"}
    made.follow()
    assert sorted(buffers) == ["b", "c", "d"]


def test_the_coordinator_is_beside_the_driver_unless_that_node_is_not_to_be_used() -> None:
    nodes = ["aa", "bb", "cc"]
    assert home("aa", nodes, {}) == "aa"
    assert home("aa", nodes, {"bb": "has torch 9"}) == "aa"
    assert home("aa", nodes, {"aa": "has torch 9", "bb": "has torch 9"}) == "cc"
