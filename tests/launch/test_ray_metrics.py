"""The gauges as Prometheus sees them: scraped from the metrics port of a real head."""

import time
import urllib.request
from pathlib import Path

import pytest
import ray

from launch.observe import Observer, StepRecord
from tests.launch.test_observer import make_config


@pytest.mark.ray
@pytest.mark.slow
def test_scalars_reach_the_metrics_port(tmp_path: Path) -> None:
    node = next(node for node in ray.nodes() if node["Alive"])
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with Observer(tmp_path, make_config()) as observer:
        observer.load("rollout-0", running=3, waiting=1, kv_tokens=1024)
        observer.step(StepRecord(step=3, metrics={"reward/mean": 0.625}, seconds={"step": 1.0}))
        deadline_s = time.monotonic() + 90
        while True:
            with urllib.request.urlopen(address, timeout=10) as answer:
                text = answer.read().decode().splitlines()
            lines = [line for line in text if line.startswith("ray_paceline_reward_mean{")]
            running = [line for line in text if line.startswith("ray_paceline_worker_running{")]
            if (lines and running) or time.monotonic() > deadline_s:
                break
            time.sleep(1)
    assert len(lines) == 1
    assert 'run="demo"' in lines[0]
    assert float(lines[0].rsplit(" ", 1)[1]) == 0.625
    assert len(running) == 1
    assert 'worker="rollout-0"' in running[0]
    assert float(running[0].rsplit(" ", 1)[1]) == 3
