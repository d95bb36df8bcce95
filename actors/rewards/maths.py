r"""The `math` term: whether the response's answer equals the gold answer.

Owns where an answer is read, and when algebra is asked. Everything that `equal_fast` cannot decide goes to
`math-verify`, in a child process with a deadline. Reads no answer from the prompt, and never judges the reasoning.

The answer is the content of the last nonempty \boxed{...}, after the end of the thinking part if there is one; boxes
joined by commas or "and" are one answer. `answer: first` reads the first instead. Without a box there is no answer,
except with `fallback`: `gsm8k` reads the last `#### ...` line, `answer_line` the last `Answer: ...` line, `last_number`
the last number of the response. actors.rewards.gold reads the gold answer.
"""

import re
from fractions import Fraction

from actors.rewards.algebra import approximated, in_radians, question
from actors.rewards.boxed import final_part, first_boxed, last_boxed, thinks
from actors.rewards.child import ChildDiedError, ChildTimeoutError, DeadlineChild
from actors.rewards.equality import equal_fast, is_certain, is_text, listed
from actors.rewards.gold import UnreadableGoldError, gold_answer, last_hashes
from actors.rewards.markup import MAX_CHARS, tidy
from actors.rewards.numerals import amount
from actors.rewards.relations import joined_words
from config.rewards import RewardTerm
from contracts.rewards import BadRecordError, GradeItem, GradingError, Score

_LAST_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:\s?\\?%)?")
_KEPT_GOLDS, _MOST_MEMBERS = 65_536, 8
_ANSWER_LINE = re.compile(r"answer[*\s]*(?:is\s*)?:[ \t*]*([^\n]*)", re.IGNORECASE)


def read_answer(response: str, fallback: str, which: str = "last", *, thinking: bool = False) -> str | None:
    """Return the answer of a response; None if it has none. `which`: the "last" box or the "first". `thinking`: see
    first_boxed."""
    answer = last_boxed(response) if which == "last" else first_boxed(response, thinking=thinking)
    return answer or unmarked_answer(response, fallback)


def unmarked_answer(response: str, fallback: str) -> str | None:
    """Return what `fallback` reads if nothing marks an answer."""
    end = final_part(response)
    match fallback:
        case "none":
            return None
        case "gsm8k":
            return last_hashes(end) or None
    found = (_LAST_NUMBER if fallback == "last_number" else _ANSWER_LINE).findall(end)
    return next((text.strip(" *") for text in reversed(found) if text.strip(" *$")), None)


class MathTerm:
    """Grades mathematics; value 1.0 or 0.0."""

    def __init__(self, options: RewardTerm) -> None:
        self._fallback = options.fallback
        self._which = options.answer
        self._timeout_s = options.timeout_s
        self._child = DeadlineChild("symbolic", memory_mb=4096, forks=True)
        self._read: dict[
            str, str
        ] = {}  # how a gold answer is read: "whole", by its "members", as "text"; "": not at all

    def score(self, item: GradeItem) -> Score:
        if "answer" not in item.record:
            raise GradingError(
                f"the record has no field 'answer' (fields: {', '.join(sorted(item.record)) or 'none'}); "
                "set data.answer_field"
            )
        try:
            gold = gold_answer(item.record["answer"])
        except UnreadableGoldError as error:
            raise BadRecordError(_unreadable(item, str(error))) from error
        answer = read_answer(item.response, self._fallback, self._which, thinking=thinks(item.prompt))
        if answer is None:
            return Score(0.0, "no answer in the response")
        if len(answer) > MAX_CHARS and answer != gold:
            return Score(0.0, f"an answer of {len(answer)} characters is not read")
        try:
            if not self._readable(gold):
                raise BadRecordError(_unreadable(item, f"it is no expression: {gold:.80}"))
            same = self._equal(gold, answer)
        except ChildTimeoutError:
            return Score(0.0, f"comparing took more than {self._timeout_s:g} s")
        except ChildDiedError:
            return Score(0.0, "comparing took more memory or nesting than it may")
        return Score(float(same), None if same else f"answered {answer:.80}")

    def _readable(self, gold: str) -> bool:
        """Return whether a gold answer has a meaning. Decided once and from it alone, so a record is bad for all
        responses or for none."""
        if is_certain(gold):
            return True
        if gold not in self._read:
            if len(self._read) >= _KEPT_GOLDS:
                self._read.clear()
            exact = (approximated(gold) or (gold,))[0]
            asked = question(exact, exact)
            if asked is not None and self._ask("readable", asked.gold):
                self._read[gold] = "whole"
            elif 1 < len(members := listed(joined_words(tidy(exact)))) <= _MOST_MEMBERS and all(
                map(self._readable, members)
            ):
                self._read[gold] = "members"
            else:
                self._read[gold] = "text" if is_text(gold) else ""
        return self._read[gold] != ""

    def _equal(self, gold: str, answer: str) -> bool:
        """Return whether they are equal. In `a \\approx b` the answer is a; b also counts if it is a rounded."""
        wanted, given = approximated(gold), approximated(answer)
        if wanted is None and given is None:
            return self._same(gold, answer)
        if wanted is not None and given is not None and given[0] != given[1] and wanted[0] != wanted[1]:
            return self._same(wanted[0], given[0]) and self._near(given[1], wanted[1])
        exact, decimal = given or (answer, answer)
        golds = dict.fromkeys(wanted or (gold,))
        if any(self._same(text, exact) for text in golds):
            return True
        return exact != decimal and any(self._same(text, decimal) for text in golds) and self._near(exact, decimal)

    def _same(self, gold: str, answer: str) -> bool:
        same = equal_fast(gold, answer)
        if same is not None:
            return same
        if self._read.get(gold) == "members":
            return self._same_members(*(listed(joined_words(tidy(text))) for text in (gold, answer)))
        asked = question(gold, answer)
        return asked is not None and self._ask("equal", asked.gold, asked.answer, asked.places)

    def _same_members(self, gold: list[str], answer: list[str]) -> bool:
        """Return whether two lists are equal as sets, for lists that math-verify cannot read as a whole."""
        if len(gold) != len(answer):
            return False
        for member in gold:
            found = next((index for index, other in enumerate(answer) if self._same(member, other)), None)
            if found is None:
                return False
            answer = answer[:found] + answer[found + 1 :]
        return True

    def _near(self, exact: str, decimal: str) -> bool:
        """Return whether a decimal is the rounded form of an exact value."""
        numbers = amount(exact), amount(decimal)
        if numbers[1] is None:
            return self._same(exact, decimal)
        if numbers[0] is not None:
            places = min(number.decimal_places for number in numbers if number and number.decimal_places is not None)
            return abs(numbers[0].value - numbers[1].value) <= Fraction(1, 10**places)
        asked = question(in_radians(tidy(exact)), decimal)
        return asked is not None and self._ask("near", asked.gold, asked.answer, numbers[1].decimal_places)

    def _ask(self, kind: str, *about: object) -> bool:
        texts = ["" if part is None else str(part) for part in about]
        return bool(self._child.call((kind, *texts), timeout_s=self._timeout_s))

    def close(self) -> None:
        self._child.close()


def _unreadable(item: GradeItem, why: str) -> str:
    where = f"{item.where}: " if item.where else ""
    return f"{where}record['answer'], the gold answer, cannot be read: {why}"
