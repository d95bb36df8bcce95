"""Rounds by length in a run (`rollout.rounds`): a round's picks, its race, and the text of postponed groups.

Owns that text. It goes with the same requests in their later round, as a draft that engines check under the weights of
that time. Losing it only costs time. policies.rounds decides the next round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from actors.data import Prompt, PromptOrder, PromptSet
from actors.data.mixture import MixedOrder
from actors.engine.capabilities import BACKENDS
from actors.training.checkpoint import CheckpointError
from config.tree import Config
from contracts.rollout import IntArray
from launch.arrays import read_arrays, write_arrays
from launch.batch import Batch, Pick
from launch.dispatch.early import EarlyTally
from launch.run.collect import Round
from launch.run.race import RaceUnderWay
from policies.rounds import Race, RoundPlan, Rounds, Turn

TEXT_FILE = "put_off.npz"  # in a checkpoint; missing if nothing is postponed
_COLUMNS = ("epoch", "prompt", "sample", "length", "tokens")


@dataclass(slots=True, kw_only=True)
class RoundSampling:
    """The rounds of one run."""

    rounds: Rounds
    prompts: PromptSet
    checked: bool  # engines check early text, so it is kept
    texts: dict[Turn, dict[int, IntArray]] = field(default_factory=dict)  # of postponed groups, by sample

    def picks(self, order: PromptOrder | MixedOrder) -> tuple[RoundPlan, list[Pick]]:
        """Return the next round's plan and picks."""
        plan = self.rounds.plan(order.take(self.rounds.needs))
        return plan, [Pick(epoch, self.prompts[index]) for epoch, index in plan.turns]

    def begin(self, plan: RoundPlan, batch: Batch) -> tuple[Batch, RaceUnderWay | None]:
        """Return the batch with its early text, and its race; None: all groups are trained on."""
        requests = []
        for request in batch.requests:
            index, sample = batch.place(request.request_id)
            text = self.texts.get(plan.turns[index], {}).get(sample)
            requests.append(request if text is None else replace(request, early=text))
        for turn in plan.turns:
            self.texts.pop(turn, None)
        batch = batch.only(requests)
        if not plan.races or plan.mark is None:
            return batch, None
        counts = [len(batch.ids(index)) for index in range(len(batch.picks))]
        return batch, RaceUnderWay(race=Race(counts, plan.keep, plan.mark), batch=batch)

    def settled(self, collected: Round, plan: RoundPlan, batch: Batch, under_way: RaceUnderWay | None) -> Round:
        """Return the round with the groups to train on, in the order of the picks; the others are postponed. Its
        metrics, except `lookahead/*`, depend on token counts only."""
        indices = range(len(batch.picks)) if under_way is None else under_way.race.chosen()
        longest = {i: max((m.rollout.tokens.size for m in collected.groups[i].members), default=0) for i in indices}
        self.rounds.settle(plan, longest, [] if under_way is None else under_way.race.long())
        put_off = 0
        for index in set(range(len(batch.picks))) - set(longest):
            put_off += self._keep(plan.turns[index], index, batch, collected)
        metrics = {
            "rounds/long": float(plan.long),
            "rounds/sampled": float(len(batch.picks)),
            "rounds/longest": float(max(longest.values(), default=0)),
            "rounds/waiting": float(len(self.rounds.put_off)),
            "lookahead/put_off_tokens": float(put_off),
        }
        if plan.mark is not None:
            metrics["rounds/mark"] = float(plan.mark)
        groups = [collected.groups[index] for index in indices]
        tokens = sum(member.rollout.tokens.size for group in groups for member in group.members)
        return replace(
            collected,
            groups=groups,
            counts=[collected.counts[index] for index in indices],
            unfinished={},
            stats=replace(collected.stats, tokens=tokens),
            metrics=collected.metrics | metrics,
        )

    def _keep(self, turn: Turn, index: int, batch: Batch, collected: Round) -> int:
        """Keep the text of a postponed group. Returns its number of tokens."""
        rollouts = [member.rollout for member in collected.groups[index].members]
        rollouts += [collected.unfinished[i] for i in batch.ids(index) if i in collected.unfinished]
        texts = {batch.place(r.request_id)[1]: r.tokens for r in rollouts if len(r.tokens)}
        if self.checked and texts:
            self.texts[turn] = texts
        return sum(len(text) for text in texts.values())


def round_sampling(config: Config, prompts: PromptSet) -> RoundSampling | None:
    """Make the rounds of a run; None if rollout.rounds is off."""
    options, rollout = config.rollout.rounds, config.rollout
    if options.factor is None:
        return None
    rounds = Rounds(
        factor=options.factor,
        quantile=options.quantile,
        window=options.window,
        prompts=len(prompts),
        prompts_per_step=rollout.prompts_per_step,
        steps=config.run.steps,
    )
    draws_anew = rollout.speculation.mode != "off" and rollout.speculation.verification == "rejection"
    checked = BACKENDS[rollout.engine.backend].early_text and not draws_anew
    return RoundSampling(rounds=rounds, prompts=prompts, checked=checked)


def early_metrics(tally: EarlyTally) -> dict[str, float]:
    """Return metrics of postponed prompts' early text; {} if none was checked."""
    if not tally.responses:
        return {}
    return {
        "lookahead/responses": float(tally.responses),
        "lookahead/tokens": float(tally.tokens),
        "lookahead/stood": tally.stood / max(tally.tokens, 1),
        "lookahead/head_start": tally.stood / max(tally.drawn, 1),
        "lookahead/checked_tokens": float(tally.use.checked),
        "lookahead/check_s": tally.use.seconds,
        "lookahead/won_s": tally.use.saved_s,
    }


def write_texts(path: Path, texts: dict[Turn, dict[int, IntArray]]) -> None:
    """Write the texts. Raises OSError."""
    flat = [(*turn, sample, text) for turn, samples in texts.items() for sample, text in samples.items()]
    numbers = {name: np.array([row[i] for row in flat], np.int64) for i, name in enumerate(_COLUMNS[:3])}
    numbers["length"] = np.array([len(text) for *_, text in flat], np.int64)
    tokens = np.concatenate([text for *_, text in flat]) if flat else np.zeros(0, np.int32)
    write_arrays(path, {**numbers, "tokens": tokens.astype(np.int32)})


def read_texts(checkpoint: Path, prompts: Sequence[Prompt]) -> dict[Turn, dict[int, IntArray]]:
    """Read what `write_texts` wrote into a checkpoint, if anything. Raises CheckpointError."""
    path = checkpoint / TEXT_FILE
    if not path.is_file():
        return {}
    try:
        columns: dict[str, Any] = dict(read_arrays(path))
        found: dict[Turn, dict[int, IntArray]] = {}
        ends = np.cumsum(columns["length"])
        for epoch, index, sample, length, end in zip(
            *(columns[name].tolist() for name in _COLUMNS[:4]), ends.tolist(), strict=True
        ):
            if not 0 <= index < len(prompts) or end > len(columns["tokens"]):
                raise ValueError(f"prompt {index}, tokens up to {end}")
            found.setdefault((epoch, index), {})[sample] = columns["tokens"][end - length : end]
        return found
    except (OSError, KeyError, ValueError, IndexError, BadZipFile) as error:
        raise CheckpointError(f"{path}, text of prompts that were put off, cannot be read: {error!r}") from error
