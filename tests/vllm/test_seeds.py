"""Seeds of vLLM's requests: functions of noise key and prefix length, all different, all that vLLM takes."""

from pathlib import Path

import numpy as np
import pytest

from actors.engine.vllm.seeds import seed_of
from models.noise import noise_key
from tests.vllm.support import VLLM, RawEngine, tiny_checkpoint


def test_seeds_are_fixed_for_good() -> None:
    """A change here changes every sampled run on vLLM."""
    expected = [1088235620404526857, 8119521485933073504, 5697071294044992186, 4473861399104996405]
    assert [seed_of(0, 0), seed_of(1, 0), seed_of(0, 1), seed_of(2**63 - 1, 1000)] == expected


def test_seeds_differ_by_key_and_by_prefix_length_in_the_bits_that_cpus_read() -> None:
    seeds = [seed_of(noise_key(0, 0, prompt, 0), known) for prompt in range(100) for known in range(50)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == len(seeds)


@pytest.mark.slow
class TestInVllm:
    pytestmark = VLLM

    def test_noise_depends_on_the_seed_alone_and_does_not_repeat_behind_a_prefix(self, tmp_path: Path) -> None:
        """A nearly uniform model: tokens show the noise. Equal draws of independent noise are one in 500."""
        vocab, count, length = 500, 32, 12
        directory, _ = tiny_checkpoint(tmp_path, vocab_size=vocab, initializer_range=0.01)
        engine = RawEngine(directory)
        try:
            prompt = np.arange(5)
            keys = [noise_key(0, 0, 0, sample) for sample in range(count)]
            responses: dict[str, dict[int, list[int]]] = {}
            for name, known, order, seeded_at in (
                ("whole", 0, keys, 0),
                ("again", 0, keys[::-1], 0),
                ("re-issued", 4, keys, 4),
                ("same seed", 4, keys, 0),
            ):
                for key in order:
                    prefix = responses["whole"][key][:known] if known else []
                    seed = seed_of(key, seeded_at)
                    engine.add(f"{key}", [*prompt, *prefix], length - known, temperature=1.0, seed=seed)
                drawn = engine.run()
                responses[name] = {key: drawn[f"{key}"].tokens for key in keys}
        finally:
            engine.close()
        assert responses["again"] == responses["whole"]
        whole = np.array([responses["whole"][key] for key in keys])
        behind = np.array([responses["re-issued"][key] for key in keys])
        assert (behind == whole[:, :8]).mean() < 0.03, "the first noise was drawn once more"
        assert (np.array([responses["same seed"][key] for key in keys]) == whole[:, :8]).mean() > 0.5
        assert (behind == whole[:, 4:]).mean() < 0.03
        assert (whole == np.roll(whole, 1, axis=0)).mean() < 0.03, "different keys draw alike"
