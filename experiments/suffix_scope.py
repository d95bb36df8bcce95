"""Whose rollouts should a suffix drafter know, and how many? `python -m experiments.suffix_scope --history RUN`.

Owns `results/suffix_scope.json`, `.svg` and `.md`: DAS Figures 6 (problem-scoped against global) and 7 (window).
Replays RL histories step by step: all requests of a step run together, each verifies its drafts against what it did
say, and what has finished is known to those that still run. RUN is a run of the demo that wrote down every response:

    paceline train examples/guess_and_check/config.yaml run.steps=96 observe.samples_per_step=128

Texts of `../shared/data` join it: eight responses to 100 problems and four to 1,319, one of each problem per epoch,
which are of models that do not change; pieces of words and digits as tokens (benchmarks.tools.suffix_data). With
`--arctic FOLDER` (see benchmarks.suffix_index) its peer stands beside it: one cache per problem, and one of all. Every
contender drafts chains of up to 8 tokens, at most twice as long as their match. CPU time of the calling thread: drafts
by the median, tokens with all that the index does for them, merges included.

Not the paper's: "problem only", without the request's own text, is left out; its histories are of one model of 0.6M
parameters and of texts, where the paper's are of RL with DeepSeek-R1-Distill-Qwen-7B.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Protocol

import numpy as np

from benchmarks.figures import Line, Panel, draw
from benchmarks.harness import ROOT, command, markdown, write
from benchmarks.tools.suffix_data import Tokens, read_rollouts
from benchmarks.tools.suffix_history import Step, epoch_of, in_epochs, run_history
from benchmarks.tools.suffix_replay import MIN_PROBABILITY, suffixes

RESULTS = ROOT / "experiments" / "results"
DATA = ROOT.parent / "shared" / "data"
QUESTION = "whose rollouts should a suffix drafter know, and how many of them? (DAS Figures 6 and 7)"
SETS = {"math": ("rollouts_qwen25math_100x8.jsonl.gz", 20), "gsm8k": ("rollouts_gsm8k_gpt3_4each.jsonl.gz", 64)}
TOKENS, MATCH_FACTOR = 8, 2.0  # of a draft at most, and per token of its match
POOL_BYTES = 64 << 20  # as in the drafter with its default of max_bytes
POOL_PARTS = 16  # it is merged when such a part of it waits
DECAY = 0.8
WINDOWS = (8, 16, 32, 64, 128)
ALL = np.array([1 << 30], np.int32)  # the prompt of an index over all problems: no text holds it
CONTEXT = 4  # prompt tokens in front of a rollout there, as the index itself keeps them


class Contender(Protocol):
    def begin(self, number: int, step: Step) -> None:
        """Step `number` starts: request i is to step[i]'s prompt."""

    def draft(self, live: Sequence[int]) -> list[list[int]]: ...
    def append(self, live: Sequence[int], gained: Sequence[Tokens]) -> None: ...
    def finish(self, request: int) -> None:
        """Its response is complete, and known from now on."""


class Ours:
    """window: rollouts of earlier steps per problem (None: all); `scope` "all": one index over all problems."""

    def __init__(
        self, requests: int, *, scope: str = "problem", pool_bytes: int = 0, window: int | None = None
    ) -> None:
        self._make = partial(suffixes, requests, pool_bytes=pool_bytes, decay=DECAY)
        self._index = self._make()
        self._everything, self._window = scope == "all", window
        self._known: dict[bytes, list[tuple[int, Tokens]]] = {}
        self._waiting: list[tuple[int, Tokens]] = []  # for the index over all problems, as rollouts wait for the pool
        self._waiting_tokens = self._tokens = 0

    def begin(self, number: int, step: Step) -> None:
        self._number, self._step = number, step
        if self._window is not None:
            self._index = self._make()
            for prompt in {prompt.tobytes(): prompt for prompt, _ in step}.values():
                for version, response in self._known.get(prompt.tobytes(), [])[-self._window :]:
                    self._index.publish(prompt, response, version)
        self._index.set_version(number)
        for request, (prompt, _) in enumerate(step):
            self._index.begin(request, ALL if self._everything else prompt)
            if self._everything:
                self.append([request], [prompt])

    def draft(self, live: Sequence[int]) -> list[list[int]]:
        shape = (len(live), TOKENS)
        tokens, parents, probs = np.empty(shape, np.int64), np.empty(shape, np.int64), np.empty(shape, np.float32)
        counts, room = np.empty(shape[0], np.int64), np.full(shape[0], TOKENS)
        settings = (TOKENS, 1, MIN_PROBABILITY, MATCH_FACTOR)
        self._index.draft_batch(np.array(live), room, *settings, tokens, parents, probs, counts)
        return [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]

    def append(self, live: Sequence[int], gained: Sequence[Tokens]) -> None:
        self._index.append_batch(np.array(live), np.concatenate(gained), np.cumsum([0, *map(len, gained)]))

    def finish(self, request: int) -> None:
        prompt, response = self._step[request]
        self._index.finish(request, not self._everything, self._number)
        if self._everything:
            self._waiting.append((self._number, np.concatenate((prompt[-CONTEXT:], response))))
            self._waiting_tokens += len(response)
            self._tokens += len(response)
            if POOL_PARTS * self._waiting_tokens >= self._tokens:  # a merge passes over all
                for version, text in self._waiting:
                    self._index.publish(ALL, text, version)
                self._waiting, self._waiting_tokens = [], 0
        if self._window is not None:
            self._known.setdefault(prompt.tobytes(), []).append((self._number, response))


