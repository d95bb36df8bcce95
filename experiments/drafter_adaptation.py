"""Does a drafter that keeps learning stay good while the target learns? TLT Figures 15 and 16 and Table 6 on the demo.

    python -m experiments.drafter_adaptation [--target runs/warm_starts/...] [--steps 48] [--rl-rate 1.0]

The demo's target before RL, inflated to 8 layers of the same function, learns by the demo's own RL (prompts, rewards
and learner of its config, in this process). An EAGLE drafter is first fitted to it offline until the plateau rule of
`drafter.training.fit` (its defaults, fixed beforehand) says stop; then three copies follow the same RL steps:

- frozen: never trained again;
- adaptive: after the rollouts of every RL step it gets `--micro-steps` micro-steps of `--micro-step-tokens` tokens from
  the online buffer: the shorter half of the step's rollouts (those that have ended while a tail is still decoding) and,
  by the one-step offset, the longer half of the step before;
- no offset: the same without the step before.

Speculation is lossless, so all three see the same target and the same rollouts; accept lengths are measured in the
engine at T = 1 with coupled chains, for the same requests, under the weights that decode an RL step: the drafter's last
training was for the target one step older. Top-3 accuracy is that on rollouts of the step which no drafter is trained
on (one of each prompt), before, during and after that step's training: the dips and recoveries of Figure 15.
Intervals: 95 %, bootstrap over requests, both drafters of a ratio on the same draw.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from actors.engine.native.engine import NativeEngine
from benchmarks.figures import Line, Panel, draw
from benchmarks.harness import ROOT, command, markdown, ratio_of_rates, write
from benchmarks.tools.drafting import Acceptance, accept, drafting_engine
from benchmarks.tools.fit_eagle import tell_fit
from benchmarks.tools.targets import Target, deep_target, find_warm_start, load_target
from config.drafter import BufferOptions, DrafterOptions
from config.strategy import Strategy
from contracts.records import SequenceRecord
from contracts.rollout import Request, Rollout
from drafter.training.buffer import DataBuffer
from drafter.training.collect import collect_records
from drafter.training.fit import FitProgress, PlateauRule, TargetRecords, fit
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from experiments.demo_learner import DemoLearner
from launch.batch import Batch
from policies.speculation.policy import FixedPolicy

LAYERS = 8
RUNNING = 64
JUDGED_SAMPLE = 0  # of each prompt: no drafter is trained on it
FIT_EPOCH, TABLE_EPOCH = -3, -4
ARMS = ("frozen", "adaptive", "no offset")


@dataclass(frozen=True, slots=True)
class Plan:
    """Fixed before a run."""

    steps: int = 48  # RL steps; twice the demo's run
    prompts: int = 16
    fit_samples: int = 8  # rollouts per prompt for the offline fit
    fit_max_steps: int = 20_000
    micro_steps: int = 24  # of the drafter, per RL step
    micro_step_tokens: int = 1024
    judge_every: int = 6  # micro-steps
    compare_every: int = 2  # RL steps
    compared: int = 64  # requests
    table_prompts: int = 48
    depth: int = 6
    learning_rate: float = 3e-3  # of the offline fit, the demo's
    online_rate: float = 1 / 3  # of it, while it follows the target
    rl_rate: float = 1.0  # times the demo's learning rate of the target: above 1 the target drifts faster


@dataclass(slots=True)
class Arm:
    """One drafter that follows the target."""

    trainer: DrafterTrainer
    buffer: DataBuffer | None  # None: frozen
    curve: list[tuple[float, float]] = field(default_factory=list)  # (RL steps, top-3 accuracy)


class Experiment:
    """Target, learner, engine and drafters in one process. `step` in order, then `tables`."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.plan = plan
        self.target: Target = deep_target(load_target(directory, "demo", "float32"), LAYERS)
        self.rl = DemoLearner(self.target, directory, plan.steps, rate=plan.rl_rate)
        self._first = self._loaded = self.rl.weights(0)
        options = DrafterOptions(learning_rate=plan.learning_rate, micro_step_tokens=plan.micro_step_tokens)
        trainer = DrafterTrainer(TargetHead.of(self.target.model, 0), options)
        self.engine: NativeEngine = drafting_engine(self.target, trainer.model, RUNNING, plan.depth)
        self.rule = PlateauRule(max_steps=plan.fit_max_steps)
        self.fitted = self._fit(trainer)
        self.arms = {name: self._copy(trainer, name) for name in ARMS}
        self.rows: list[dict[str, Any]] = []

    def _fit(self, trainer: DrafterTrainer) -> list[FitProgress]:
        """To the plateau, on rollouts of the target before RL."""
        asked = self.rl.sample(self.rl.train, self.plan.fit_samples, FIT_EPOCH)
        self.engine.use(None)
        rollouts = accept(self.engine, asked.requests).rollouts
        self.engine.use(FixedPolicy(Strategy.parse(f"eagle:{self.plan.depth}")))
        records = TargetRecords(
            self.target.model,
            [request.prompt_tokens for request in asked.requests],
            [rollouts[request.request_id].tokens for request in asked.requests],
        )
        return fit(trainer, records, self.rule, report=tell_fit)

    def _copy(self, fitted: DrafterTrainer, name: str) -> Arm:
        trainer = DrafterTrainer(fitted.head, fitted.options, model=fitted.model)
        trainer.rate_scale = self.plan.online_rate
        if name == "frozen":
            return Arm(trainer, None)
        offset = {"long_share": 0.0} if name == "no offset" else {}
        return Arm(trainer, DataBuffer(BufferOptions.model_validate(offset)))

    # One RL step.

    def step(self, number: int) -> None:
        """Decode, compare, let the drafters learn, then the target."""
        asked = self.rl.next_batch(self.plan.prompts)
        start_s = time.perf_counter()
        self._draft_with("adaptive")
        drafted = accept(self.engine, asked.requests)
        lengths = [len(rollout.tokens) for rollout in drafted.rollouts.values()]
        row: dict[str, Any] = {"step": number, "length_p50": float(np.median(lengths)), "length_max": max(lengths)}
        if number % self.plan.compare_every == 0 or number == self.plan.steps - 1:
            row["accept_length"] = self._compare(asked, drafted.rollouts)
        self._train(number, asked, drafted.rollouts)
        row["reward"] = self.rl.learn(asked, drafted.rollouts)
        self.load(number + 1)
        row["seconds"] = round(time.perf_counter() - start_s, 2)
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    def _compare(self, asked: Batch, rollouts: Mapping[int, Rollout]) -> dict[str, float]:
        """Tokens per verification of every arm over the same requests."""
        requests = asked.requests[: self.plan.compared]
        found = {"adaptive": length_of(requests, rollouts)}
        for name in ARMS:
            if name != "adaptive":
                self._draft_with(name)
                found[name] = length_of(requests, accept(self.engine, requests).rollouts)
        return {name: round(found[name], 3) for name in ARMS}

    def _train(self, number: int, asked: Batch, rollouts: Mapping[int, Rollout]) -> None:
        """What happens to the drafters while the tail of this step is decoded, judged as it goes; the target's weights
        are still those of this step."""
        records = records_of(self.target, asked, rollouts, number)
        judged = [record for record in records if asked.place(record.request_id)[1] == JUDGED_SAMPLE]
        others = [record for record in records if asked.place(record.request_id)[1] != JUDGED_SAMPLE]
        middle = float(np.median([len(record.tokens) for record in others]))
        head = TargetHead.of(self.target.model, number)
        for arm in self.arms.values():
            arm.trainer.set_head(head)
            arm.curve.append((float(number), arm.trainer.evaluate(judged).top3_accuracy))
            if arm.buffer is None:
                continue
            arm.buffer.add(record for record in others if len(record.tokens) <= middle)
            for micro_step in range(1, self.plan.micro_steps + 1):
                arm.trainer.micro_step(arm.buffer.sample(self.plan.micro_step_tokens, number))
                if micro_step % self.plan.judge_every == 0:
                    at = number + 0.9 * micro_step / self.plan.micro_steps
                    arm.curve.append((at, arm.trainer.evaluate(judged).top3_accuracy))
            arm.buffer.add(record for record in others if len(record.tokens) > middle)

    def load(self, version: int) -> None:
        """What is decoded with next: the learner's weights; version 0 is the target before RL, whenever asked for."""
        self._loaded = self._first if version == 0 else self.rl.weights(version)

    def _draft_with(self, name: str) -> None:
        """Every measurement begins with an engine that knows no prompt: a drafter sees nothing of a prompt whose K/V
        is left from earlier requests, so whoever came second would draft worse."""
        manifest, buffer = self._loaded
        self.engine.update_weights(manifest, np.asarray(buffer))
        loaded = self.engine.update_drafter("eagle", *self.arms[name].trainer.export())
        if loaded.reason:
            raise SystemExit(f"the engine refuses the drafter: {loaded.reason}")

    # After the last one.

    def tables(self) -> dict[str, Any]:
        """As TLT Table 6: target before and after RL, prompts of the training set and held-out ones; as Figure 16; and
        accept length beyond the median position, with and without the offset."""
        found: dict[str, Any] = {}
        for target, version in (("before RL", 0), ("after RL", self.plan.steps)):
            self.load(version)
            for kind, prompts, epoch in (
                ("training prompts", self.rl.train, TABLE_EPOCH),
                ("held-out prompts", self.rl.held_out, TABLE_EPOCH - 1),
            ):
                asked = self.rl.sample(prompts[: self.plan.table_prompts], 2, epoch)
                found[f"{kind}, target {target}"] = self._table(asked.requests)
        asked = self.rl.sample(self.rl.train[: self.plan.table_prompts], 2, TABLE_EPOCH - 2)
        self._draft_with("adaptive")
        longer = beyond_median(asked, accept(self.engine, asked.requests).rollouts)
        if longer:  # else more than half of all run to the limit
            found["beyond the median position, target after RL"] = self._table(longer)
        return found

    def _table(self, requests: Sequence[Request]) -> dict[str, Any]:
        accepted: dict[str, Acceptance] = {}
        for name in ARMS:
            self._draft_with(name)
            accepted[name] = accept(self.engine, requests)
        counts = {name: counts_of(requests, a.rollouts) for name, a in accepted.items()}
        return {
            "requests": len(requests),
            "accept_length": {name: round(length_of(requests, a.rollouts), 3) for name, a in accepted.items()},
            "accepted_by_depth": {name: a.by_depth for name, a in accepted.items()},
            "adaptive_over_frozen": ratio_of_rates(counts["adaptive"], counts["frozen"]),
            "adaptive_over_no_offset": ratio_of_rates(counts["adaptive"], counts["no offset"]),
        }


