"""The speculation strategy of one engine step. Plain data, shared by engine, drafters and policies."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Strategy:
    """(drafter, draft depth, top-k, tokens to verify), TLT 5.2. With top_k 1 it is a chain, and tokens_to_verify =
    depth.

    Raises ValueError for a combination that no step can run.
    """

    drafter: str
    depth: int  # longest drafted path, tokens
    top_k: int = 1  # children per expanded node
    tokens_to_verify: int = 0  # drafted nodes per request that the target verifies; 0: the depth

    def __post_init__(self) -> None:
        if self.tokens_to_verify == 0:
            object.__setattr__(self, "tokens_to_verify", self.depth)
        if self.depth < 0 or self.top_k < 1 or (self.depth == 0) != (self.drafter == "none"):
            raise ValueError(f"{self!r}: depth 0 and drafter 'none' go together, and top_k is at least 1")
        if self.top_k == 1 and self.tokens_to_verify != self.depth:
            raise ValueError(f"{self!r}: a chain verifies as many tokens as it is deep")
        if self.tokens_to_verify < self.depth:
            raise ValueError(f"{self!r}: fewer tokens to verify than one path has")

    @property
    def is_tree(self) -> bool:
        return self.top_k > 1

    @property
    def chain(self) -> "Strategy":
        """One path of its depth."""
        return Strategy(self.drafter, self.depth) if self.is_tree else self

    def __str__(self) -> str:
        """`plain`, `suffix:8` (chain of 8) or `eagle:4x2/12` (depth 4, top-k 2, 12 tokens to verify)."""
        if self.depth == 0:
            return "plain"
        tree = f"x{self.top_k}/{self.tokens_to_verify}" if self.is_tree else ""
        return f"{self.drafter}:{self.depth}{tree}"

    @classmethod
    def parse(cls, text: str) -> "Strategy":
        """The inverse of `str`. Raises ValueError."""
        if text == "plain":
            return PLAIN
        drafter, _, shape = text.partition(":")
        depth, cross, tree = shape.partition("x")
        top_k, slash, verify = tree.partition("/")
        try:
            if cross:
                return cls(drafter, int(depth), int(top_k), int(verify) if slash else int(depth) * int(top_k))
            return cls(drafter, int(depth))
        except ValueError as error:
            raise ValueError(f"{text!r} is not a strategy (plain, suffix:8, eagle:4x2/12): {error}") from None


PLAIN = Strategy("none", 0)
