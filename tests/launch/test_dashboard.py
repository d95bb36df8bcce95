"""grafana.json as Grafana needs it. That a run exports every metric that it asks for: tests/train/test_observing.py."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.observe import Observer
from tests.launch.test_observer import Gauges, make_config

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "launch/observe/grafana.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def test_the_dashboard_is_one_that_grafana_10_and_later_import() -> None:
    assert DASHBOARD["schemaVersion"] == 39  # of Grafana 10.3: later ones bring it up to theirs
    assert {panel["type"] for panel in PANELS} == {"row", "timeseries"}
    assert [panel["id"] for panel in PANELS] == list(range(1, len(PANELS) + 1))
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "run"]
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)


def test_no_panel_lies_on_another_or_beside_the_grid() -> None:
    places = [panel["gridPos"] for panel in PANELS]
    assert all(at["x"] >= 0 and at["x"] + at["w"] <= 24 for at in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below


@pytest.mark.parametrize(
    "panel", [panel for panel in PANELS if panel["type"] != "row"], ids=lambda panel: panel["title"]
)
def test_every_panel_asks_the_chosen_source_about_the_chosen_runs(panel: dict[str, Any]) -> None:
    assert panel["datasource"] == SOURCE
    letters = [target["refId"] for target in panel["targets"]]
    assert letters == list("ABCDEFG"[: len(letters)])
    for target in panel["targets"]:
        assert target["datasource"] == SOURCE
        assert target["expr"].count('{run=~"$run"}') == len(re.findall(r"\bray_paceline_\w+", target["expr"])) > 0
        assert "{{run}}" in target["legendFormat"]
        assert target["expr"].count("(") == target["expr"].count(")")


def test_the_states_of_the_fleet_are_gauges_asked_for_when_they_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, gauges, asked = 100.0, Gauges(), []

    def states() -> dict[str, int]:
        asked.append(now_s)
        return {"up": 3, "asked": 1}

    with Observer(tmp_path, make_config(), clock=lambda: now_s) as observer:
        monkeypatch.setattr(observer, "_gauges", gauges)
        for _ in range(5):
            if observer.fleet_due():
                observer.fleet(states())
            now_s += 0.5
    assert asked == [100.0, 102.0]
    assert gauges.seen[:2] == [({"fleet/now": 3.0}, {"state": "up"}), ({"fleet/now": 1.0}, {"state": "asked"})]


def test_the_scrape_example_reads_the_file_that_ray_writes() -> None:
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    config = yaml.safe_load((ROOT / "examples/cluster/prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    (found,) = job["file_sd_configs"]
    assert found["files"] == [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]
