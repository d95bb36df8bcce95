"""One Ray head per test process, for the tests marked `ray` (they get it without asking).

`make test` runs two test processes (pytest-xdist, --dist loadfile: a file's tests stay together, and so do its
fixtures). What a test asks of the machine it asks of its own process's children: beside it the other one works.
"""

import os

# Ray reads the authentication mode when it is imported. The head of the tests lives seconds and holds nothing.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # as a session of ours
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else a FutureWarning about it
os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

# Triton reads it when it is imported, by us or by any part of torch. tests/ops/triton interprets the kernels where
# there is no GPU.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, seed, settings

import tests.pretended

# How long an example takes is a matter of the machine and of what else it does.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# `make test` draws the same examples on every machine and in every run: nobody meets a new one by chance.
settings.register_profile("same examples", settings.get_profile("any machine"), derandomize=True)
# `make test-all`: --hypothesis-profile=random. Each property test runs _REPEATS times, each time from another seed. The
# seeds stay until EXAMPLES is another number: what CI refuses can be repeated, and is the commit's fault.
settings.register_profile("random", settings.get_profile("any machine"), print_blob=True)
settings.load_profile("same examples")

_REPEATS = 4
_EXAMPLES = int(os.environ.get("EXAMPLES", "0"))
_PRETENDED = Path(__file__).parent / "pretended"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if settings.get_current_profile_name() == "random" and is_hypothesis_test(metafunc.function):
        metafunc.fixturenames.append("repeat")
        metafunc.parametrize("repeat", range(_REPEATS))


def pytest_runtest_setup(item: pytest.Item) -> None:
    repeat = getattr(getattr(item, "callspec", None), "params", {}).get("repeat")
    if isinstance(item, pytest.Function) and repeat is not None and is_hypothesis_test(item.obj):
        seed(_EXAMPLES * _REPEATS + repeat)(item.obj)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _leave_out_what_needs_the_pretended_device(config, items)
    _leave_out_long_proofs(config, items)
    for item in items:
        if item.get_closest_marker("ray") is not None:
            item.fixturenames.insert(0, "ray_head")  # type: ignore[attr-defined]
    if hasattr(config, "workerinput"):
        _longest_files_first(items)


def _leave_out_what_needs_the_pretended_device(config: pytest.Config, items: list[pytest.Item]) -> None:
    """It would change this process for good: `make test-gpu-pretended` and tests/gpu/test_pretended.py load it."""
    if tests.pretended.active():
        return
    _leave_out(
        config,
        items,
        lambda item: item.get_closest_marker("pretended") is not None or item.path.is_relative_to(_PRETENDED),
    )


def _leave_out_long_proofs(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make test-all` selects them (-m long); so does a command that names one (FILE::TEST)."""
    if re.search(r"\blong\b", config.option.markexpr) is None:
        _leave_out(
            config,
            items,
            lambda item: item.get_closest_marker("long") is not None and not any("::" in one for one in config.args),
        )


def _leave_out(config: pytest.Config, items: list[pytest.Item], which: Callable[[pytest.Item], bool]) -> None:
    left_out = [item for item in items if which(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def _longest_files_first(items: list[pytest.Item]) -> None:
    """So that no process is left with a long file at the end: whole runs of the program, then most slow tests, then
    most of Ray. Holds with --no-loadscope-reorder only: pytest-xdist would start files of few tests last."""
    slow: Counter[Path] = Counter()
    ray: Counter[Path] = Counter()
    for item in items:
        slow[item.path] += item.get_closest_marker("slow") is not None
        ray[item.path] += item.get_closest_marker("ray") is not None
    items.sort(key=lambda item: (item.path.parent.name != "train", -slow[item.path], -ray[item.path]))


@pytest.fixture(scope="session")
def ray_head() -> Iterator[str]:
    """The address (host:port) of a head with 16 logical CPUs and 4 pretended GPUs; this process is connected."""
    from launch.cluster.session import ray_session

    temp_dir = Path(tempfile.mkdtemp(prefix="plray"))
    previous = os.environ.pop("RAY_ADDRESS", None)
    try:
        with ray_session(cpus=16, gpus=4, temp_dir=temp_dir, object_store_bytes=256 * 2**20) as session:
            yield session.address
    finally:
        if previous is not None:
            os.environ["RAY_ADDRESS"] = previous
        shutil.rmtree(temp_dir, ignore_errors=True)
