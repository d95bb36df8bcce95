"""Whether speculation changes tokens on this device, and how much log-probs differ if it does; then the demo's whole
run, if its packages are installed.
"""

import importlib.util
import os
import subprocess
import sys

import numpy as np
from numpy.typing import NDArray

from actors.engine.native.engine import NativeEngine
from benchmarks.gpu_parts.bare import BARE
from benchmarks.gpu_parts.session import Session, part
from benchmarks.harness import ROOT, attempt
from config.rollout import EngineOptions
from config.speculation import EagleOptions, SpeculationOptions
from config.strategy import Strategy
from contracts.rollout import Request, SamplingParams
from drafter.build import build_drafters
from models.noise import noise_key
from policies.speculation.policy import FixedPolicy

_DEMO = ("cluster.layout=colocated", "rollout.workers=1", "drafter.train=false", "model.batch_invariant=null")


def run(session: Session) -> None:
    _tokens(session)
    _demo(session)


def _tokens(session: Session) -> None:
    for size in session.sizes("0.5b"):
        model = session.model(size)
        count, new_tokens = (3, 8) if session.rehearse else (16, 400)
        options = EngineOptions(max_running=count, kv_tokens=count * 512, max_model_tokens=512)
        rng = np.random.default_rng(0)
        requests = [
            Request(
                request_id=i,
                prompt_id=i,
                prompt_tokens=rng.integers(0, 500, 32).astype(np.int32),
                noise_key=noise_key(0, 0, i, 0),
                sampling=SamplingParams(new_tokens),
            )
            for i in range(count)
        ]
        found = {}
        for text in ("plain", "eagle:4", "eagle:4x3/12"):
            strategy = Strategy.parse(text)
            speculation = SpeculationOptions(eagle=EagleOptions(path="random", min_probability=0.0), strategies=(text,))
            drafters = build_drafters(speculation, model, options) if strategy.depth else {}
            policy = FixedPolicy(strategy, count) if strategy.depth else None
            engine = NativeEngine(model, options, drafters=drafters, policy=policy)
            found[text] = engine.generate(requests)
            del engine
            session.free()
        for text in ("eagle:4", "eagle:4x3/12"):
            pairs = [(found["plain"][i], found[text][i]) for i in range(count)]
            equal = [np.array_equal(one.tokens, two.tokens) for one, two in pairs]
            common = [_common(one.tokens, two.tokens) for one, two in pairs]
            gaps = [
                abs(one.logprobs[:n] - two.logprobs[:n]).max() for (one, two), n in zip(pairs, common, strict=True) if n
            ]
            session.row(
                size=size,
                strategy=text,
                responses=count,
                equal=sum(equal),
                tokens_until_differing=int(np.median(common)),
                largest_logprob_gap=float(max(gaps, default=0.0)),
            )


def _common(one: NDArray[np.int32], two: NDArray[np.int32]) -> int:
    length = min(len(one), len(two))
    differing = np.flatnonzero(one[:length] != two[:length])
    return int(differing[0]) if len(differing) else length


def _demo(session: Session) -> None:
    """Run 24 RL steps of examples/guess_and_check with engine and learner on the GPU."""
    missing = ["pydantic"] if BARE else []
    missing += [name for name in ("ray", "msgspec", "zmq") if importlib.util.find_spec(name) is None]
    if missing or session.rehearse:
        names = ", ".join(missing) or "a GPU (this is a rehearsal)"
        session.row(demo=f"skipped: it needs {names}; carry the wheels to run it")
        return
    folder = session.out.parent / "demo"
    python = [sys.executable, "-m"]
    subprocess.run([*python, "examples.guess_and_check.make_data"], cwd=ROOT, check=True, timeout=60)
    words = [*python, "launch", "train", "examples/guess_and_check/config.yaml", *_DEMO, f"run.dir={folder}"]
    os.environ["RAY_ADDRESS"] = "local"
    done = attempt(words, session.out.parent / "demo.log", max(20.0, session.left_s))
    session.row(demo_exit_code=done.code, seconds=done.seconds, tail=done.tail.splitlines()[-5:])


if __name__ == "__main__":
    part(run, "agreement")
