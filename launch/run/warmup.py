"""Supervised warm start: demonstrations in, a Hugging Face model directory out, cached by the content of its inputs."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from actors.data import PromptOrder, load_demonstrations
from actors.learner_group import LearnerGroup
from actors.observer import RunObserver
from actors.placement import place
from actors.training.errors import LearnerLostError
from config.data import PROMPTS_ONLY
from launch.cache import add_files, damaged, is_kept, keep
from launch.cluster.session import ray_session
from launch.cluster.versions import compared
from launch.config import Config
from launch.config.paths import tokenizer_dir
from launch.errors import show
from launch.interrupt import Interrupt, interrupt_flag
from launch.run.inputs import tokenizer_of, tools_of

_REPORT_EVERY = 100  # optimizer steps
Init = Literal["checkpoint", "random"]


class Printed(RunObserver):
    """Prints events."""

    def event(self, kind: str, message: str) -> None:
        print(message)


def warmup(config: Config) -> Path:
    """`paceline warmup`: return the warm-started model's directory, made now or earlier."""
    with (
        interrupt_flag() as interrupt,
        ray_session(address=config.cluster.address, on_lost=show, lost_after_s=config.cluster.ray_timeout_s) as session,
    ):
        observer = Printed()
        learner = partial(learner_group, avoid=compared(session, observer).refused)
        return warm_start(config, interrupt, observer, learner)


@contextmanager
def learner_group(config: Config, init: Init, avoid: Mapping[str, str] | None = None) -> Iterator[LearnerGroup]:
    """Run a learner group for a warm start, on its place in the cluster. Needs Ray. `avoid`: see
    actors.placement.reserve."""
    with (
        place(config, avoid) as placement,
        LearnerGroup(
            config.model,
            config.learner.model_copy(update={"lora": None}),  # RL adapts a fully trained model
            config.objective,
            temperature=1.0,
            init=init,
            seed=config.run.seed,
            actor_options=placement.learner_options(),
            start_timeout_s=config.cluster.start_timeout_s,
        ) as learner,
    ):
        yield learner


def warm_start(
    config: Config,
    interrupt: Interrupt,
    observer: RunObserver,
    learner: Callable[[Config, Init], AbstractContextManager[LearnerGroup]] = learner_group,
) -> Path:
    """Return the initial weights of a run: model.path, or what the `warmup:` section makes of it. `learner`: makes the
    learner that trains it.

    Raises Interrupted between optimizer steps; nothing is kept of an unfinished warm start.
    """
    options = config.warmup
    if options is None:
        return Path(config.model.path)
    target = initial_weights(config)
    if said := damaged(target):
        observer.event("warm_start", said)
    if is_kept(target):
        observer.event("warm_start", f"using the cached warm start {target}")
        return target
    tokenizer = tokenizer_of(config)
    demonstrations, report = load_demonstrations(options, config.data, tokenizer, tools=tools_of(config, tokenizer))
    summary = f"{report.summary()}; {options.steps} optimizer steps"
    observer.event("warm_start", f"warm start on {options.data}: {summary}")
    partial = target.with_name(f".{target.name}.{os.getpid()}")

    def supervised() -> None:
        order = PromptOrder(len(demonstrations), config.run.seed, shuffle=True)
        with learner(config, options.init) as group:
            observer.event("warm_start", f"warm start on {group.computes_with}")
            group.begin(options.optimizer, options.steps)
            for step in range(1, options.steps + 1):
                interrupt.check()
                batch = [demonstrations[index] for _, index in order.take(options.batch_size)]
                result = group.sft_step(batch)
                observer.progress("warm start", step, options.steps)
                if step % _REPORT_EVERY == 0 or step == options.steps:
                    loss = f"loss {result.losses[-1]:.4f}"
                    observer.event("warm_start", f"warm start {step}/{options.steps}: {loss}")
            group.export(partial)

    for restarts in range(config.learner.max_restarts + 1):
        try:
            supervised()
            break
        except LearnerLostError as error:  # a checkpoint would save nothing but repeated updates
            if restarts == config.learner.max_restarts:
                raise
            again = f"restart {restarts + 1} of {config.learner.max_restarts}"
            observer.event("warm_start", f"{error}; it begins again ({again})")
    keep(partial, target, "the warm start")
    return target


def initial_weights(config: Config) -> Path:
    """Return the path of RL's initial weights: model.path, or that of the warm start's result, made or not."""
    if config.warmup is None:
        return Path(config.model.path)
    return Path(config.run.dir) / "warm_starts" / fingerprint(config)


def fingerprint(config: Config) -> str:
    """Return a hash over everything that a warm start depends on, and nothing else: options, seed, network, tokenizer
    and data, by content wherever they are. Also the learner's threads and ranks: they decide the order of sums, so they
    change the last bits of a step, and with them all later ones."""
    assert config.warmup is not None
    digest = hashlib.blake2b(digest_size=12)
    digest.update(config.warmup.model_dump_json(exclude={"data"}).encode())
    invariant = config.model.batch_invariant is not False  # as a learner on a CPU reads it; on a GPU it is never true
    model = config.model.model_copy(update={"batch_invariant": invariant})
    digest.update(model.model_dump_json(exclude={"path", "tokenizer"}).encode())
    digest.update(config.data.model_dump_json(exclude={"train", "eval", *PROMPTS_ONLY}).encode())
    if config.environment is not None and config.environment.tools:  # chat templates show them
        digest.update(config.environment.model_dump_json(include={"tools"}).encode())
    learner = config.learner
    computes = learner.model_dump(include={"ranks", "device", "packing", "micro_batch_tokens", "autocast_bf16"})
    threads = learner.threads_of(learner.ranks) if config.cluster.layout == "embedded" else learner.threads
    digest.update(f"{config.run.seed} {threads} {computes}".encode())
    add_files(digest, [Path(config.model.path), Path(tokenizer_dir(config))], Path(config.warmup.data))
    return digest.hexdigest()
