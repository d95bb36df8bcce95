"""What an engine has been told of siblings under way on other workers: held until a request of their prompt runs.

Owns the texts that no drafter has yet, and the counts of what was received. Never drafts.
"""

from collections import defaultdict
from collections.abc import Iterable

from contracts.engine import SiblingText

MOST_TOKENS = 1 << 18  # held for prompts that have no slot yet; further texts are dropped


class SiblingTexts:
    """Texts by prompt, in the order in which they came."""

    def __init__(self) -> None:
        self._held: defaultdict[int, list[SiblingText]] = defaultdict(list)
        self._tokens = 0
        self.heard_tokens, self.delay_s = 0, 0.0  # since `take`

    def count(self, texts: Iterable[SiblingText], now_s: float) -> None:
        """Count texts that have arrived at `now_s` (wall clock)."""
        for text in texts:
            self.heard_tokens += len(text.tokens)
            self.delay_s += max(now_s - text.reported_s, 0.0) * len(text.tokens)

    def take(self) -> tuple[int, float]:
        """Return the tokens counted since the last call, and the sum of their delays in seconds."""
        counted = self.heard_tokens, self.delay_s
        self.heard_tokens, self.delay_s = 0, 0.0
        return counted

    def hold(self, text: SiblingText) -> None:
        """Keep the text until `of` asks for its prompt."""
        if self._tokens + len(text.tokens) <= MOST_TOKENS:
            self._held[text.prompt_id].append(text)
            self._tokens += len(text.tokens)

    def of(self, prompt_id: int) -> list[SiblingText]:
        """Return the prompt's texts, and hold them no longer."""
        found = self._held.pop(prompt_id, []) if self._held else []
        self._tokens -= sum(len(text.tokens) for text in found)
        return found

    def clear(self) -> None:
        self._held.clear()
        self._tokens = 0
