"""`paceline warmup-drafter`: fit a drafter to a fixed target, offline, before a run.

Owns the source of the sequences and the messages; learning and its plateau rule are in `drafter.training.fit`.

The sequences are the target's own rollouts of the given prompts, because these are what a drafter must predict. Needs
no Ray; one process, one device.
"""

import json
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from actors.data import check_vocabulary, end_tokens, load_demonstrations, load_prompts, load_tokenizer
from actors.data.tokenizers import Tokenizer
from actors.engine.native.engine import NativeEngine
from config.data import DataOptions
from config.drafter import Algorithm, DrafterOptions
from config.learner import WarmupOptions
from config.rollout import EngineOptions, SamplingOptions
from contracts.rollout import Finished, Rollout
from drafter.eagle import Drafting, load_eagle, save_eagle
from drafter.training.fit import FitProgress, PlateauRule, TargetRecords, fit
from drafter.training.head import TargetHead
from drafter.training.trainer import DrafterTrainer
from launch.batch import Batch, Pick, sampling_params, stop_rule
from launch.config import load_config
from launch.errors import UsageError
from launch.interrupt import Interrupt, interrupt_flag
from models.checkpoint import load_model
from models.config import read_config
from models.device import choose_device
from models.transformer import Transformer

if TYPE_CHECKING:
    from rich.progress import Progress

Pairs = tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]]  # prompts and responses, in step
HISTORY_FILE = "training.json"
_EPOCH = -2  # rollouts for a drafter share no noise with training (0 and up) or evaluation (-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterWarmup:
    """Arguments of the command. Exactly one of `data` and `run` is set."""

    out: Path
    target: Path | None = None  # model directory; default: the run's trained model
    data: Path | None = None  # prompts, in any form of data.train
    run: Path | None = None  # folder of a run: its prompts, templates and sampling
    algorithm: Algorithm = "eagle"
    init: Path | None = None  # drafter directory to go on from
    samples: int = 4  # rollouts per prompt
    limit: int | None = None  # prompts
    response_field: str | None = None  # learn from these texts instead of own rollouts
    prompt_field: str = "prompt"
    template: Literal["chat", "plain"] = "chat"
    temperature: float | None = None
    max_new_tokens: int | None = None
    learning_rate: float | None = None
    max_steps: int = 20_000
    seed: int = 0
    device: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The resolved inputs of a `DrafterWarmup`."""

    target: Path
    tokenizer: Path
    data: DataOptions
    sampling: SamplingOptions
    engine: EngineOptions
    drafter: DrafterOptions


def warmup_drafter(given: DrafterWarmup) -> Iterator[str]:
    """`fit_drafter` on the main thread, until somebody interrupts it."""
    with interrupt_flag() as interrupt:
        yield from fit_drafter(given, interrupt)


def fit_drafter(given: DrafterWarmup, interrupt: Interrupt | None = None) -> Iterator[str]:
    """Train, and write `given.out`: a directory for rollout.speculation.eagle.path. Yields what there is to say
    meanwhile. Raises Interrupted between two micro-steps, and between two steps of the rollouts."""
    interrupt = interrupt or Interrupt()
    source = _source(given)
    if (given.out / "config.json").exists():
        raise UsageError(f"--out: {given.out} holds a model or drafter already", remedy="choose another directory")
    device = choose_device(given.device, "--device")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = load_tokenizer(str(source.tokenizer))
    check_vocabulary(tokenizer, read_config(source.target)["vocab_size"])
    target = load_model(source.target, dtype=dtype, device=device, batch_invariant=False).requires_grad_(False)
    pairs = yield from _pairs(given, source, target, tokenizer, interrupt)
    head, options = TargetHead.of(target, 0), source.drafter
    trainer = DrafterTrainer(head, options, device=device, model=_start(given, target, device))
    layers = trainer.model.layers
    yield (
        f"{len(pairs[0])} sequences, {sum(map(len, pairs[1]))} response tokens; {source.drafter.algorithm}, "
        f"{sum(p.numel() for p in trainer.model.parameters()):,} trainable parameters"
        + (f", target layers {', '.join(map(str, layers))}" if layers else "")
    )
    rule = PlateauRule(max_steps=given.max_steps)
    history = list[FitProgress]()
    for progress in fit(trainer, TargetRecords(target, *pairs, layers=layers), rule, seed=given.seed):
        interrupt.check()
        if progress is not None:
            history.append(progress)
            yield _line(progress)
    save_eagle(trainer.model, given.out)
    record = {
        "target": str(source.target),
        "drafter": source.drafter.model_dump(mode="json"),
        "sequences": len(pairs[0]),
        "rule": asdict(rule),
        "plateau": history[-1].step < rule.max_steps,
        "history": [asdict(progress) for progress in history],
    }
    (given.out / HISTORY_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    best = [progress for progress in history if progress.best][-1]
    end = "plateau" if history[-1].step < rule.max_steps else f"end of its {rule.max_steps} micro-steps"
    yield f"{end} after {history[-1].step} micro-steps; kept those of step {best.step}: {_quality(best)}"


def _source(given: DrafterWarmup) -> _Source:
    if (given.data is None) == (given.run is None):
        raise UsageError("give prompts by --data FILE, or --run RUN for those of a run", remedy="exactly one of them")
    drawn = {"temperature": given.temperature, "max_new_tokens": given.max_new_tokens}
    drawn = {key: value for key, value in drawn.items() if value is not None}
    taught: dict[str, Any] = {"algorithm": given.algorithm, "seed": given.seed}
    if given.learning_rate is not None:
        taught["learning_rate"] = given.learning_rate
    if given.run is not None:
        config = load_config(_file(given.run / "config.yaml", "--run")).config
        target = given.target or given.run / "model"
        _file(target / "config.json", "--target" if given.target else "--run")
        return _Source(
            target=target,
            tokenizer=Path(config.model.tokenizer or config.model.path),
            data=config.data.model_copy(update={"limit": given.limit or config.data.limit}),
            sampling=config.rollout.sampling.model_copy(update=drawn),
            engine=config.rollout.engine,
            drafter=config.drafter.model_copy(update=taught),
        )
    if given.target is None:
        raise UsageError("--data needs a target", remedy="give its model directory with --target")
    _file(given.target / "config.json", "--target")
    fields = {"prompt_field": given.prompt_field, "template": given.template, "limit": given.limit}
    return _Source(
        target=given.target,
        tokenizer=given.target,
        data=DataOptions.model_validate({"train": str(given.data), **fields}),
        sampling=SamplingOptions.model_validate(drawn),
        engine=EngineOptions(),
        drafter=DrafterOptions.model_validate(taught),
    )


def _stop_tokens(source: _Source, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the stop tokens, as launch.run.inputs.stop_tokens_of does."""
    if source.sampling.stop_token_ids is not None:
        return source.sampling.stop_token_ids
    return end_tokens(source.data, tokenizer, source.target, read_config(source.target)["vocab_size"])


