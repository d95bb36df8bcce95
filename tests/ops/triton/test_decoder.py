"""The engine's forward on CUDA, its kernels in the interpreter: with `model.batch_invariant: engine` a row's logits are
bitwise its own, whatever runs beside it and however its prompt was cut."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.engine.native.forward.context import KVCache
from actors.engine.native.forward.decoder import DecoderForward
from actors.engine.native.forward.layout import DeviceStep
from models import ops
from models.ops.triton import LAUNCHES, launch, operators
from models.transformer import Transformer
from tests.engine.support import FAMILIES, tiny_model
from tests.params import long

BLOCKS, BLOCK_TOKENS = 40, 16


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors go to the kernels, as CUDA's would."""
    for name in LAUNCHES:
        if hasattr(launch, name):
            monkeypatch.setattr(operators, name, getattr(launch, name))

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, invariant: bool) -> Tensor:
        assert invariant
        return launch.linear(x, weight, bias, False)

    monkeypatch.setattr(ops, "linear", linear)


class Requests:
    """Requests of given tokens, each with blocks of its own in one cache, computed piece by piece."""

    def __init__(self, model: Transformer, tokens: Sequence[Tensor]) -> None:
        self.model, self.tokens = model, tokens
        self.cache = KVCache(model.config, BLOCKS, BLOCK_TOKENS, model.norm.weight.dtype, "cpu")
        self.width = BLOCKS // len(tokens)
        self.done = [0] * len(tokens)

    def step(self, counts: dict[int, int]) -> dict[int, Tensor]:
        """The logits of the next rows of each request named."""
        pieces, positions, slots, tables = [], [], [], []
        for request, count in counts.items():
            at = torch.arange(self.done[request], self.done[request] + count)
            table = torch.arange(self.width) * len(self.tokens) + request
            pieces.append(self.tokens[request][at])
            positions.append(at)
            slots.append(table[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS)
            tables.append(table.to(torch.int32))
            self.done[request] += count
        most, lengths = max(counts.values()), list(counts.values())
        nothing: Any = torch.zeros(0)
        step = DeviceStep(
            tokens=torch.cat(pieces),
            positions=torch.cat(positions),
            kv_slots=torch.cat(slots),
            query_offsets=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
            context_lens=torch.tensor([self.done[request] for request in counts], dtype=torch.int32),
            block_tables=torch.stack(tables),
            noise_keys=nothing,
            noise_positions=nothing,
            temperature=nothing,
            top_k=None,
            top_p=None,
            sample_rows=None,
            tree_mask=None,
            max_query=most,
            max_context=self.width * BLOCK_TOKENS,
        )
        hidden = DecoderForward(self.model)(step, self.cache)[1]
        logits = launch.linear(hidden, self.model.head_weight, None, True)
        return dict(zip(counts, logits.split(lengths), strict=True))


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", *long(*(one for one in FAMILIES if one != "qwen3"))])
def test_a_row_has_the_same_logits_alone_in_a_batch_and_in_chunks(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    reference = tiny_model(tmp_path, family)
    model = Transformer(reference.config, dtype=dtype)
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            mine.copy_(theirs)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(model.config.vocab_size, (n,), generator=generator) for n in (40, 23)]
    with torch.inference_mode():
        alone = Requests(model, [tokens[0]]).step({0: 40})[0]
        batch = Requests(model, tokens)
        found = [batch.step({0: 17, 1: 1}), batch.step({1: 20}), batch.step({0: 1, 1: 2}), batch.step({0: 22})]
    assert torch.equal(torch.cat([step[0] for step in found if 0 in step]), alone)
    if dtype is torch.float32:
        from models.packed import PackedContext

        expected = reference.logits(reference(tokens[0], PackedContext.from_lengths([40])))
        torch.testing.assert_close(alone, expected, atol=2e-4, rtol=2e-4)
