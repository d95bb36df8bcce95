"""The expansion of temperature, top-k and top-p to draft positions, and the other kernels of the rejection sampler."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.engine.vllm.patches import expand, expands_rightly, mend_expansion, mend_worker
from tests.vllm.support import VLLM, RawEngine, expansion_of_the_wheel, tiny_checkpoint, wheel_is_wrong


def test_our_expansion_answers_rightly() -> None:
    assert expands_rightly(expand)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64])
def test_our_expansion_keeps_the_dtype_and_skips_requests_without_drafts(dtype: torch.dtype) -> None:
    out = expand(torch.tensor([3, 0, 7], dtype=dtype), torch.tensor([1, 1, 3]), 3, 7, 5)
    assert out.dtype == dtype
    assert out.tolist() == [3, 5, 5]
    assert expand(torch.tensor([3], dtype=dtype), torch.tensor([0], dtype=torch.int32), 0).shape == (0,)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, cu, n, old=0, new=0: x.new_zeros(n),
        lambda x, cu, n, old=0, new=0: expand(x.long(), cu, n, old, new).to(x.dtype),  # truncates floats
        lambda x, cu, n, old=0, new=0: expand(x, cu, n),  # replaces nothing
        lambda x, cu, n, old=0, new=0: expand(x, cu, n, old, new).roll(1),
        lambda x, cu, n, old=0, new=0: expand(x, cu, n, old, new) if x.dtype != torch.int32 else x.new_zeros(n),
    ],
    ids=["nothing written", "through int64", "nothing replaced", "off by one", "int32 only"],
)
def test_wrong_expansions_are_told(wrong: Any) -> None:
    assert not expands_rightly(wrong)


@pytest.fixture
def rejection_sampler() -> Iterator[Any]:
    """vLLM's module with its kernels installed as a worker installs them, unmended; put back afterwards."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    from vllm.v1.sample import rejection_sampler

    kept = rejection_sampler.expand_batch_to_tokens
    yield rejection_sampler
    rejection_sampler.expand_batch_to_tokens = kept


class TestInstalled:
    pytestmark = VLLM

    def test_a_wrong_function_is_replaced_everywhere_and_once(self, rejection_sampler: Any) -> None:
        rejection_sampler.expand_batch_to_tokens = wrong = lambda x, cu, n, old=0, new=0: x.new_zeros(n)
        importer = sys.modules["vllm.importer"] = ModuleType("vllm.importer")
        importer.under_another_name = wrong  # type: ignore[attr-defined]
        try:
            assert mend_expansion()
            assert not mend_expansion()
        finally:
            del sys.modules["vllm.importer"]
        assert rejection_sampler.expand_batch_to_tokens is expand
        assert importer.under_another_name is expand

    def test_a_right_function_is_left_alone(self, rejection_sampler: Any) -> None:
        def right(*args: Any, **kwargs: Any) -> Tensor:
            return expand(*args, **kwargs)

        rejection_sampler.expand_batch_to_tokens = right
        assert not mend_expansion()
        assert rejection_sampler.expand_batch_to_tokens is right

    def test_this_wheel_answers_as_we_say_upstream(self, rejection_sampler: Any) -> None:
        """When this fails on a newer wheel, say in docs/howto/vllm.md that it needs no mend."""
        rejection_sampler.expand_batch_to_tokens = expansion_of_the_wheel()
        assert mend_expansion() == wheel_is_wrong()

    def test_a_worker_is_mended_once_on_its_device(self, rejection_sampler: Any) -> None:
        class Runner:
            def _bookkeeping_sync(self) -> None: ...

        class Worker:
            device, model_runner = torch.device("cpu"), Runner()

        rejection_sampler.expand_batch_to_tokens = lambda x, cu, n, old=0, new=0: x.new_zeros(n)
        assert len(mend_worker(Worker())) == 2
        assert mend_worker(Worker()) == []


@pytest.mark.slow
class TestPromptInParts:
    pytestmark = VLLM

    def test_a_seeded_request_draws_the_same_in_one_part_and_in_three(self, tmp_path: Path) -> None:
        """Ends the engine without the mend."""
        directory, _ = tiny_checkpoint(tmp_path)
        prompt = list(range(50))
        drawn = []
        for tokens in (128, 20):
            engine = RawEngine(directory, max_num_batched_tokens=tokens, max_num_seqs=8, enable_prefix_caching=False)
            try:
                engine.core.collective_rpc(mend_worker)
                engine.add("long", prompt, 8, temperature=1.0, seed=3)
                engine.add("short", prompt[:3], 8, temperature=1.0, seed=4)
                drawn.append({name: one.tokens for name, one in engine.run().items()})
            finally:
                engine.close()
        assert drawn[0] == drawn[1]


