"""Prompts with cached K/V, so that n rollouts of one prompt cost one prefill. Never touches a tensor.

The first request of a prompt (the writer) prefills it in its own blocks, to which the entry holds a reference. Later
requests share the full blocks before the last prompt token and copy the rest of the last, partial block. They compute
the last prompt token themselves: its logits give their first draw. The writer writes its response behind the copied
part of the partial block, which no other request reads.
"""

from actors.engine.batch.plan import PromptEntry, PromptKey
from actors.engine.native.schedule.blocks import BlockPool


class PromptCache:
    """Entries by prompt, least recently used first. Every entry may be evicted at any time (blocks are counted)."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._entries: dict[PromptKey, PromptEntry] = {}

    def get(self, key: PromptKey) -> PromptEntry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._entries[key] = entry
        return entry

    def add(self, key: PromptKey, entry: PromptEntry) -> None:
        self._pool.share(entry.blocks)
        self._entries[key] = entry

    def drop(self, key: PromptKey) -> PromptEntry | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._pool.release(entry.blocks)
        return entry

    def evict_one(self, keep: PromptEntry | None) -> bool:
        """Drop the least recently used entry that is complete and not `keep`; False if there is none."""
        for key, entry in self._entries.items():
            if entry.ready and entry is not keep:
                self.drop(key)
                return True
        return False

    def clear(self) -> None:
        for key in list(self._entries):
            self.drop(key)