class Arctic:
    """arctic-inference's SuffixDecodingCache of depth 64: one per problem, or one of all. It forgets nothing."""

    def __init__(self, *, scope: str) -> None:
        self._everything = scope == "all"
        self._caches: dict[bytes, Any] = {}
        self._ids = 0

    def begin(self, number: int, step: Step) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._texts: list[list[Tokens]] = []
        self._running: list[tuple[Any, int]] = []
        for prompt, _ in step:
            name = b"" if self._everything else prompt.tobytes()
            if name not in self._caches:
                self._caches[name] = SuffixDecodingCache(max_tree_depth=64)
            self._caches[name].start_request(self._ids, prompt)
            self._running.append((self._caches[name], self._ids))
            self._texts.append([prompt])
            self._ids += 1

    def draft(self, live: Sequence[int]) -> list[list[int]]:
        found = []
        for request in live:
            self._texts[request] = [np.concatenate(self._texts[request])[-64:]]
            cache, name = self._running[request]
            draft = cache.speculate(name, self._texts[request][0], TOKENS, MATCH_FACTOR, 0.0, MIN_PROBABILITY)
            found.append(draft.token_ids)
        return found

    def append(self, live: Sequence[int], gained: Sequence[Tokens]) -> None:
        for request, tokens in zip(live, gained, strict=True):
            cache, name = self._running[request]
            cache.add_active_response(name, tokens)
            self._texts[request].append(tokens)

    def finish(self, request: int) -> None:
        cache, name = self._running[request]
        cache.stop_request(name)


@dataclass
class Counts:
    """By step: verifications, accepted and drafted tokens, seconds in the index, and tokens in all; and of every
    verification the microseconds of its draft."""

    rows: list[tuple[int, int, int, float, int]] = field(default_factory=list)
    draft_us: list[list[float]] = field(default_factory=list)

    def over(self, steps: Sequence[int]) -> dict[str, float]:
        verified, accepted, drafted, seconds, tokens = np.array(self.rows)[list(steps)].sum(0).tolist()
        return {
            "accepted": round(accepted / verified, 4),
            "drafted": round(drafted / verified, 4),
            "us_per_draft": round(median(us for step in steps for us in self.draft_us[step]), 2),
            "us_per_token": round(seconds / tokens * 1e6, 2),
        }


def replay(history: Sequence[Step], contender: Contender) -> Counts:
    counts = Counts()
    for number, step in enumerate(history):
        seconds = -time.thread_time()
        contender.begin(number, step)
        seconds += time.thread_time()
        done, live = [0] * len(step), list(range(len(step)))
        verified = accepted = drafted = 0
        counts.draft_us.append([])
        while live:
            start = time.thread_time()
            drafts = contender.draft(live)
            spent = time.thread_time() - start
            counts.draft_us[-1] += [spent / len(live) * 1e6] * len(live)
            seconds += spent
            gained = []
            for request, draft in zip(live, drafts, strict=True):
                truth = step[request][1][done[request] :]
                right = 0
                while right < min(len(draft), len(truth)) and draft[right] == truth[right]:
                    right += 1
                gained.append(truth[: right + 1])
                done[request] += right + 1
                accepted += right
                drafted += len(draft)
            verified += len(live)
            start = time.thread_time()
            contender.append(live, gained)
            for request in live:
                if done[request] >= len(step[request][1]):
                    contender.finish(request)
            seconds += time.thread_time() - start
            live = [request for request in live if done[request] < len(step[request][1])]
        counts.rows.append((verified, accepted, drafted, seconds, sum(len(response) for _, response in step)))
    return counts


def contenders(requests: int, arctic: bool) -> dict[str, Callable[[], Contender]]:
    """By name: what each may know."""
    made: dict[str, Callable[[], Contender]] = {
        "own + pool": partial(Ours, requests, pool_bytes=POOL_BYTES),
        "own": partial(Ours, requests),
        "global": partial(Ours, requests, scope="all"),
    }
    if arctic:
        made |= {
            "arctic, per problem": partial(Arctic, scope="problem"),
            "arctic, global": partial(Arctic, scope="all"),
        }
    return made


