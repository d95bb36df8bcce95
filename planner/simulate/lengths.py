"""Response lengths of simulated prompts. Owns the draws and the readers of measured ones; schedules nothing.

Lognormal: the logarithm of a length is a prompt's part plus a response's, with the given shares of the variance; a
share of runaways gets the limit. Given: a prompt's responses are drawn from those of one measured prompt.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from launch.config.issues import ConfigError, Issue
from planner.simulate.scenario import Lengths

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LognormalDraws:
    options: Lengths
    levels: NDArray[np.float64]  # [pool], of prompts

    @classmethod
    def of(cls, options: Lengths, pool: int, seed: int) -> "LognormalDraws":
        rng = np.random.default_rng([seed, 1])
        own = options.sigma * np.sqrt(options.between) * rng.standard_normal(pool)
        return cls(options, np.log(options.median) + own)

    def lengths(self, prompt: int, count: int, rng: np.random.Generator) -> Ints:
        """Return [count] tokens, from 1 to the limit; `prompt` is below the pool's size. From one state of `rng`, a
        smaller count's lengths are the first of a larger count's, so that comparisons of counts use the same responses.
        """
        options = self.options
        drawn = rng.standard_normal((count, 2))
        found = np.exp(self.levels[prompt] + options.sigma * np.sqrt(1 - options.between) * drawn[:, 0])
        if 0 < options.runaway < 1:
            found[drawn[:, 1] < NormalDist().inv_cdf(options.runaway)] = options.max_tokens
        cut: Ints = np.clip(np.rint(found), 1, options.max_tokens).astype(np.int64)
        return cut


@dataclass(frozen=True, slots=True)
class GivenDraws:
    """Lengths from measured prompts: prompt i is measured prompt i modulo their number. Its lengths are used in order,
    then at random."""

    groups: Sequence[Sequence[int]]
    max_tokens: int

    def lengths(self, prompt: int, count: int, rng: np.random.Generator) -> Ints:
        own = np.asarray(self.groups[prompt % len(self.groups)], np.int64)
        found = own[:count] if len(own) >= count else np.concatenate((own, rng.choice(own, count - len(own))))
        cut: Ints = np.clip(found, 1, self.max_tokens)
        return cut


LengthDraws = LognormalDraws | GivenDraws


def draws_of(options: Lengths, pool: int, per_prompt: int, seed: int) -> LengthDraws:
    """Make the draws. `per_prompt`: responses per prompt, used to split a run's records. Raises
    ConfigError, OSError."""
    if options.given is not None:
        return GivenDraws(options.given, options.max_tokens)
    if options.file is not None:
        return GivenDraws(read_lengths(Path(options.file), per_prompt), options.max_tokens)
    return LognormalDraws.of(options, pool, seed)


def read_lengths(path: Path, per_prompt: int) -> list[list[int]]:
    """Read lengths by prompt, from a run's folder (lengths.jsonl: whole steps, in the order of their prompts) or from
    JSON lines, also gzip-compressed. Lines have `lengths`; or `prompt_id` and `tokens` or `length`; or `samples` or
    `responses`, texts in which four characters count as a token."""
    if path.is_dir():
        path = path / "lengths.jsonl"
    groups: dict[str, list[int]] = {}
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
            key, found = _lengths_in(row, number)
            whole = "step" in row
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError([Issue("lengths.file", f"{path}:{number}: no lengths in this line")]) from None
        for start in range(0, len(found), per_prompt) if whole else ():
            groups[f"{key} {start}"] = found[start : start + per_prompt]
        if not whole:
            groups.setdefault(key, []).extend(found)
    kept = [group for group in groups.values() if group]
    if not kept:
        raise ConfigError([Issue("lengths.file", f"{path} holds no lengths")])
    return kept


def _lengths_in(row: dict[str, object], number: int) -> tuple[str, list[int]]:
    if isinstance(lengths := row.get("lengths"), list):
        return f"line {number}", [max(int(each), 1) for each in lengths]
    if isinstance(texts := row.get("samples", row.get("responses")), list):
        return f"line {number}", [max(len(str(text)) // 4, 1) for text in texts]
    tokens = row["tokens"] if "tokens" in row else row["length"]
    length = len(tokens) if isinstance(tokens, list) else int(str(tokens))
    return str(row.get("prompt_id", row.get("prompt", number))), [max(length, 1)]
