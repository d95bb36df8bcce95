"""The grader: a weighted sum of terms. Owns the sum and what a failing term does to it; never raises."""

import math

from actors.rewards.callables import FormatTerm, PythonTerm
from actors.rewards.maths import MathTerm
from actors.rewards.options import RewardOptions, RewardTerm
from actors.rewards.programs import CodeTerm
from actors.rewards.types import BadRecordError, Grade, GradeItem, GradingError, RewardConfigError, Score, Term


class Grader:
    """Grades responses. Thread-safe; close it to end its child processes."""

    def __init__(self, terms: list[tuple[str, float, Term]], deadline_s: float) -> None:
        self._terms = terms  # (name, weight, term)
        self.deadline_s = deadline_s  # one call to `grade` answers within this, child restarts aside

    def grade(self, item: GradeItem) -> Grade:
        """The grade of one response. A term that fails gives value 0.0 and `error`, with the parts graded so far."""
        parts: dict[str, float] = {}
        notes: list[str] = []
        for name, _, term in self._terms:
            try:
                score = term.score(item)
            except BadRecordError as error:
                return Grade(value=0.0, parts=parts, error=f"{name}: {error}", bad_record=True, notes=tuple(notes))
            except GradingError as error:
                return Grade(value=0.0, parts=parts, error=f"{name}: {error}", notes=tuple(notes), trace=error.trace)
            except Exception as error:  # whatever grading does wrong costs one rollout, not the run
                return Grade(
                    value=0.0, parts=parts, error=f"{name}: {type(error).__name__}: {error}", notes=tuple(notes)
                )
            parts[name] = score.value
            if score.note:
                notes.append(f"{name}: {score.note}")
        value = math.fsum(weight * parts[name] for name, weight, _ in self._terms)
        if not math.isfinite(value):
            return Grade(value=0.0, parts=parts, error=f"the weighted sum is {value}", notes=tuple(notes))
        return Grade(value=value, parts=parts, notes=tuple(notes))

    def close(self) -> None:
        for _, _, term in self._terms:
            term.close()


class EnvironmentTerm:
    """What the environment gave the turns of an episode, in all."""

    def score(self, item: GradeItem) -> Score:
        return Score(math.fsum(part.reward for part in item.turns if part.reward is not None))

    def close(self) -> None:
        """Nothing is open."""


def build(options: RewardOptions) -> Grader:
    """The grader of a `reward:` section. RewardConfigError names the key of a term that cannot work."""
    terms: list[tuple[str, float, Term]] = []
    try:
        for i, term in enumerate(options.terms):
            key = f"reward.terms[{i}]"
            if term.label in [label for label, _, _ in terms]:
                raise RewardConfigError(f"{key}.name: two terms are called {term.label!r}; set {key}.name")
            terms.append((term.label, term.weight, _build_term(term, key)))
    except BaseException:
        for _, _, built in terms:
            built.close()
        raise
    return Grader(terms, deadline_s=sum(term.timeout_s for term in options.terms) + 10.0 * len(terms))


def _build_term(options: RewardTerm, key: str) -> Term:
    match options.kind:
        case "math":
            return MathTerm(options)
        case "code":
            return CodeTerm(options)
        case "format":
            return FormatTerm(options, key)
        case "python":
            return PythonTerm(options, key)
        case "environment":
            return EnvironmentTerm()
