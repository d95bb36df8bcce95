"""Users' own drafters (`rollout.speculation.drafters`). Owns the import, and the checks of their results.

An engine checks every draft anyway, and never takes a token that its target would not have drawn. These checks only
give a mistake a name: the engine switches off a drafter that raises, with an event that has this message.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from config.import_path import OwnCodeError, described, imported
from config.speculation import OwnDrafterOptions
from config.strategy import Strategy
from drafter.protocol import BatchView, Drafter, Drafts

_METHODS = ("begin", "end", "propose", "new_target", "remember", "save", "load")


class OwnDrafter(Drafter):
    """A Drafter around the user's object: the same calls, checked drafts, and a folder of its own for its state."""

    def __init__(self, options: OwnDrafterOptions, slots: int, max_tokens: int) -> None:
        """Make the object: function(slots=..., max_tokens=..., **arguments), for a history of [slots, max_tokens].
        Raises OwnCodeError."""
        self.name, self._path = options.name, options.function
        made = imported(options.function, f"rollout.speculation.drafters, {options.name}")
        try:
            self._own: Drafter = made(slots=slots, max_tokens=max_tokens, **options.arguments)
        except Exception as error:  # the user's code may raise anything
            raise self._fault(f"cannot be made with slots and max_tokens: {described(error)}") from error
        if missing := [name for name in _METHODS if not callable(getattr(self._own, name, None))]:
            raise self._fault(
                f"lacks {', '.join(missing)}: derive it from paceline.extend.Drafter, where all but propose do nothing"
            )
        self.needs_hidden = bool(getattr(self._own, "needs_hidden", False))

    def begin(self, slot: int, prompt_tokens: NDArray[np.int32], response_tokens: NDArray[np.int32]) -> None:
        """See Drafter.begin."""
        self._own.begin(slot, prompt_tokens, response_tokens)

    def end(self, slot: int, tokens: NDArray[np.int32], prompt_length: int, finished: bool) -> None:
        """See Drafter.end."""
        self._own.end(slot, tokens, prompt_length, finished)

    def propose(self, batch: BatchView, strategy: Strategy) -> Drafts:
        """See Drafter.propose. Raises OwnCodeError for drafts of another form than specified."""
        try:
            drafts: object = self._own.propose(batch, strategy)
        except Exception as error:  # the user's code may raise anything
            raise self._fault(f"raised in propose: {described(error)}") from error
        if not isinstance(drafts, Drafts):
            raise self._fault(f"proposed {type(drafts).__name__}, not Drafts")
        requests, tokens, counts = len(batch.slots), drafts.tokens, drafts.counts
        for name, values, rank in (("tokens", tokens, 2), ("counts", counts, 1)):
            if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.ndim != rank:
                raise self._fault(f"proposed {name} that are no integer array of {rank} dimension(s)")
            if len(values) != requests:
                raise self._fault(f"proposed {name} for {len(values)} of {requests} requests")
        if ((counts < 0) | (counts > tokens.shape[1])).any():
            raise self._fault(f"proposed counts outside of 0 to {tokens.shape[1]}, the width of its tokens")
        drafted = np.arange(tokens.shape[1]) < counts[:, None]
        if (wrong := drafted & ((tokens < 0) | (tokens >= batch.vocab_size))).any():
            raise self._fault(f"proposed token {int(tokens[wrong][0])}; the vocabulary has {batch.vocab_size}")
        return drafts

    def new_target(self, version: int) -> None:
        """See Drafter.new_target."""
        self._own.new_target(version)

    def remember(self, prompts: list[NDArray[np.int32]], responses: list[NDArray[np.int32]]) -> None:
        """See Drafter.remember."""
        self._own.remember(prompts, responses)

    def save(self, directory: str) -> None:
        """See Drafter.save; writes to a separate folder, which exists."""
        own = Path(directory) / self.name
        own.mkdir(parents=True, exist_ok=True)
        self._own.save(str(own))
        if not any(own.iterdir()):
            own.rmdir()

    def load(self, directory: str) -> None:
        """See Drafter.load; called only if `save` wrote something."""
        if (own := Path(directory) / self.name).is_dir():
            self._own.load(str(own))

    def _fault(self, said: str) -> OwnCodeError:
        return OwnCodeError(f"rollout.speculation.drafters, {self.name}: {self._path} {said}")


def build_own(
    options: Iterable[OwnDrafterOptions], wanted: Iterable[str], slots: int, max_tokens: int
) -> dict[str, Drafter]:
    """Make the user's drafters that are `wanted`, by name, for a history of [slots, max_tokens]. Raises
    OwnCodeError."""
    names = set(wanted)
    return {one.name: OwnDrafter(one, slots, max_tokens) for one in options if one.name in names}


def try_drafter(name: str, function: str, arguments: dict[str, Any]) -> None:
    """Make the drafter, and let it draft once for two requests. Raises OwnCodeError."""
    drafter = OwnDrafter(OwnDrafterOptions(name=name, function=function, arguments=arguments), 4, 64)
    history = np.zeros((4, 64), np.int32)
    history[:2, :8] = np.array([[3, 5, 7, 3, 5, 7, 3, 5], [2, 2, 2, 2, 2, 2, 2, 2]])
    try:
        drafter.new_target(0)
        for slot in range(2):
            drafter.begin(slot, history[slot, :5], history[slot, 5:8])
        batch = _batch(history)
        if not drafter.needs_hidden:  # there is no target here to compute hidden states
            drafter.propose(batch, Strategy(name, 3))
        for slot in range(2):
            drafter.end(slot, history[slot, :8], 5, True)
    except OwnCodeError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise OwnCodeError(f"rollout.speculation.drafters, {name}: {function} raised {described(error)}") from error


def _batch(history: NDArray[np.int32]) -> BatchView:
    two = np.array([0, 1])
    return BatchView(
        request_ids=two,
        prompt_ids=two,
        slots=two,
        history=history,
        lengths=np.array([8, 8]),
        prompt_lengths=np.array([5, 5]),
        noise_keys=two,
        temperatures=np.ones(2, np.float32),
        vocab_size=16,
        top_k=np.zeros(2, np.int64),
        top_p=np.ones(2, np.float32),
        room=np.array([8, 8]),
    )
