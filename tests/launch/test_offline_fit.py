"""The drafter's fit before a run: when it is done, what it is kept by, and what an unfinished one leaves. Ray is
replaced by a generator that runs here; a run with a real fit is in tests/train.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from config.tree import Config
from launch.config import load_config
from launch.drafter import offline_fit as module
from launch.drafter.fit import DrafterWarmup
from launch.drafter.offline_fit import offline_fit
from launch.errors import PacelineError
from launch.interrupt import Interrupt, Interrupted

Write = Callable[..., Path]


class Bench:
    """A run with drafter.offline, whose fit is `fit`; what became of its task is noted."""

    def __init__(self, tmp_path: Path, write_config: Write, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self._write = tmp_path, write_config
        self.target = tmp_path / "target"
        for folder in ("target", "tokenizer"):
            (tmp_path / folder).mkdir()
        (self.target / "model.safetensors").write_bytes(b"weights")
        (tmp_path / "tokenizer/tokenizer.json").write_bytes(b"words")
        (tmp_path / "train.jsonl").write_bytes(b"prompts")
        self.interrupt, self.said = Interrupt(), list[str]()
        self.fits: list[DrafterWarmup] = []
        self.placed = self.cancelled = 0
        self.fit: Callable[[DrafterWarmup], Iterator[str]] = self.whole_fit
        fake = SimpleNamespace(remote=self._remote, wait=lambda refs, timeout: (refs, []), get=lambda ref: ref)
        fake.cancel = self._cancel
        monkeypatch.setattr(module, "ray", fake)
        monkeypatch.setattr(module, "place", self._place)

    def config(self, *overrides: str) -> Config:
        base = (f"run.dir={self.root}", f"model.tokenizer={self.root}/tokenizer", f"data.train={self.root}/train.jsonl")
        trained = ("rollout.workers=2", "drafter.train=true", "drafter.offline={max_steps: 50}")
        return load_config(self._write(), [*base, *trained, *overrides]).config

    def run(self, *overrides: str) -> Config:
        return offline_fit(self.config(*overrides), self.interrupt, self.target, self.root / "run", cast(Any, self))

    def event(self, kind: str, message: str) -> None:
        assert kind == "drafter_fit"
        self.said.append(message)

    def progress(self, phase: str) -> None:
        assert phase == "fitting the drafter"

    def key(self, *overrides: str) -> str:
        return module._fingerprint(self.config(*overrides), self.target)

    @property
    def kept(self) -> list[str]:
        folder = self.root / "warm_starts"
        return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []

    def whole_fit(self, given: DrafterWarmup) -> Iterator[str]:
        given.out.mkdir(parents=True)
        (given.out / "model.safetensors").touch()
        yield "micro-step 25"
        (given.out / "config.json").write_text("{}")
        yield "plateau"

    def _remote(self, _: object) -> Any:
        def start(given: DrafterWarmup) -> Iterator[str]:
            assert self.placed == 1, "its resources are not reserved"
            self.fits.append(given)
            return self.fit(given)

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))

    def _cancel(self, task: Iterator[str], *, force: bool) -> None:
        assert force
        assert self.placed == 1
        self.cancelled += 1

    @contextmanager
    def _place(self, *_: object) -> Iterator[Any]:
        self.placed += 1
        try:
            yield SimpleNamespace(learner_options=lambda: [{}])
        finally:
            self.placed -= 1


@pytest.fixture
def bench(tmp_path: Path, write_config: Write, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, write_config, monkeypatch)


def test_it_is_fitted_once_and_kept(bench: Bench) -> None:
    first = bench.run("drafter.offline={max_steps: 50, samples: 3, limit: 7}", "drafter.seed=5")
    [given] = bench.fits
    assert (given.samples, given.limit, given.max_steps, given.seed) == (3, 7, 50, 5)
    assert (given.algorithm, given.target, given.run) == ("eagle", bench.target, bench.root / "run")
    assert bench.said[1:] == ["micro-step 25", "plateau"]
    [name] = bench.kept
    assert first.rollout.speculation.eagle.path == str(bench.root / "warm_starts" / name)
    second = bench.run("drafter.offline={max_steps: 50, samples: 3, limit: 7}", "drafter.seed=5", "run.name=another")
    assert second.rollout == first.rollout
    assert len(bench.fits) == 1
    assert bench.said[-1] == f"using the drafter fitted before, {bench.root / 'warm_starts' / name}"


@pytest.mark.parametrize(
    "overrides",
    [
        ["drafter.train=false"],
        ["drafter.offline=null"],
        ["rollout.speculation.eagle.path=random"],
    ],
)
def test_nothing_is_fitted_where_it_is_not_asked_for_or_weights_are_given(bench: Bench, overrides: list[str]) -> None:
    assert bench.run(*overrides) == bench.config(*overrides)
    assert bench.fits == []
    assert bench.kept == []


def interrupted(bench: Bench) -> Iterator[str]:
    yield "micro-step 25"
    bench.interrupt.requested = True
    yield "micro-step 50"


def broken(bench: Bench) -> Iterator[str]:
    yield "micro-step 25"
    raise PacelineError("no memory left")


@pytest.mark.parametrize(("fit", "error"), [(interrupted, Interrupted), (broken, PacelineError)])
def test_an_unfinished_fit_leaves_nothing_behind(
    bench: Bench, fit: Callable[[Bench], Iterator[str]], error: type[Exception]
) -> None:
    def fails(given: DrafterWarmup) -> Iterator[str]:
        given.out.mkdir(parents=True)
        (given.out / "config.json").write_text("{}")
        yield from fit(bench)

    bench.fit = fails
    with pytest.raises(error):
        bench.run()
    assert (bench.kept, bench.placed, bench.cancelled) == ([], 0, 1)
    bench.interrupt.requested, bench.fit = False, bench.whole_fit
    bench.run()
    assert len(bench.kept) == 1


@pytest.mark.parametrize("theirs_is_whole", [True, False])
def test_another_run_that_was_faster(bench: Bench, theirs_is_whole: bool) -> None:
    theirs = bench.root / "warm_starts" / f"drafter_{bench.key()}"

    def fit(given: DrafterWarmup) -> Iterator[str]:
        yield from bench.whole_fit(given)
        theirs.mkdir()
        (theirs / ("config.json" if theirs_is_whole else "else")).write_text("theirs")

    bench.fit = fit
    if theirs_is_whole:
        assert bench.run().rollout.speculation.eagle.path == str(theirs)
        assert (theirs / "config.json").read_text() == "theirs"
    else:
        with pytest.raises(PacelineError, match="cannot keep the fitted drafter"):
            bench.run()
    assert bench.kept == [theirs.name]


@pytest.mark.parametrize(
    "override",
    [
        "drafter.algorithm=hass",
        "drafter.learning_rate=0.01",
        "drafter.micro_step_tokens=128",
        "drafter.seed=1",
        "drafter.offline={max_steps: 51}",
        "drafter.offline={max_steps: 50, limit: 9}",
        "drafter.offline={max_steps: 50, samples: 2}",
        "rollout.sampling.temperature=0.7",
        "rollout.sampling.max_new_tokens=77",
        "data.template=plain",
        "data.limit=5",
        "data.max_prompt_tokens=9",
    ],
)
def test_kept_by_the_options_that_it_depends_on(bench: Bench, override: str) -> None:
    assert bench.key(override) != bench.key()


@pytest.mark.parametrize(
    "override",
    [
        "run.name=another",
        "run.steps=77",
        "run.seed=9",
        "data.eval=eval.jsonl",
        "data.shuffle=false",
        "rollout.workers=3",
        "rollout.prompts_per_step=2",
        "learner.mini_batches=2",
        "drafter.every_steps=5",
        "drafter.drift=0.5",
        "drafter.checkpoint_every=7",
        "drafter.checkpoint_keep=7",
        "drafter.stop_timeout_s=7",
        "drafter.recording.source=learner",
        "drafter.buffer.max_age_steps=7",
        "drafter.canary.floor=0.25",
    ],
)
def test_not_by_those_that_it_does_not_depend_on(bench: Bench, override: str) -> None:
    assert bench.key(override) == bench.key()


@pytest.mark.parametrize("file", ["target/model.safetensors", "tokenizer/tokenizer.json", "train.jsonl"])
def test_kept_by_the_content_of_files_and_not_by_their_place(bench: Bench, file: str) -> None:
    before = bench.key()
    (bench.root / "elsewhere").mkdir()
    (bench.root / "train.jsonl").rename(bench.root / "elsewhere/train.jsonl")
    assert bench.key(f"data.train={bench.root}/elsewhere/train.jsonl") == before
    (bench.root / "elsewhere/train.jsonl").rename(bench.root / "train.jsonl")
    (bench.root / file).write_bytes(b"others")
    assert bench.key() != before