def windows(requests: int) -> dict[str, Callable[[], Contender]]:
    """Of the own index, without a pool."""
    made: dict[str, Callable[[], Contender]] = {str(size): partial(Ours, requests, window=size) for size in WINDOWS}
    return made | {"unlimited": partial(Ours, requests)}


def measure(history: Sequence[Step], made: dict[str, Callable[[], Contender]]) -> dict[str, Any]:
    """By contender: the whole, the first epoch and the later ones, and every epoch."""
    epochs = np.array(epoch_of(list(history)))
    found = {}
    for name, make in made.items():
        counts = replay(history, make())
        by_epoch = [counts.over(np.flatnonzero(epochs == epoch).tolist()) for epoch in range(int(epochs.max()) + 1)]
        later = counts.over(np.flatnonzero(epochs > 0).tolist())
        found[name] = {"all": counts.over(range(len(history))), "later": later, "epochs": by_epoch}
        print(f"{name:22s} {found[name]['all']}", file=sys.stderr, flush=True)
    return found


def tables(record: dict[str, Any]) -> str:
    parts = []
    for name, of in record["scope"].items():
        rows = [
            [
                contender,
                *(
                    f"{part['accepted']:.2f} / {part['drafted']:.2f}"
                    for part in (got["epochs"][0], got["later"], got["all"])
                ),
                f"{got['all']['us_per_draft']:.1f}",
                f"{got['all']['us_per_token']:.2f}",
            ]
            for contender, got in of.items()
        ]
        head = [
            f"{name}: accepted / drafted per verification",
            "first epoch",
            "later",
            "all",
            "us per draft",
            "us per token",
        ]
        parts.append(markdown(head, rows))
    for name, of in record["windows"].items():
        last = len(next(iter(of.values()))["epochs"]) - 1
        shown = sorted({epoch for epoch in (1, 3, 7, last) if epoch <= last})
        rows = [
            [
                window,
                *(f"{got['epochs'][epoch]['accepted']:.2f}" for epoch in shown),
                f"{got['all']['us_per_draft']:.1f}",
            ]
            for window, got in of.items()
        ]
        head = [f"{name}: rollouts per problem", *(f"epoch {epoch + 1}" for epoch in shown), "us per draft"]
        parts.append(markdown(head, rows))
    return "\n".join(parts)


def figure(path: Path, record: dict[str, Any]) -> None:
    panels = []
    for figure_number, part in ((6, "scope"), (7, "windows")):
        for name, of in record[part].items():
            for what, label in (("accepted", "accepted per verification"), ("us_per_token", "index, us per token")):
                lines = [
                    Line(contender, [(epoch + 1, got[what]) for epoch, got in enumerate(by["epochs"])])
                    for contender, by in of.items()
                ]
                panels.append(
                    Panel(title=f"Figure {figure_number}: {name}", lines=lines, x_label="epoch", y_label=label)
                )
    draw(path, panels, columns=2)


def main(
    *,
    history: Annotated[Path | None, "directory of a run of the demo that wrote down every response"] = None,
    arctic: Annotated[Path | None, "folder that holds the package arctic_inference"] = None,
    steps: Annotated[int | None, "of the demo's history, at most"] = None,
    out: Path = RESULTS / "suffix_scope.json",
) -> None:
    if arctic:
        sys.path.insert(0, str(arctic))
    sets = {"demo": run_history(history)[:steps]} if history else {}
    if DATA.is_dir():
        sets |= {name: in_epochs(read_rollouts(DATA / file), together) for name, (file, together) in SETS.items()}
    if not sets:
        raise SystemExit("nothing to replay: give --history, or put the texts into ../shared/data")
    record: dict[str, Any] = {"tokens": {}, "scope": {}, "windows": {}}
    for name, steps_of in sets.items():
        requests = max(map(len, steps_of))
        record["tokens"][name] = sum(len(response) for step in steps_of for _, response in step)
        print(f"{name}: {len(steps_of)} steps, {record['tokens'][name]:,} tokens", file=sys.stderr, flush=True)
        record["scope"][name] = measure(steps_of, contenders(requests, arctic is not None))
        if name == "demo":  # the others have too few responses to fill a window
            record["windows"][name] = measure(steps_of, windows(requests))
    text = tables(record)
    write(out, QUESTION, record, settings={"tokens": TOKENS, "match_factor": MATCH_FACTOR, "pool_bytes": POOL_BYTES})
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    figure(out.with_suffix(".svg"), record)
    print(json.dumps({"tables": str(out.with_suffix(".md"))}))


if __name__ == "__main__":
    command(main)
