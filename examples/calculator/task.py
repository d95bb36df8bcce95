"""The task "calculator": what is 37 * 46 - 12? A model that calls the calculator and copies its result is right.

Owns the problems, the tool, the wording and the words of the tokenizer. `calculate` is the tool that
`environment.tools` names: a plain function. Never touches files or global randomness.
"""

import ast
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from examples.words import EOS, PAD, UNK

SIGNS: dict[str, Callable[[int, int], int]] = {" + ": operator.add, " - ": operator.sub, " * ": operator.mul}
CALL, CALLED = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'
WORDS = (
    *("what is ", "?", *SIGNS, *"0123456789", "-"),
    *(CALL, CALLED, "\n<tool_response>\n", "\n</tool_response>\n", "error: ", "\\boxed{", "}"),
)
_NODES: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def calculate(expression: str) -> int:
    """The value of an expression of whole numbers with +, - and *."""

    def value(node: ast.expr) -> int:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _NODES:
                return _NODES[type(op)](value(left), value(right))
            case ast.Constant(value=int(number)):
                return number
        raise ValueError("only whole numbers, +, - and *")

    if len(expression) > 100:
        raise ValueError("too long")
    return value(ast.parse(expression, mode="eval").body)


@dataclass(frozen=True, slots=True)
class Problem:
    """Numbers with signs between them; * goes before + and -."""

    numbers: tuple[int, ...]
    signs: tuple[str, ...]

    @property
    def expression(self) -> str:
        return "".join(
            map(str, (self.numbers[0], *(f"{s}{n}" for s, n in zip(self.signs, self.numbers[1:], strict=True))))
        )

    @property
    def answer(self) -> int:
        return calculate(self.expression)

    @property
    def prompt(self) -> str:
        return f"what is {self.expression}?"


def problem(rng: random.Random) -> Problem:
    """Draw three numbers of one or two digits, with at most one *, so that the value has at most four digits."""
    signs = rng.choices((" + ", " - "), k=2)
    if rng.random() < 0.5:
        signs[rng.randrange(2)] = " * "
    return Problem(tuple(rng.randint(1, 99) for _ in range(3)), tuple(signs))


@dataclass(frozen=True, slots=True)
class Habits:
    """The behaviour of demonstrations: they use the calculator, but carelessly. RL can improve that."""

    guess: float = 0.45  # probability of an answer without a call
    hasty: float = 0.3  # in a call: probability of leaving out the last number


def demonstrate(of: Problem, habits: Habits, rng: random.Random) -> Sequence[str | list[dict[str, str]]]:
    """Return a response as alternating turns and observations."""
    if rng.random() < habits.guess:
        return [f"\\boxed{{{rng.randint(0, 9999)}}}"]
    asked = Problem(of.numbers[:-1], of.signs[:-1]) if rng.random() < habits.hasty else of
    return [
        f"{CALL}{asked.expression}{CALLED}",
        [{"role": "tool", "content": str(asked.answer)}],
        f"\\boxed{{{asked.answer}}}",
    ]


def vocabulary() -> list[str]:
    """Return the words in the order of their ids: special tokens, words, and reserved ones to fill up."""
    words = [PAD, EOS, UNK, *WORDS]
    return words + [f"<reserved_{i}>" for i in range(-len(words) % 8)]
