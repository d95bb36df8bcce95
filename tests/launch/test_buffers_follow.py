"""Where the coordinator is, and data buffers that follow the nodes, without Ray."""

from typing import Any

from launch.drafter.actors import Follow, home


def test_every_node_has_a_buffer_and_ray_is_asked_once_a_second() -> None:
    now_s, asked, alive = [0.0], list[float](), [{"a", "b", "refused"}]
    buffers: dict[str, Any] = {}
    ended: list[str] = []

    def nodes() -> set[str]:
        asked.append(now_s[0])
        if not alive[0]:
            raise RuntimeError("no head")
        return alive[0]

    follow = Follow(
        buffers, lambda node: f"buffer of {node}", ended.append, ["refused"], nodes=nodes, clock=lambda: now_s[0]
    )
    for _ in range(1024):  # workers that start
        follow()
    assert (list(buffers), asked) == (["a", "b"], [0.0])
    now_s[0] = 2.0
    alive[0] = set()  # the head restarts
    follow()
    assert list(buffers) == ["a", "b"]
    now_s[0] = 4.0
    alive[0] = {"b", "c"}
    follow()
    assert (list(buffers), ended) == (["b", "c"], ["buffer of a"])
    assert follow.buffer_of("d") == "buffer of d", "a worker is there, whatever Ray listed a moment ago"
    assert follow.buffer_of("b") == buffers["b"]
    now_s[0] = 6.0
    alive[0] = {"b", "c", "d"}
    follow()
    assert sorted(buffers) == ["b", "c", "d"]


def test_the_coordinator_is_beside_the_driver_unless_that_node_is_not_to_be_used() -> None:
    nodes = ["aa", "bb", "cc"]
    assert home("aa", nodes, {}) == "aa"
    assert home("aa", nodes, {"bb": "has torch 9"}) == "aa"
    assert home("aa", nodes, {"aa": "has torch 9", "bb": "has torch 9"}) == "cc"