# Drafts of four requests: none, all right, wrong at the second place, wrong at once.
COUNTS, VOCAB = [0, 3, 3, 2], 7
RIGHT = [1, 2, 3, 4, 5, 6, 0, 1]
DRAFTS = [1, 2, 3, 4, 0, 6, 5, 1]
BONUS = [6, 5, 4, 3]
EXPECTED = [[6, -1, -1, -1], [1, 2, 3, 5], [4, 5, -1, -1], [0, -1, -1, -1]]


class TestKernels:
    """Each kernel of the rejection sampler, as vLLM launches it, against answers by hand, in both integer dtypes."""

    pytestmark = VLLM

    @staticmethod
    def integers(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """cumulative counts, drafts, bonus tokens"""
        return (
            torch.tensor(COUNTS, dtype=dtype).cumsum(0, dtype=dtype),
            torch.tensor(DRAFTS, dtype=dtype),
            torch.tensor(BONUS, dtype=dtype)[:, None],
        )

    @pytest.mark.parametrize("out", [torch.int32, torch.int64])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    def test_greedy_verification(self, rejection_sampler: Any, dtype: torch.dtype, out: torch.dtype) -> None:
        cu, drafts, bonus = self.integers(dtype)
        for greedy in (None, torch.ones(4, dtype=torch.bool)):
            tokens = torch.full((4, 4), -1, dtype=out)
            rejection_sampler._rejection_greedy_sample(
                tokens, cu, drafts, torch.tensor(RIGHT, dtype=dtype), bonus, greedy, 3, None, None
            )
            assert tokens.tolist() == EXPECTED

    @pytest.mark.parametrize("out", [torch.int32, torch.int64])
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("with_draft_probs", [False, True])
    def test_random_verification(
        self, rejection_sampler: Any, with_draft_probs: bool, dtype: torch.dtype, out: torch.dtype
    ) -> None:
        """p(right token) = 1: right drafts stand and wrong ones fall, whatever the uniforms; row 3 is greedy: left."""
        cu, drafts, bonus = self.integers(dtype)
        target = torch.nn.functional.one_hot(torch.tensor(RIGHT), VOCAB).float()
        draft = torch.nn.functional.one_hot(torch.tensor(DRAFTS), VOCAB).float() if with_draft_probs else None
        greedy = torch.tensor([False, False, False, True])
        tokens = torch.full((4, 4), -1, dtype=out)
        rejection_sampler._rejection_random_sample(
            tokens, cu, drafts, draft, target, bonus, torch.tensor(RIGHT, dtype=dtype),
            torch.rand(8, dtype=torch.float64), greedy, 3, None,
        )  # fmt: skip
        assert tokens.tolist() == [*EXPECTED[:3], [-1] * 4]

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("noise", [torch.float32, torch.float64])
    @pytest.mark.parametrize("with_draft_probs", [False, True])
    def test_recovered_tokens(
        self, rejection_sampler: Any, with_draft_probs: bool, noise: torch.dtype, dtype: torch.dtype
    ) -> None:
        """The argmax of what is left of p, times the request's noise; [tokens] in the drafts' dtype."""
        cu, drafts, _ = self.integers(dtype)
        generator = torch.Generator().manual_seed(0)
        target = torch.rand(8, VOCAB, generator=generator).softmax(-1)
        draft = torch.rand(8, VOCAB, generator=generator).softmax(-1) if with_draft_probs else None
        inv_q = torch.rand(4, VOCAB, generator=generator, dtype=noise) + 0.1
        tokens = torch.empty_like(drafts)
        rejection_sampler._sample_recovered_tokens(tokens, cu, drafts, draft, target, inv_q, max_spec_len=3)
        left = target.scatter(1, torch.tensor(DRAFTS)[:, None], 0.0) if draft is None else (target - draft).clamp(min=0)
        rows = torch.arange(4).repeat_interleave(torch.tensor(COUNTS))
        assert tokens.tolist() == (left * inv_q[rows]).argmax(-1).tolist()
        assert tokens.dtype == dtype
