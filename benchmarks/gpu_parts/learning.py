"""The learner on one GPU: tokens per second, share of the peak, and memory, at real lengths and with a long tail."""

import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from actors.training.parallel import Rank
from actors.training.trainer import Trainer
from benchmarks.gpu_parts.session import Session, part
from benchmarks.tools.qwen import network
from config.learner import LearnerOptions
from config.model import ModelOptions
from config.objective import ObjectiveOptions
from contracts.training import TrainSequence
from policies.roofline.learning import MFU, token_flops
from policies.roofline.memory import LearnerShape, plan_learner


def run(session: Session) -> None:
    for size, checkpointing in (("0.5b", False), ("0.5b", True), ("1.5b", True)):
        if session.left_s < 12:
            session.row(size=size, checkpointing=checkpointing, skipped="no time left")
            continue
        _steps(session, "tiny" if session.rehearse else size, checkpointing)
        session.free()


def _steps(session: Session, size: str, checkpointing: bool) -> None:
    config = session.config(size)
    tokens = 64 if session.rehearse else 8192
    options = LearnerOptions(
        autocast_bf16=True, activation_checkpointing=checkpointing, micro_batch_tokens=tokens, mini_batches=1
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")
        trainer = Trainer(
            ModelOptions(path=folder, dtype="bfloat16"),
            options,
            ObjectiveOptions(),
            rank=Rank(device=torch.device(session.device)),
            init="random",
        )
    trainer.begin(options.optimizer, 10)
    for name, lengths in _lengths(2 * tokens, session.rehearse).items():
        sequences = _sequences(lengths, config.vocab_size)
        took = []
        for _ in range(2):
            session.synchronize()
            start_s = time.perf_counter()
            trainer.rl_step(sequences, temperature=1.0)
            session.synchronize()
            took.append(time.perf_counter() - start_s)
        computed = sum(lengths)
        flops = sum(length * token_flops(network(config), length) for length in lengths)
        shape = LearnerShape(
            ranks=1, micro_batch_tokens=tokens, checkpointing=checkpointing, master_bytes=4, compute_bytes=2
        )
        plan = plan_learner(network(config), shape, session.gpu.memory_bytes)
        again = 4 / 3 if checkpointing else 1.0
        session.row(
            size=size,
            checkpointing=checkpointing,
            lengths=name,
            first_s=took[0],
            tokens_s=computed / took[1],
            predicted_tokens_s=computed * MFU * session.gpu.bf16_flops_s / (flops * again),
            mfu=flops / took[1] / session.gpu.bf16_flops_s,
            peak_gib=session.peak_gib(),
            predicted_peak_gib=plan.worst.total_bytes / 2**30,
            head_chunk_rows=getattr(trainer.module, "chunk_rows", None),
        )


def _lengths(total: int, rehearse: bool) -> dict[str, list[int]]:
    """Return two micro-batches: one of equal lengths, one in which a sequence takes half."""
    short = 16 if rehearse else 512
    tail = total // 4
    return {"equal": [short] * (total // short), "one long": [tail] + [short] * ((total - tail) // short)}


def _sequences(lengths: list[int], vocab: int) -> list[TrainSequence]:
    rng = np.random.default_rng(0)
    found = []
    for i, length in enumerate(lengths):
        prompt = min(8, length // 2)
        response = length - prompt + 1
        found.append(
            TrainSequence(
                prompt_tokens=rng.integers(0, vocab, prompt).astype(np.int32),
                response_tokens=rng.integers(0, vocab, response).astype(np.int32),
                sampler_logprobs=np.full(response, -1.0, np.float32),
                sampler_logprobs_t1=np.full(response, -1.0, np.float32),
                advantage=(-1.0) ** i,
            )
        )
    return found


if __name__ == "__main__":
    part(run, "learning")
