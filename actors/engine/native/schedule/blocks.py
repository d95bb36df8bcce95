"""Reference counts of KV blocks, and the free list. Never touches a tensor."""


class BlockPool:
    """`total` blocks with reference counts. A block is free exactly when its count is 0."""

    def __init__(self, total: int) -> None:
        self._references = [0] * total
        self._free = list(range(total - 1, -1, -1))  # a stack: the block used last is the warmest in the CPU's cache

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one reference. Raises MemoryError if there are fewer."""
        if count > len(self._free):
            raise MemoryError(f"{count} KV blocks asked for, {len(self._free)} free: callers must check `free` first")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """Add one reference to each block, all of which must be in use."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"KV block {block} is free and cannot be shared")
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drop one reference from each block; those that reach 0 become free."""
        for block in blocks:
            if self._references[block] == 0:
                raise ValueError(f"KV block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