def records_of(target: Target, asked: Batch, rollouts: Mapping[int, Rollout], version: int) -> list[SequenceRecord]:
    """By a forward pass; request ids are their places, as `Batch` counts them."""
    prompts = [request.prompt_tokens for request in asked.requests]
    responses = [rollouts[request.request_id].tokens for request in asked.requests]
    return list(collect_records(target.model, prompts, responses, version=version))


def beyond_median(asked: Batch, rollouts: Mapping[int, Rollout]) -> list[Request]:
    """Requests that go on from the median length of all responses, for those that are longer."""
    middle = int(np.median([len(rollout.tokens) for rollout in rollouts.values()]))
    return [
        replace(
            request,
            prompt_tokens=np.concatenate((request.prompt_tokens, rollouts[request.request_id].tokens[:middle])),
            sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - middle),
        )
        for request in asked.requests
        if len(rollouts[request.request_id].tokens) > middle + 1
    ]


Counts = NDArray[np.int64]  # [N, 2]: tokens and verifications of each request


def counts_of(requests: Sequence[Request], rollouts: Mapping[int, Rollout]) -> Counts:
    found = [rollouts[request.request_id] for request in requests]
    return np.array([(len(rollout.tokens), rollout.verifications) for rollout in found])


def length_of(requests: Sequence[Request], rollouts: Mapping[int, Rollout]) -> float:
    """Tokens per verification of all requests together, the target's own included, as TLT counts."""
    tokens, verifications = counts_of(requests, rollouts).sum(0)
    return float(tokens / verifications)


