"""Convert a vLLM step's schedule and draws to the arrays of `actors.engine.batch`.

vLLM has already applied its accept rule: of K verified drafts it returns the accepted ones and one more token. They are
laid out in K + 1 places per request, with -1 for the rest. Our own accept rule then gives the same result, since a
token that follows a rejected draft differs from that draft.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.engine.batch.plan import StepPlan
from actors.engine.batch.step.types import Float32Array, Int64Array, Settled, StepDrafts

_NOTHING = Settled(new_tokens=0, ended=[], due=[])


@dataclass(slots=True, kw_only=True)
class ReadStep:
    """One step: R requests, of which S drew tokens, in N places."""

    plan: StepPlan
    sampled: list[str]  # [S], vLLM's names of the requests that drew
    tokens: Int64Array  # [N]
    logprobs: Float32Array  # [N]
    rows: Int64Array  # [S], number of places
    drafts: StepDrafts | None  # the verified drafts
    settled: Settled = field(default=_NOTHING)


def read_decoding(plan: StepPlan, names: list[str], output: Any) -> ReadStep:
    """Read a step in which the requests of `plan`, vLLM's `names`, decoded one token each, with no other work."""
    index, drawn = output.req_id_to_index, output.sampled_token_ids
    places = [index[name] for name in names]
    return ReadStep(
        plan=plan,
        sampled=names,
        tokens=np.array([drawn[place][0] for place in places], np.int64),
        logprobs=output.logprobs.logprobs[places, 0],
        rows=plan.rows,
        drafts=None,
    )


def read_step(scheduled: Any, output: Any, slot_of: Callable[[str], int]) -> ReadStep:
    """Read any step from vLLM's SchedulerOutput and ModelRunnerOutput."""
    computed: Mapping[str, int] = scheduled.num_scheduled_tokens
    verified: Mapping[str, list[int]] = scheduled.scheduled_spec_decode_tokens
    index: Mapping[str, int] = output.req_id_to_index
    drawn: list[list[int]] = output.sampled_token_ids or [[]] * len(index)
    names = list(computed)
    lists = [drawn[index[name]] for name in names]
    samples = np.array([bool(tokens) for tokens in lists], np.bool_)
    sampled = [name for name, tokens in zip(names, lists, strict=True) if tokens]
    drafted = np.array([len(verified.get(name, ())) for name in names], np.int64) if verified else None
    rows = np.array(list(computed.values()), np.int64)
    if drafted is not None:
        rows -= drafted
    prompts = rows[(rows > 1) | ~samples]
    plan = StepPlan(np.array([slot_of(n) for n in names], np.int64), rows, samples, [], int(prompts.sum()))
    places = [index[name] for name in sampled]
    first = output.logprobs.cu_num_generated_tokens if sampled else None
    starts = places if first is None else [first[place] for place in places]
    column = output.logprobs.logprobs[:, 0] if sampled else np.zeros(0, np.float32)
    if drafted is None:
        tokens = np.array([tokens[0] for tokens in lists if tokens], np.int64)
        return ReadStep(
            plan=plan,
            sampled=sampled,
            tokens=tokens,
            logprobs=column[starts].astype(np.float32),
            rows=np.ones(len(sampled), np.int64),
            drafts=None,
        )
    chains = [verified.get(name, []) for name in sampled]
    width = max(map(len, chains), default=0)
    flat: list[int] = []
    source: list[int] = []
    table: list[list[int]] = []
    for name, chain, start in zip(sampled, chains, starts, strict=True):
        tokens_of = drawn[index[name]]
        missing = len(chain) + 1 - len(tokens_of)
        flat += tokens_of + [-1] * missing
        source += [*range(start, start + len(tokens_of)), *[start] * missing]
        row = chain + [-1] * (width - len(chain))
        if missing:  # the last token is no draft, even if rounding makes it look like one
            row[len(tokens_of) - 1] = -1
        table.append(row)
    drafts = StepDrafts(
        counts=drafted,
        tokens=np.array(table, np.int64).reshape(len(sampled), width),
        drafted=int(drafted.sum()),
    )
    return ReadStep(
        plan=plan,
        sampled=sampled,
        tokens=np.array(flat, np.int64),
        logprobs=column[source].astype(np.float32),
        rows=drafted[samples] + 1,
        drafts=drafts,
    )
