"""Texts of groups that several workers sample: each worker's drafters receive what the others have reported so far.

Owns what was sent to whom. Messages only save time: one that cannot be sent now is made up for by the next.
"""

from collections.abc import Iterator, Sequence

from actors.context import Context
from contracts.engine import SiblingText
from contracts.rollout import IntArray
from launch.dispatch.ledger import Ledger

MOST_TOKENS = 1 << 16  # of one message, 4 bytes each; the rest is due with the next
PERIOD_S = 0.05  # at least, between two messages to a worker


class Siblings:
    """The split groups of one run. A text goes to a worker once, in parts, in order."""

    def __init__(self, ledger: Ledger, context: Context) -> None:
        self._ledger, self._context = ledger, context
        self._sent: dict[tuple[str, int], int] = {}  # tokens, by worker and request
        self._due: dict[str, dict[int, None]] = {}  # requests with tokens that the worker has not, in order
        self._ended: dict[int, tuple[int, IntArray]] = {}  # requests that have ended: prompt and tokens
        self._next_s: dict[str, float] = {}  # when a worker may get its next message

    def progressed(self, worker: str, request_id: int) -> None:
        """`worker` has reported tokens of the request."""
        if (prompt_id := self._ledger.shared_prompt(request_id)) is None:
            return
        for other in self._ledger.holders(prompt_id):
            if other != worker:
                self._due.setdefault(other, {})[request_id] = None

    def ended(self, worker: str, request_id: int, prompt_id: int, tokens: IntArray) -> None:
        """The request has ended with these tokens on `worker`."""
        for other in self._ledger.holders(prompt_id):
            if other != worker:
                self._due.setdefault(other, {})[request_id] = None
                self._ended[request_id] = (prompt_id, tokens)

    def assigned(self, worker: str, prompt_ids: Sequence[int]) -> None:
        """`worker` gets requests of these prompts."""
        for prompt_id in dict.fromkeys(prompt_ids):
            for other in self._ledger.holders(prompt_id):
                if other != worker:
                    for request_id in self._ledger.begun(other, prompt_id):
                        self._due.setdefault(worker, {})[request_id] = None

    def due(self) -> Iterator[tuple[str, list[SiblingText]]]:
        """Yield what is due to workers that may get a message now. It stays due until `sent`."""
        if not self._due:
            return
        now_s = self._context.clock()
        for worker in [name for name in self._due if self._next_s.get(name, now_s) <= now_s]:
            texts, left = list[SiblingText](), MOST_TOKENS
            for request_id in list(self._due[worker]):
                if not left:
                    break
                text = self._text(worker, request_id, left)
                if text is None:
                    del self._due[worker][request_id]
                else:
                    texts.append(text)
                    left -= len(text.tokens)
            if texts:
                yield worker, texts
            else:
                del self._due[worker]

    def sent(self, worker: str, texts: Sequence[SiblingText]) -> None:
        """`texts`, the last ones of `due`, are under way to the worker. What did not fit stays due."""
        due = self._due[worker]
        for text in texts:
            self._sent[worker, text.request_id] = text.first + len(text.tokens)
            del due[text.request_id]
        if sum(len(text.tokens) for text in texts) == MOST_TOKENS:  # a part of the last one may be left
            self._due[worker] = {texts[-1].request_id: None} | due
        elif not due:
            del self._due[worker]
        self._next_s[worker] = self._context.clock() + PERIOD_S

    def _text(self, worker: str, request_id: int, most: int) -> SiblingText | None:
        """Return at most `most` tokens that the worker has not; None: there are none."""
        first = self._sent.get((worker, request_id), 0)
        if request_id in self._ended:
            prompt_id, tokens = self._ended[request_id]
            tokens = tokens[first:]
        elif (prompt := self._ledger.shared_prompt(request_id)) is not None:
            prompt_id, tokens = prompt, self._ledger.tail(request_id, first)
        else:
            return None
        tokens = tokens[:most]
        return SiblingText(prompt_id, request_id, first, tokens, self._context.wall()) if len(tokens) else None
