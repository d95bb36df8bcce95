"""The Observer: the single path of a run's reports into files, sinks and the terminal.

Owns the run folder's journals, environment.json and run.log. Never decides anything about the run: apart from a full
disk, nothing here stops it. Calls may come from any thread.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from actors.observer import RunObserver
from config.catalogue import CATALOGUE, TRAINED
from launch.config import Config
from launch.config.show import to_yaml
from launch.errors import PacelineError
from launch.observe import environment, journal, live, now
from launch.observe.journal import Journal
from launch.observe.records import Sample, Span, StepRecord, evenly, length_metrics
from launch.observe.run_log import RunLog
from launch.observe.sinks import RaySink, open_sinks
from launch.observe.speculation import PLAIN
from launch.observe.state import RunState, WorkerState
from launch.observe.symptoms import Watch, example, silent
from launch.observe.timeline import JOIN_GAP_S, SpanJoiner, joined, span_of, to_json, write_trace
from policies.drafter.silence import SilenceWatch

FILES = (
    *("metrics", "events", "timeline", "samples", "eval_samples", "eval_prompts", "lengths", "speculation", "drafter"),
    "budget",
)
END_EVENTS = frozenset({"finished", "interrupted", "failed"})
GAUGE_PERIOD_S = 2.0  # of what changes within an RL step; Ray hands gauges on every few seconds
QUIET_EVENTS = frozenset({"checkpoint", "lookahead", "phase"})  # written, not printed


class Observer(RunObserver):
    """Observes one run. Use as a context manager, or call `close`.

    resume_from: the last RL step to keep (the checkpoint's). Everything recorded after it is cut, so that no step
    appears twice. None starts a new run; a folder that already holds one is refused with PacelineError.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        *,
        resume_from: int | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._dir, self._config, self._clock = run_dir, config, clock
        self._lock = threading.RLock()
        self._closed = self._ended = False
        run_dir.mkdir(parents=True, exist_ok=True)
        self._prepare(resume_from)
        journal.replace(run_dir / "config.yaml", to_yaml(config))
        self._gauges = RaySink(config.run.name)
        self._gauges_at_s: dict[str, float] = {}
        self._sinks = [self._gauges, *open_sinks(run_dir, config, first_step=(resume_from or 0) + 1)]
        self._log = RunLog(run_dir / "run.log")
        self._log.write(clock(), f"driver is process {os.getpid()} on {socket.gethostname()}")
        self._journals = {name: Journal(run_dir / f"{name}.jsonl") for name in FILES}
        self._spans: SpanJoiner = SpanJoiner(JOIN_GAP_S)
        form = config.rollout.quantization
        self._state = RunState(
            name=config.run.name,
            steps=config.run.steps,
            started_s=clock(),
            precision="" if form == "none" else form,
            step=resume_from or 0,
        )
        self._watch, self._example = Watch(), ""
        heads = [name for name, entry in CATALOGUE.items() if entry.needs_weights]
        self._silence = SilenceWatch(heads, [TRAINED] if config.drafter.train else [])
        self._recall()
        self._console = console if console is not None else Console(stderr=False)
        self._live: Live | None = None
        self._echo_again: Callable[[], None] = lambda: None
        if config.observe.live and self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._render, refresh_per_second=4, vertical_overflow="crop"
            )
            self._live.start()
            self._echo_again = live.no_echo_of_ctrl_c()
        missing = self._missing(resume_from or 0)
        self.event("started" if resume_from is None else "resumed", f"{run_dir} from step {self._state.step}")
        if missing:
            self.event("rows_missing", f"metrics.jsonl has no row of {missing}: charts and sums leave it out")
        if changes := environment.record(run_dir, environment.describe(config, clock())):
            self.event("environment_changed", f"since the last start of this run: {'; '.join(changes)}")

    @property
    def current_step(self) -> int:
        """The RL step in progress: the last complete one plus 1."""
        with self._lock:
            return self._state.step + 1

    def step(self, record: StepRecord) -> None:
        """Take a complete RL step: write it, send it to the sinks, show it."""
        speculation, drafter = record.speculation, record.drafter
        metrics = {**length_metrics(record.lengths), **_floats(record.metrics)}
        if speculation is not None:
            metrics |= speculation.metrics()
        if drafter is not None:
            metrics |= drafter.metrics()
        seconds = _floats(record.seconds)
        scalars = {**metrics, **{f"seconds/{name}": value for name, value in seconds.items()}}
        with self._lock:
            self._journals["metrics"].write({"step": record.step, "kind": "step", "at_s": self._clock(), **scalars})
            if len(record.lengths):
                versions = (
                    {"versions": [[list(part) for part in of] for of in record.versions]}
                    if len(record.versions)
                    else {}
                )
                lengths = {"lengths": [int(n) for n in record.lengths]}
                self._journals["lengths"].write({"step": record.step, **lengths, **versions})
            if speculation is not None:
                self._journals["speculation"].write({"step": record.step, **speculation.to_json()})
            if drafter is not None:
                self._journals["drafter"].write({"step": record.step, **drafter.to_json()})
            if len(record.rollouts_per_prompt):
                counts = [int(n) for n in record.rollouts_per_prompt]
                self._journals["budget"].write({"step": record.step, "rollouts": counts})
            self._flush_spans()
            self._state.take(record, metrics)
            self._send(record.step, scalars)
            line = live.step_line(self._state)
            self._log.write(self._clock(), line)
            if self._config.observe.live and self._live is None:
                self._console.print(line, highlight=False, soft_wrap=True)
            uses = [] if speculation is None else speculation.strategies.items()
            drafted = self._silence.step((name, use.drafted, use.accepted) for name, use in uses if name != PLAIN)
            silences = [silent(one, self._config) for one in drafted]
            for symptom in (*self._watch.take(scalars, self._example), *silences):
                self._state.warnings.append(f"{symptom.kind}: {symptom.message}")
                self._report(symptom.kind, str(symptom), "yellow")

    def evaluation(
        self, step: int, metrics: Mapping[str, float], seconds: float = 0.0, *, printed: bool = True
    ) -> None:
        """Take a held-out evaluation after `step` complete RL steps (0: before the first). metrics has eval/reward.
        `printed`: false where the command itself shows them at its end."""
        values = _floats(metrics)
        with self._lock:
            row = {"step": step, "kind": "eval", "at_s": self._clock(), **values, "seconds/eval": float(seconds)}
            self._journals["metrics"].write(row)
            self._state.take_eval(values)
            self._send(step, values)
        shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items() if "/source/" not in name)
        text = f"held-out after step {step}: {shown}"
        if printed:
            self._print(text)
        else:
            self._log.write(self._clock(), text)

    def event(self, kind: str, message: str, **details: Any) -> None:
        """Record a notable event. kind is one word (worker_lost, restart, checkpoint, ...)."""
        self._report(kind, message, "dim", **details)

    def _report(self, kind: str, message: str, style: str, **details: Any) -> None:
        with self._lock:
            self._ended = kind in END_EVENTS
            self._journals["events"].write(
                {"at_s": self._clock(), "step": self._state.step, "kind": kind, "message": message, **details}
            )
        text = f"{kind}: {message}"
        if kind in QUIET_EVENTS:
            self._log.write(self._clock(), text)
        else:
            self._print(text, style)

    def span(self, span: Span) -> None:
        with self._lock:
            done = joined(self._spans, span)
            if done is not None:
                self._journals["timeline"].write(to_json(done))

    def worked(self, actor: str, kind: str, start_s: float, end_s: float) -> None:
        """Record a span of the RL step in progress."""
        self.span(Span(actor, kind, start_s, end_s, self.current_step))

    def samples(self, step: int, samples: Sequence[Sample], *, held_out: bool = False) -> None:
        """Take the responses of one RL step, or to one held-out set of the evaluation after it. Keeps
        observe.samples_per_step or observe.eval_samples of them, from the best to the worst reward. In an evaluation,
        three in four are first responses to prompts spread over the set, always the same prompts. Sinks get at most
        observe.samples_per_step."""
        observe = self._config.observe
        most = observe.eval_samples if held_out else observe.samples_per_step
        count = len(samples) if most is None else min(most, len(samples))
        followed = evenly([i for i, sample in enumerate(samples) if sample.sample == 0], count * 3 // 4)
        others = sorted(set(range(len(samples))) - set(followed), key=lambda i: (-samples[i].reward, i))
        picks = [samples[i] for i in (*followed, *evenly(others, count - len(followed)))]
        name = "eval_samples" if held_out else "samples"
        with self._lock:
            if not held_out:
                self._example = example(samples)
            for sample in picks:
                self._journals[name].write({"step": step, **asdict(sample)})
            shown = picks[:: max(len(picks) // max(observe.samples_per_step, 1), 1)][: observe.samples_per_step]
            for sink in self._sinks if shown else ():
                sink.texts(step, "/".join(filter(None, (name, shown[0].set))), [_markdown(sample) for sample in shown])

    def judged(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take how often each held-out prompt was solved in the evaluation after `step` RL steps."""
        with self._lock:
            for row in rows:
                self._journals["eval_prompts"].write({"step": step, **row})

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Set what the run is doing, e.g. progress("rollout", 87, 128). For the live view, gauges and now.json."""
        with self._lock:
            entered = phase != self._state.phase
            self._state.enter(phase, done, total, self._clock())
            if self._due("now.json", final=False) or entered:
                now.write(self._dir, now.Now(phase, done, total, self._state.step, self._clock()))
            if total and self._due(f"phase {phase}", final=done == total):
                self._gauges.set({"phase/done": float(done), "phase/total": float(total)}, phase=phase)

    def stopping(self, signal_name: str) -> None:
        """Report at once that the run was asked to stop, since stopping takes a while."""
        with self._lock:
            if self._closed:
                return
            self._state.stopping = signal_name
        self.event(
            "stopping", f"{signal_name}: saving the last complete RL step first; press Ctrl-C again to stop at once"
        )

    def worker(self, name: str, state: str, detail: str = "") -> None:
        """Set what one worker is doing, e.g. worker("rollout-0", "decode", "12 running"). Live view only."""
        with self._lock:
            known = self._state.workers.get(name)
            since_s = known.since_s if known is not None and known.state == state else self._clock()
            self._state.workers[name] = WorkerState(state, since_s, detail)

    def load(self, worker: str, *, running: int, waiting: int, kv_tokens: int) -> None:
        """Set what a worker's engine holds. Gauges only, at most every GAUGE_PERIOD_S, but always the last value."""
        values = {
            "worker/running": float(running),
            "worker/waiting": float(waiting),
            "worker/kv_share": kv_tokens / self._config.rollout.engine.kv_tokens,
            "worker/busy": float(running > 0),
        }
        with self._lock:
            if self._due(worker, final=running == 0):
                self._gauges.set(values, worker=worker)

    def fleet_due(self) -> bool:
        """Whether `fleet` is due, which it is every GAUGE_PERIOD_S."""
        with self._lock:
            return self._due("fleet", final=False)

    def fleet(self, counts: Mapping[str, int]) -> None:
        """Set the number of workers by state. Gauges only."""
        with self._lock:
            for state, count in counts.items():
                self._gauges.set({"fleet/now": float(count)}, state=state)

    def _due(self, what: str, *, final: bool) -> bool:
        now_s = self._clock()
        due = final or now_s - self._gauges_at_s.get(what, -GAUGE_PERIOD_S) >= GAUGE_PERIOD_S
        if due:
            self._gauges_at_s[what] = -GAUGE_PERIOD_S if final else now_s
        return due

    def sync(self) -> None:
        """Wait until all records are on disk. Called with a checkpoint, so that a power cut loses no row of a step that
        the checkpoint includes. Raises OSError."""
        for file in self._journals.values():
            file.sync()

    def close(self) -> None:
        """Write what is held back and the Perfetto trace; end the live view. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            live_view, self._live = self._live, None
        if live_view is not None:  # outside the lock, since its thread may be drawing, which takes the lock
            live_view.stop()
        self._echo_again()
        with self._lock:
            self._flush_spans()
            for file in self._journals.values():
                file.close()
            self._log.close()
            for sink in self._sinks:
                sink.close()
        write_trace(self._dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(OSError):  # a full disk must not hide the error
            if not (self._closed or self._ended):
                name = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                self.event(name, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        with suppress(OSError):
            self.close()

    def _prepare(self, resume_from: int | None) -> None:
        metrics = self._dir / "metrics.jsonl"
        if resume_from is None and journal.read(metrics):
            raise PacelineError(
                f"{self._dir} already holds a run",
                remedy="go on with --resume, choose another run.name, or remove the folder",
            )
        last = 0 if resume_from is None else resume_from
        for name in FILES:
            whole = name == "events"  # history: what went wrong stays known; only a torn line goes
            journal.cut(self._dir / f"{name}.jsonl", None if whole else last)

    def _missing(self, last: int) -> str:
        """Describe the complete steps up to `last` without a row."""
        rows = journal.read(self._dir / "metrics.jsonl") if last else []
        there = {row["step"] for row in rows if row["kind"] == "step"}
        steps = [str(step) for step in range(1, last + 1) if step not in there]
        more = f" and {len(steps) - 8} more" if len(steps) > 8 else ""
        return f"step{'s' * (len(steps) > 1)} {', '.join(steps[:8])}{more}" if steps else ""

    def _recall(self) -> None:
        for row in journal.read(self._dir / "metrics.jsonl"):
            if row.get("kind") == "step":
                self._watch.recall(row)
            if isinstance(row.get("reward/mean"), float):
                self._state.rewards.append(row["reward/mean"])
            if isinstance(row.get("eval/reward"), float):
                self._state.take_eval({"eval/reward": row["eval/reward"]})
        for row in journal.read(self._dir / "speculation.jsonl"):
            uses = [(name, use) for name, use in row.get("strategies", {}).items() if name != PLAIN]
            self._silence.step((name, use.get("drafted", 0), use.get("accepted", 0)) for name, use in uses)

    def _flush_spans(self) -> None:
        for actor, over in self._spans.flush():
            self._journals["timeline"].write(to_json(span_of(actor, over)))

    def _send(self, step: int, scalars: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, scalars)

    def _print(self, text: str, style: str = "dim") -> None:
        self._log.write(self._clock(), text)
        if self._config.observe.live:
            # On a terminal words stay whole; in a log, or if there is a command to copy, lines do.
            whole = self._live is None or "paceline " in text
            self._console.print(Text(text, style=style), soft_wrap=whole)

    def _render(self) -> Any:
        with self._lock:
            return live.render(self._state, self._clock())


def _markdown(sample: Sample) -> str:
    """Format a sample as Markdown. Indented text is shown verbatim."""
    prompt, response = (text.replace("\n", "\n    ") for text in (sample.prompt, sample.response))
    return f"reward {sample.reward:g}, {sample.tokens} tokens\n\n    {prompt}\n\n    {response}\n"


def _floats(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
