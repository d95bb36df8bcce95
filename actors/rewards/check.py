"""Finds the faults of a `reward:` section before a run. Owns the rules that need the user's functions, which it imports
in a child process; no Ray, no torch.
"""

from collections.abc import Iterator

from actors.rewards.calling import Traits
from actors.rewards.child import DeadlineChild
from actors.rewards.lanes import traits_of
from config.rewards import RewardOptions, RewardTerm
from contracts.rewards import RewardConfigError

_BY_LENGTH = ("tokens", "finish_reason", "group")  # values that change if a response is stopped behind its answer


def check_reward(options: RewardOptions, *, early_ends: bool = False) -> list[tuple[str, str]]:
    """Return (key below `reward`, fault and remedy) of every term that a reward worker could not make. `early_ends`:
    rollout.abort is enabled."""
    child, faults = DeadlineChild("signature"), list[tuple[str, str]]()
    try:
        for index, term in enumerate(options.terms):
            if term.kind != "python":
                continue  # nothing to import; the configuration checks the rest
            try:
                traits = traits_of(child, term, f"reward.terms[{index}]")
            except RewardConfigError as error:
                said = str(error).removeprefix(f"reward.terms[{index}].function=")
                faults.append((f"terms.{index}.function", said))
                continue
            faults += [(f"terms.{index}.{key}", said) for key, said in _faults(term, traits, early_ends)]
    finally:
        child.close()
    return faults


def _faults(term: RewardTerm, traits: Traits, early_ends: bool) -> Iterator[tuple[str, str]]:
    if early_ends and (read := [name for name in _BY_LENGTH if name in traits.asks]):
        yield (
            "function",
            f"{term.function} asks for {', '.join(read)}, which rollout.abort changes by ending responses behind their "
            "answer; leave it out, or set rollout.abort={}",
        )
    if "group" in traits.asks and term.batch_size is not None and term.batch_size > 1:
        yield (
            "batch_size",
            f"{term.batch_size}, but {term.function} asks for its group, so its lists are one prompt's; set it to 1",
        )
    if term.concurrency != type(term).model_fields["concurrency"].default and not traits.awaited:
        yield "concurrency", f"{term.function} is not async, so it has one call at a time; leave it out"
