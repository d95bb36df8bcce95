"""Agreement of the native engine with transformers on SmolLM2-135M, and of its log-probs with the learner's.

    python -m benchmarks.smollm_agreement

Three parts over the same 50 chat prompts, all numbers, no times:
conversion  logits of the converted directory against those of the model that transformers reads from the GGUF file
greedy      the engine's greedy responses by format. A response is transformers' own if each of its tokens is the
            argmax of transformers' float32 logits after the preceding tokens; our network's logits are compared too
sampled     responses drawn at temperature 1: the engine's log-probs against those of a float32 learner, in full
            precision and mirroring the engine's format (learner.quantization)
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from actors.engine.native.engine import NativeEngine
from benchmarks.engine_smollm import gguf_file
from benchmarks.harness import RESULTS, ROOT, command, machine, markdown, write
from benchmarks.tools.targets import requests_of
from config.formats import FORMATS, LowBitFormat
from config.rollout import EngineOptions
from contracts.rollout import Request, SamplingParams
from models.checkpoint import load_model
from models.gguf import convert
from models.ops import log_softmax
from models.packed import PackedContext
from models.transformer import Transformer

FORMS: dict[str, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "none"),
    "bfloat16": (torch.bfloat16, "none"),
    "w8a8, rest bfloat16": (torch.bfloat16, "w8a8"),
    "w8a8, rest float32": (torch.float32, "w8a8"),
    "w4a8, rest bfloat16": (torch.bfloat16, "w4a8"),
    "w4a8, rest float32": (torch.float32, "w4a8"),
}
SUBJECTS = ("the sea", "bread", "a bicycle", "winter", "chess", "the moon", "a letter", "bees", "music", "a bridge")
Spread = dict[str, float]


def prompts_of(folder: Path, count: int) -> list[list[int]]:
    """Return sums and small talk alternately, through the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = [
        f"What is {7 + 3 * i} + {11 + 5 * i}?"
        if i % 2 == 0
        else f"Write {1 + i % 3} sentences about {SUBJECTS[i % 10]}."
        for i in range(count)
    ]
    messages = ([{"role": "user", "content": text}] for text in texts)
    return [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]


def responses(
    model: Transformer, prompts: Sequence[Sequence[int]], tokens: int, temperature: float
) -> tuple[list[list[int]], Tensor]:
    """Return (prompt and response of each, log-probs of all response tokens in order, at temperature 1)."""
    requests: list[Request] = requests_of(prompts, [tokens] * len(prompts))
    if temperature == 0:
        sampling = SamplingParams(tokens, temperature=0.0)
        requests = [replace(request, sampling=sampling) for request in requests]
    found = NativeEngine(model, EngineOptions(max_running=len(prompts))).generate(requests)
    whole = [[*prompt, *found[i].tokens.tolist()] for i, prompt in enumerate(prompts)]
    logprobs = [torch.from_numpy(found[i].logprobs_t1) for i in range(len(prompts))]
    return whole, torch.cat(logprobs)


@torch.no_grad()
def logits_of(model: Transformer, texts: Sequence[Sequence[int]], tokens: int) -> Tensor:
    """Return float32 [texts x tokens, V]: the logits before each of a text's last `tokens` tokens."""
    found = []
    for text in texts:
        hidden = model(torch.tensor(text), PackedContext.from_lengths([len(text)]))
        found.append(model.logits(hidden[-tokens - 1 : -1]).float())
    return torch.cat(found)


@torch.no_grad()
def their_logits(network: Any, texts: Sequence[Sequence[int]], tokens: int) -> Tensor:
    """Return the same by transformers."""
    return torch.cat([network(torch.tensor([text])).logits[0, -tokens - 1 : -1].float() for text in texts])


def spread(gaps: Tensor) -> Spread:
    return {"mean": float(gaps.abs().mean()), "largest": float(gaps.abs().max())}


def last_tokens(texts: Sequence[Sequence[int]], tokens: int) -> Tensor:
    return torch.tensor([text[-tokens:] for text in texts]).flatten()