def _file(path: Path, option: str) -> Path:
    if not path.is_file():
        raise UsageError(f"{option}: there is no {path}", remedy="give the directory that holds it")
    return path


def _start(given: DrafterWarmup, target: Transformer, device: str) -> Drafting | None:
    if given.init is None:
        return None
    return load_eagle(given.init, target.config, dtype=torch.float32, device=device, batch_invariant=False)


def _pairs(
    given: DrafterWarmup,
    source: _Source,
    target: Transformer,
    tokenizer: Tokenizer,
    interrupt: Interrupt,
) -> Generator[str, None, Pairs]:
    """What is learned from. Yields what was read, in words."""
    if given.response_field is not None:
        options = WarmupOptions(data=source.data.train or "", response_field=given.response_field)
        found, report = load_demonstrations(options, source.data, tokenizer)
        yield f"{source.data.train}: {report.summary()}"
        return [d.prompt_tokens for d in found], [d.response_tokens for d in found]
    prompts = load_prompts(source.data, "train", tokenizer)
    yield f"{source.data.train or 'data.sets'}: {prompts.report.summary()}"
    picks = [Pick(_EPOCH, prompt) for prompt in prompts]
    sampling = sampling_params(source.sampling, _stop_tokens(source, tokenizer))
    expected = [float(sampling.max_new_tokens)] * len(picks)
    counts = [given.samples] * len(picks)
    stop = stop_rule(source.sampling, tokenizer)
    requests = Batch(picks, counts, sampling, seed=given.seed, expected_tokens=expected, stop=stop).requests
    rollouts: dict[int, Rollout] = {}
    with _bar() as bar:
        task = bar.add_task("", total=len(requests))
        for event in NativeEngine(target, source.engine).stream(requests):
            interrupt.check()
            if isinstance(event, Finished):
                rollouts[event.rollout.request_id] = event.rollout
                bar.advance(task)
    return [r.prompt_tokens for r in requests], [rollouts[r.request_id].tokens for r in requests]


def _bar() -> "Progress":
    """Progress of the rollouts on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("rollouts of the target"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _line(progress: FitProgress) -> str:
    return (
        f"micro-step {progress.step}: loss {progress.loss:.4f}; {_quality(progress)}"
        f"{' (best)' if progress.best else ''}; {progress.tokens / progress.seconds:,.0f} tokens/s"
    )


def _quality(progress: FitProgress) -> str:
    return (
        f"held-out loss {progress.held_out_loss:.4f}, top-1 {100 * progress.held_out_accuracy:.1f} %, "
        f"top-3 {100 * progress.held_out_top3:.1f} %"
    )
