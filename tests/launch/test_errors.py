"""Failures that a user can mend, among those that other packages raise."""

import ray.exceptions

from launch.errors import as_expected

SAID = "1 worker(s) were killed due to the node running low on memory. Memory was 22.52GB used / 23.54GB limit"


def test_a_process_that_ray_ended_for_memory_is_said_in_a_line_with_a_remedy() -> None:
    found = as_expected(ray.exceptions.OutOfMemoryError(f"{SAID}\nObject store memory usage: [- objects: 0\n..."))
    assert found is not None
    assert found.message == f"Ray ended a process: {SAID}"
    assert "kv_tokens" in str(found.remedy)
    assert as_expected(ray.exceptions.RaySystemError("another")) is None