def compared(
    form: str, folder: Path, theirs: Any, learner: Transformer, prompts: Sequence[Sequence[int]], tokens: int
) -> dict[str, Any]:
    """Return the row of a format."""
    dtype, quantization = FORMS[form]
    low_bit: LowBitFormat | None = FORMATS.get(quantization)
    model = load_model(folder, dtype=dtype, batch_invariant=True, low_bit=low_bit)
    greedy, _ = responses(model, prompts, tokens, 0.0)
    wanted, found = their_logits(theirs, greedy, tokens), logits_of(model, greedy, tokens)
    same = (wanted.argmax(1) == last_tokens(greedy, tokens)).view(len(prompts), tokens)
    drawn, logprobs = responses(model, prompts, tokens, 1.0)
    gaps = {}
    for name, mirrored in (("learner", None), ("mirroring learner", low_bit)):
        if name == "learner" or low_bit is not None:
            learner.mirror(mirrored, dtype)
            scores = log_softmax(logits_of(learner, drawn, tokens))  # the learner sums 49,152 exponentials the same way
            gaps[name] = spread(logprobs - scores.gather(1, last_tokens(drawn, tokens)[:, None])[:, 0])
    learner.mirror(None, dtype)
    return {
        "form": form,
        "logits": spread(found - wanted),
        "largest_logit": float(wanted.abs().max()),
        "greedy_texts_equal": int(same.all(1).sum()),
        "greedy_tokens_equal": float(same.float().mean()),
        "logprob_gap": gaps,
    }


def table(rows: Sequence[dict[str, Any]], conversion: Spread, prompts: int, tokens: int) -> str:
    """Render Markdown."""
    head = (
        "engine",
        "logits: largest difference",
        "mean",
        f"greedy texts of {prompts} as transformers'",
        "tokens",
        "log-prob gap to a float32 learner: mean",
        "largest",
        "to one that mirrors: mean",
        "largest",
    )
    lines = []
    for row in rows:
        gaps = [row["logprob_gap"].get(name) for name in ("learner", "mirroring learner")]
        found = [f"{gap[key]:.1e}" if gap else "" for gap in gaps for key in ("mean", "largest")]
        logits = [f"{row['logits'][key]:.1e}" for key in ("largest", "mean")]
        lines.append([row["form"], *logits, row["greedy_texts_equal"], f"{row['greedy_tokens_equal']:.1%}", *found])
    return (
        f"# SmolLM2-135M: engine, learner and transformers\n\n{machine()['cpu']}; {prompts} chat prompts, {tokens} new"
        f" tokens each; logits beside transformers' in float32, of which the largest is {rows[0]['largest_logit']:.0f}."
        f" The converted directory beside the GGUF file, both by transformers: {conversion['largest']:.1e} at most.\n\n"
        f"{markdown(head, lines)}\n"
    )


def main(
    *,
    forms: Annotated[Sequence[str], "of the engine", tuple(FORMS)] = tuple(FORMS),
    prompts: int = 50,
    tokens: Annotated[int, "new ones, of each prompt"] = 32,
    threads: int = 2,
    folder: Annotated[Path, "where the converted model is kept"] = ROOT / "runs/engine_smollm",
    out: Path = RESULTS / "smollm_agreement.json",
) -> None:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model, source = folder / "smollm2", gguf_file()
    if not model.is_dir():
        convert(source, model)
    asked = prompts_of(model, prompts)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32).eval()
    conversion = spread(their_logits(theirs, asked[:5], 8) - their_logits(read, asked[:5], 8))
    del read
    learner = load_model(model, dtype=torch.float32, batch_invariant=True)
    rows = []
    for form in forms:
        rows.append(compared(form, model, theirs, learner, asked, tokens))
        print(rows[-1], flush=True)
    settings = {"prompts": prompts, "tokens": tokens, "threads": threads, "seed": 0}
    question = "how far are engine, learner and transformers apart on SmolLM2-135M?"
    write(out, question, {"conversion": conversion, "rows": rows}, settings=settings)
    out.with_suffix(".md").write_text(text := table(rows, conversion, prompts, tokens), encoding="utf-8")
    print(text, flush=True)


if __name__ == "__main__":
    command(main, timed=False)
