"""The TRL half of `rl_step_vs_trl.py`: GRPOTrainer on a checkpoint, on CPU; runs in TRL's own interpreter.

Owns TRL's settings and its clock. Never imports Paceline: it must run where only TRL is installed.
One RL step = one generation batch = `--mini-batches` optimizer steps, as in Paceline.
"""

import argparse
import json
import re
import time
from pathlib import Path

import torch
import transformers
import trl
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainerControl, TrainerState
from trl import GRPOConfig, GRPOTrainer

BOXED = re.compile(r"\\boxed\{([^{}]*)\}")


def boxed_answer(prompts: list[str], completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 if the first closed box holds the answer. Cheaper than math-verify, which Paceline runs: in TRL's favour."""
    found = (BOXED.search(completion) for completion in completions)
    return [float(match is not None and match.group(1) == gold) for match, gold in zip(found, answer, strict=True)]


class Clock(TrainerCallback):  # type: ignore[misc]
    """Time stamps of optimizer steps; `ends[i]` is taken when optimizer step i is complete."""

    def __init__(self) -> None:
        self.start = 0.0
        self.ends: list[float] = []

    def on_train_begin(self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args: GRPOConfig, state: TrainerState, control: TrainerControl, **_: object) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the trainer's own files")
    parser.add_argument("--steps", type=int, required=True, help="RL steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--mini-batches", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    rollouts = options.prompts * options.samples
    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        reward_funcs=boxed_answer,
        train_dataset=load_dataset("json", data_files=str(options.train), split="train"),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=str(options.work),
            use_cpu=True,
            bf16=False,
            seed=options.seed,
            max_steps=options.steps * options.mini_batches,
            per_device_train_batch_size=rollouts // options.mini_batches,
            steps_per_generation=options.mini_batches,
            gradient_accumulation_steps=1,
            num_generations=options.samples,
            max_completion_length=options.max_new_tokens,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="bnpo",  # mean over the tokens of the batch
            scale_rewards="group",
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=False,  # TRL's default recomputes activations to save memory: slower, not needed
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
    trainer.train()

    ends = [clock.start, *clock.ends[options.mini_batches - 1 :: options.mini_batches]]
    logs = [entry for entry in trainer.state.log_history if "completions/mean_length" in entry]  # one per RL step
    result = {
        "versions": {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "steps": [
            {
                "seconds": after - before,
                "tokens": entry["completions/mean_length"] * rollouts,
                "reward": entry["reward"],
            }
            for before, after, entry in zip(ends, ends[1:], logs, strict=False)
        ],
    }
    options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
