"""The drafter's fit before the first RL step (TLT 4.3: warm-up offline), cached by the content of its inputs.

Owns where the fit runs and where its result is kept; `launch.drafter.fit` has the fit itself.
"""

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from actors.placement import place
from config.data import PROMPTS_ONLY
from launch.cache import add_files, damaged, is_kept, keep
from launch.config import Config
from launch.config.paths import tokenizer_dir
from launch.drafter.fit import DrafterWarmup, fit_drafter
from launch.interrupt import Interrupt
from launch.observe import Observer

_POLL_S = 0.5
_ONLINE = {  # keys of `drafter:` that say nothing about the fit
    *("train", "every_steps", "drift", "while_it_pays", "checkpoint_every", "checkpoint_keep", "stop_timeout_s"),
    *("recording", "buffer", "canary"),
}


def offline_fit(
    config: Config,
    interrupt: Interrupt,
    target: Path,
    run_dir: Path,
    observer: Observer,
    avoid: Mapping[str, str] | None = None,
) -> Config:
    """Return `config` with the drafter that `drafter.offline` asks for; unchanged if it asks for none.

    `target`: directory of the initial model. `run_dir` holds the run's config.yaml. `avoid`: see
    actors.placement.reserve. Needs Ray. Raises Interrupted; nothing is kept of an unfinished fit.
    """
    options, directory = config.drafter.offline, fitted_folder(config, target)
    if options is None or directory is None:
        return config
    observer.progress("fitting the drafter")
    if said := damaged(directory):
        observer.event("drafter_fit", said)
    if is_kept(directory):
        observer.event("drafter_fit", f"using the drafter fitted before, {directory}")
    else:
        given = DrafterWarmup(
            out=directory.with_name(f".{directory.name}.{os.getpid()}"),
            target=target.resolve(),
            run=run_dir.resolve(),
            algorithm=config.drafter.algorithm,
            samples=options.samples,
            limit=options.limit,
            max_steps=options.max_steps,
            seed=config.drafter.seed,
        )
        _fit(config, interrupt, given, observer, avoid)
        keep(given.out, directory, "the fitted drafter")
    eagle = config.rollout.speculation.eagle.model_copy(update={"path": str(directory)})
    speculation = config.rollout.speculation.model_copy(update={"eagle": eagle})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"speculation": speculation})})


def fitted_folder(config: Config, target: Path) -> Path | None:
    """Return the folder of the fit that `drafter.offline` asks for; None if it asks for none."""
    if not config.drafter.train or config.drafter.offline is None or config.rollout.speculation.eagle.path is not None:
        return None
    return Path(config.run.dir).resolve() / "warm_starts" / f"drafter_{_fingerprint(config, target)}"


def _fit(
    config: Config,
    interrupt: Interrupt,
    given: DrafterWarmup,
    observer: Observer,
    avoid: Mapping[str, str] | None,
) -> None:
    """On the first learner rank's resources, with what it says logged as it comes."""
    observer.event("drafter_fit", f"fitting the drafter to {given.samples} rollouts per prompt of {given.target}")
    try:
        with place(config, avoid) as placement:
            said: Any = ray.remote(fit_drafter).options(**placement.learner_options()[0], max_retries=0).remote(given)
            try:
                while True:
                    ready, _ = ray.wait([said], timeout=_POLL_S)
                    interrupt.check()
                    if ready:
                        observer.event("drafter_fit", ray.get(next(said)))
            except StopIteration:
                pass
            except BaseException:
                ray.cancel(said, force=True)
                raise
    except BaseException:
        shutil.rmtree(given.out, ignore_errors=True)
        raise


def _fingerprint(config: Config, target: Path) -> str:
    """Return a hash over all inputs of the fit: options, prompts, sampling, and the files of target and tokenizer."""
    digest = hashlib.blake2b(digest_size=12)
    fitted = config.drafter.model_dump_json(exclude=_ONLINE)
    prompts = config.data.model_dump_json(exclude={"train", "eval", "eval_split", "shuffle", *PROMPTS_ONLY})
    chosen = [one.model_dump_json(exclude={"path"}) for one in config.data.sets]
    if config.data.success.known:
        chosen.append(config.data.success.model_dump_json())
    for part in (fitted, prompts, config.rollout.sampling.model_dump_json(), *chosen):
        digest.update(part.encode())
    add_files(digest, [target, Path(tokenizer_dir(config))], *(Path(one.path) for one in config.train_sets.values()))
    return digest.hexdigest()
