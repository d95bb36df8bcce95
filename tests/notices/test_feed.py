"""What the driver hears about nodes from real watchers and from Ray, on a real head."""

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import ray
from ray.exceptions import RayActorError

from actors.notices.types import SpotNotice, Withdrawn
from actors.notices.watch import Trouble, Watching
from config.spot import SpotOptions
from launch.context import RunContext
from launch.fleet import feed as feed_module
from launch.fleet.feed import Gone, Heard, NoticeFeed, RayDrains
from tests.context import run_context
from tests.notices.metadata import Aws, serving

PATIENCE_S = 90.0  # an actor starts, beside other work
ELSEWHERE = "ff" * 28  # the driver's node, as far as the feed is told: so the real one is another


@contextmanager
def hearing(options: SpotOptions, here: str = ELSEWHERE) -> Iterator[Callable[[type, str], Heard]]:
    """Yields what waits for the next that is heard of a kind about a node."""
    heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
    context = run_context(react=lambda event: heard.put(event) if isinstance(event, Heard) else None)
    feed = NoticeFeed(options, here, context)

    def next_of(kind: type, node_id: str) -> Heard:
        found: list[Heard] = []

        def look() -> bool:
            context.loop.turn()
            while not found and not heard.empty():
                item = heard.get()
                if isinstance(item.event, kind) and item.node_id == node_id:
                    found.append(item)
            return bool(found)

        deadline_s = time.monotonic() + PATIENCE_S
        while not look():
            assert time.monotonic() < deadline_s, f"nothing of the kind {kind.__name__} is heard"
            time.sleep(0.01)
        return found[0]

    try:
        yield next_of
    finally:
        feed.close()


@pytest.mark.ray
def test_a_watcher_on_another_node_is_heard_and_started_again_when_it_is_lost(
    ray_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "AGAIN_S", 0.1)
    monkeypatch.setattr(feed_module, "NODES_S", 0.1)
    cloud = Aws()
    (node_id,) = [node["NodeID"] for node in ray.nodes()]
    with (
        serving(cloud) as url,
        hearing(SpotOptions(provider="aws", poll_s=0.05, base_url=url)) as next_of,
    ):
        next_of(Watching, node_id)
        cloud.end(lambda agent: node_id in agent)
        first = next_of(SpotNotice, node_id)
        assert first.address == ray.util.get_node_ip_address()
        ray.kill(ray.get_actor(f"notices-{node_id[:8]}"))
        assert "watcher was lost" in str(next_of(Trouble, node_id).event)
        assert next_of(SpotNotice, node_id).event == first.event


@pytest.mark.ray
def test_a_watcher_that_goes_with_its_node_is_no_trouble(ray_head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "NODES_S", 0.0)
    (node,) = ray.nodes()
    node_id, cloud = node["NodeID"], Aws()
    heard: list[Heard] = []

    def hear(context: RunContext, kind: type) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not any(isinstance(item.event, kind) and item.node_id == node_id for item in heard):
            assert time.monotonic() < deadline_s, f"nothing of the kind {kind.__name__} is heard"
            context.loop.turn()
            time.sleep(0.01)

    with serving(cloud) as url:
        context = run_context(react=lambda event: heard.append(event) if isinstance(event, Heard) else None)
        feed = NoticeFeed(SpotOptions(provider="aws", poll_s=0.05, base_url=url), ELSEWHERE, context)
        try:
            hear(context, Watching)
            watcher = feed._watchers[node_id]
            ray.kill(watcher)
            with pytest.raises(RayActorError):
                ray.get(watcher.heard.remote(), timeout=PATIENCE_S)
            monkeypatch.setattr(ray, "nodes", lambda: [node | {"Alive": False}])  # Ray finds it lost a moment later
            hear(context, Gone)
        finally:
            feed.close()
    assert not [item for item in heard if isinstance(item.event, Trouble)]


@pytest.mark.ray
def test_the_drivers_own_node_needs_no_actor(ray_head: str) -> None:
    cloud = Aws()
    cloud.end()
    here = str(ray.get_runtime_context().get_node_id())
    with serving(cloud) as url, hearing(SpotOptions(provider="aws", poll_s=0.05, base_url=url), here) as next_of:
        next_of(SpotNotice, here)


@pytest.mark.ray
def test_nodes_that_ray_drains_and_nodes_that_have_gone_are_heard(
    ray_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "NODES_S", 0.0)
    nodes = [{"NodeID": "aa", "NodeManagerAddress": "10.0.0.9", "Alive": True}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    draining = {"aa": 1_795_402_800_000}
    monkeypatch.setattr(ray._private.state.state, "get_draining_nodes", lambda: dict(draining))
    with hearing(SpotOptions(provider="none")) as next_of:
        drains = next_of(RayDrains, "aa")
        assert (drains.address, drains.event) == ("10.0.0.9", RayDrains(1_795_402_800.0))
        draining.clear()
        assert next_of(Withdrawn, "aa").event == Withdrawn(RayDrains.WHAT)
        draining["aa"] = 0
        next_of(RayDrains, "aa")
        nodes[0]["Alive"] = False
        draining.clear()
        next_of(Gone, "aa")


@pytest.mark.ray
def test_a_ray_without_that_private_question_costs_its_drains_only(
    ray_head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> dict[str, int]:
        raise AttributeError("get_draining_nodes")

    monkeypatch.setattr(ray._private.state.state, "get_draining_nodes", missing)
    cloud = Aws()
    with serving(cloud) as url, hearing(SpotOptions(provider="aws", poll_s=0.05, base_url=url)) as next_of:
        assert "get_draining_nodes" in str(next_of(Trouble, ELSEWHERE).event)
        cloud.end()
        next_of(SpotNotice, ELSEWHERE)