def figure(path: Path, steps: Sequence[Mapping[str, Any]], tops: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Figure 15, and accept lengths below it."""
    compared = [row for row in steps if "accept_length" in row]
    top3, lengths = [], []
    for name, curve in tops.items():
        style = "--" if name == "frozen" else "-"
        top3.append(Line(name, [(x, 100 * y) for x, y in curve], style))
        lengths.append(Line(name, [(row["step"], row["accept_length"][name]) for row in compared], style))
    above = Panel(
        title="Top-3 accuracy on the present target's rollouts; vertical rules: the target learns",
        lines=top3,
        x_label="RL steps, drafter training between them",
        y_label="%",
        marks=[row["step"] for row in steps[1:]],
    )
    title = "Accept length right after the target learned"
    draw(path, [above, Panel(title=title, lines=lengths, x_label="RL steps", y_label="tokens")])


def dips(curve: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Mean change of top-3 accuracy, in points, where the target learned and over the training in between."""
    values: dict[int, list[float]] = {}
    for x, y in curve:
        values.setdefault(int(x), []).append(100 * y)
    updates = [values[n][0] - values[n - 1][-1] for n in values if n - 1 in values]
    trained = [found[-1] - found[0] for found in values.values()]
    return {"at_target_update": round(float(np.mean(updates)), 3), "by_training": round(float(np.mean(trained)), 3)}


def markdown_of(tables: Mapping[str, Any]) -> str:
    """Accept lengths as TLT Table 6."""
    rows = []
    for name, row in tables.items():
        both = [row["adaptive_over_frozen"], row["adaptive_over_no_offset"]]
        ratios = ["{median:.2f} ({low:.2f} to {high:.2f})".format(**found) for found in both]
        rows.append([name, *(f"{row['accept_length'][arm]:.2f}" for arm in ARMS), *ratios])
    return markdown(["requests", *ARMS, "adaptive / frozen", "adaptive / no offset"], rows)


def main(
    *,
    target: Annotated[Path | None, "the demo's warm start; default: the newest in runs/warm_starts/"] = None,
    steps: Annotated[int, "RL steps"] = Plan().steps,
    micro_steps: Annotated[int, "of the drafter per RL step"] = Plan().micro_steps,
    rl_rate: Annotated[float, "times the demo's learning rate of the target"] = 1.0,
    threads: int = 2,
    quick: Annotated[bool, "2 small RL steps: does it run?"] = False,
    out: Path = ROOT / "experiments/results/drafter_adaptation.json",
) -> None:
    torch.set_num_threads(threads)
    plan = Plan(steps=steps, micro_steps=micro_steps, rl_rate=rl_rate)
    if quick:
        plan = replace(plan, steps=2, prompts=4, fit_samples=1, fit_max_steps=50, compared=16, table_prompts=4)
    experiment = Experiment(find_warm_start(target), plan)
    for number in range(plan.steps):
        experiment.step(number)
    found: dict[str, Any] = {
        "target": {"name": experiment.target.name, "parameters": experiment.target.parameters},
        "fit": {
            "rule": asdict(experiment.rule),
            "plateau": experiment.fitted[-1].step < plan.fit_max_steps,
            "history": [asdict(progress) for progress in experiment.fitted],
        },
        "steps": experiment.rows,
        "tables": experiment.tables(),
        "top3_points": {name: dips(arm.curve) for name, arm in experiment.arms.items()},
        "curves": {name: [(round(x, 3), round(y, 4)) for x, y in a.curve] for name, a in experiment.arms.items()},
    }
    question = "a drafter that follows the target through RL, beside a frozen one (TLT Figures 15, 16; Table 6)"
    write(out, question, found, settings=asdict(plan) | {"threads": threads, "seed": 0})
    figure(out.with_suffix(".svg"), found["steps"], found["curves"])
    print(markdown_of(found["tables"]))
    print(json.dumps(found["top3_points"], indent=1))


if __name__ == "__main__":
    command(main)
