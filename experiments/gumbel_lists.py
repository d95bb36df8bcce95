"""Would trees with candidate lists (Gumbel list sampling, arXiv 2506.05632) be accepted more often than those here?

    python -m experiments.gumbel_lists [--rows 2000] [--children 4] [--vocabulary 256]

Both couple drafts with the target's draw by shared noise, with the drafter's distribution q and the target's p:

    present  one noise; the target draws argmax(log p + G), the children are the largest of log q + G
    lists    one noise per child; child k is argmax(log q + G_k), the target draws argmax(log p + max_k G_k)

A draft is accepted if the target's draw is among the children. For lists there is a lower bound: the sum over j of
K / (sum_i max(q_i / q_j, p_i / p_j) + (K - 1) / p_j), exact for K = 1, where both ways are the same. Logits of the
target are normal with standard deviation `spread`; the drafter's have normal noise added. Owns
results/gumbel_lists.json.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from benchmarks.harness import ROOT, command, write

_ROWS_AT_ONCE = 50


def present(p: Tensor, q: Tensor, children: int, generator: torch.Generator) -> Tensor:
    """Return whether the target's draw is a child, bool [rows]. p, q: [rows, V]."""
    times = torch.empty_like(p).exponential_(generator=generator)  # the smallest time / p is the largest log p + G
    draw = (times / p).argmin(-1, keepdim=True)
    return ((times / q).topk(children, largest=False).indices == draw).any(-1)


def lists(p: Tensor, q: Tensor, children: int, generator: torch.Generator) -> Tensor:
    """Return whether the target's draw is a child, bool [rows]."""
    times = torch.empty(len(p), children, p.shape[1], dtype=p.dtype).exponential_(generator=generator)
    draw = (times.min(1).values / p).argmin(-1, keepdim=True)
    return ((times / q[:, None]).argmin(-1) == draw).any(-1)


def bound(p: Tensor, q: Tensor, children: int) -> Tensor:
    """Return the lower bound on the probability of `lists`, [rows]."""
    found = []
    for start in range(0, len(p), _ROWS_AT_ONCE):
        a, b = (one[start : start + _ROWS_AT_ONCE] for one in (p, q))
        most = torch.maximum(a[:, :, None] / a[:, None], b[:, :, None] / b[:, None]).sum(1)
        found.append((children / (most + (children - 1) / a)).sum(-1))
    return torch.cat(found)


def one(spread: float, noise: float, rows: int, vocabulary: int, children: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    logits = spread * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    drafted = logits + noise * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    p, q = logits.softmax(-1), drafted.softmax(-1)
    return {
        "spread": spread,
        "noise": noise,
        "entropy_nats": float(-(p * p.log()).sum(-1).mean()),
        "one_token": float(present(p, q, 1, generator).double().mean()),
        "rejection": float(torch.minimum(p, q).sum(-1).mean()),
        "present": float(present(p, q, children, generator).double().mean()),
        "lists": float(lists(p, q, children, generator).double().mean()),
        "lists_bound": float(bound(p, q, children).mean()),
    }


def main(
    rows: Annotated[int, "distributions of each kind"] = 2000,
    children: Annotated[int, "of the node"] = 4,
    vocabulary: Annotated[int, "tokens"] = 256,
    spreads: Annotated[Sequence[float], "standard deviations of the target's logits"] = (6.0, 4.0, 3.0, 2.0),
    noises: Annotated[Sequence[float], "of the drafter's error"] = (0.7, 1.2),
    out: Path = ROOT / "experiments/results/gumbel_lists.json",
) -> int:
    found: list[dict[str, Any]] = []
    for spread in spreads:
        for noise in noises:
            row = one(spread, noise, rows, vocabulary, children)
            found.append({name: round(value, 4) for name, value in row.items()})
            print(*(f"{name} {value}" for name, value in found[-1].items()), sep="  ", flush=True)
    settings = {"rows": rows, "children": children, "vocabulary": vocabulary, "seed": 0}
    write(out, "are trees with candidate lists accepted more often?", {"rows": found}, settings=settings)
    return 0


if __name__ == "__main__":
    command(main)
