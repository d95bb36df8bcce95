r"""Gold answers of the kinds that Minerva's 272 are of, each in the spellings that models give it, and each with one
digit changed. The golds are our own; Minerva's themselves are in nobody's repository here."""

import re
from collections.abc import Iterator
from decimal import Decimal

import pytest

from actors.rewards import GradeItem, Grader, build
from config.rewards import RewardOptions, RewardTerm
from tests.params import long

_POWER = re.compile(r"([-+]?)(\d+(?:\.\d*)?)e([-+]?\d+)")
NUMBERS = [
    *("2.3", "31.6", "0.008", "70", "-40", "0", "+3", "0.20", "37.050", "310000", "5.02113", "0.4417", "-0.625"),
    *("2.5e31", "6e38", "1e-4", "4.6668e-7", "2.31e12", "1e9", "5.20e3", "1.6021e5", "9.25e-29", "7.3e-2", "4.44e2"),
]
FORMULAS = {  # by gold: what equals it
    "-2./7": [r"-\frac{2}{7}", "-2/7", r"\frac{-2}{7}"],
    "np.arcsin(3/7)": [r"\arcsin\left(\frac{3}{7}\right)", r"\sin^{-1}(3/7)"],
    r"\frac{\pi}{3}": [r"\pi/3", r"\frac{1}{3}\pi"],
    r"2+\sqrt{5} i": [r"2 + i\sqrt{5}"],
    r"\ln 3 + i\pi / 4": [r"\ln(3) + \frac{\pi}{4} i"],
    r"\frac{3}{2m} t": [r"\frac{3t}{2m}", r"1.5 \frac{t}{m}"],
    r"\frac{21}{4} m": [r"\frac{21 m}{4}", "5.25 m"],
    r"\sqrt{4}\text{ m}": ["2 m"],  # the other side's unit is no factor of it
    r"2^3\text{ m}": ["8 m"],
    "8 m": [r"2^3\text{ m}"],
    r"\frac{15}{\sqrt{4}}\text{ g}": ["7.5 g"],
    r"9 \cdot 2 \text{ m}": ["18 m"],
    "3.4 Z": ["3.4Z", r"3.4 \cdot Z"],
    r"4.5 \tau": [r"4.5\tau", r"\frac{9}{2}\tau"],
    r"\frac{1}{\sqrt{3}}c": [r"\frac{c}{\sqrt{3}}", r"\frac{\sqrt{3}}{3} c"],
    r"-\tau \ln \Delta": [r"-\tau\ln(\Delta)"],
    r"\sqrt{6 \pi G \rho_{0} r_{0}^{2}}": [r"\sqrt{6\pi G\rho_0 r_0^2}"],
    r"\frac{v_{0}}{2 r_{0}} \frac{1}{\left(1+r / r_{0}\right)^{5 / 2}}": [
        r"\frac{v_0}{2r_0}\left(1+\frac{r}{r_0}\right)^{-5/2}"
    ],
    r"\sqrt{3} \cos (2 t-\pi / 6)": [r"\sqrt{3}\cos\left(2t - \frac{\pi}{6}\right)"],
    r"\frac{e^{-3 t}}{12}+C_{1} e^{t}+C_{2} e^{-t}": [r"C_1 e^t + C_2 e^{-t} + \frac{1}{12}e^{-3t}"],
    r"\left(\frac{t^{2}}{3}-t+C\right) e^{-t}": [r"e^{-t}\left(C - t + \frac{t^2}{3}\right)"],
    r"\frac{s+2}{(s+2)^{2}+\omega_{d}^{2}}": [r"\frac{s+2}{(s+2)^2+\omega_d^2}"],
    r"(2 - 5e^{-3t}) u(t)": [r"u(t)(2 - 5e^{-3t})"],
    r"m_{p} c^{2}\left(\gamma^{2}-4\right) \sin ^{2} \theta": [r"m_p c^2(\gamma^2-4)\sin^2\theta"],
    r"\frac{d x}{d t}=3 k x-a": [r"\frac{dx}{dt} = 3kx - a", "3kx - a", r"\dot{x} = -a + 3kx"],
    r"x^{\prime}+\frac{2 r}{V} x-r c=0": [r"x' + \frac{2r}{V}x - rc = 0"],
    "MR=2SRMC": ["MR = 2SRMC"],
    "SRAC=LRAC": ["SRAC = LRAC", "LRAC=SRAC"],
    r"X_{d}=115-1.75 P": [r"X_d = 115 - 1.75P", r"115 - \frac{7}{4}P"],
    r"-\frac{1}{3} X^{-\frac{2}{3}}": [r"-\frac{1}{3X^{2/3}}"],
    r"\frac{2}{5} \frac{C}{S}": [r"\frac{2C}{5S}"],
    r"\lambda_{\text {red}} / \sqrt{5}": [r"\frac{\lambda_{\text{red}}}{\sqrt{5}}"],
    r"\frac{1}{4} E_{1}+\frac{3}{4} E_{2}": [r"\frac{3}{4}E_2 + \frac{1}{4}E_1", r"\frac{E_1 + 3E_2}{4}"],
    "E_{1},E_{3}": ["E_1, E_3", r"E_1 \text{ and } E_3"],
    r"\hbar \omega(v+3 / 2)-\frac{E_{0}^{2} e^{2}}{2 m \omega^{2}}": [
        r"\hbar\omega\left(v+\frac{3}{2}\right) - \frac{e^2 E_0^2}{2m\omega^2}"
    ],
}


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    made = build(RewardOptions(terms=(RewardTerm(kind="math", timeout_s=60.0),)))
    yield made
    made.close()


def spellings(gold: str) -> list[str]:
    """Of a number: e-notation, powers of ten, digits, with a unit, a name and a sign of rounding."""
    if (match := _POWER.fullmatch(gold)) is None:
        number = Decimal(gold)
        power = number.adjusted() if number else 0
        mantissa = number.scaleb(-power)
        return [
            *(f"{gold}\\text{{ cm}}", f"x = {gold}", f"{gold}\\,\\mathrm{{m/s}}", f"{number.normalize():f}"),
            *(f"{mantissa}e{power}", rf"{mantissa} \times 10^{{{power}}}", rf"{mantissa}\cdot10^{{{power}}}"),
        ]
    mantissa, power = Decimal(match[1] + match[2]), int(match[3])
    times = rf"{mantissa} \times 10^{{{power}}}"
    return [
        *(times, rf"{mantissa}\cdot 10^{{{power}}}", f"{mantissa}*10^{power}", f"{mantissa}E{power:+d}"),
        *(f"{mantissa * 10}e{power - 1}", f"{mantissa.scaleb(power):f}", f"{mantissa} \u00d7 10^{{{power}}}"),
        *(rf"{times}\ \mathrm{{erg/s}}", f"x = {times}", rf"\approx {times}"),
    ]


def changed(gold: str) -> list[str]:
    """The gold answer with each digit one higher."""
    return [f"{gold[: at.start()]}{(int(at[0]) + 1) % 10}{gold[at.end() :]}" for at in re.finditer(r"\d", gold)]


def value(grader: Grader, gold: str, answer: str) -> float:
    got = grader.grade(GradeItem(prompt="", response=rf"So \boxed{{{answer}}}.", record={"answer": gold}))
    assert got.error is None
    return got.value


@pytest.mark.parametrize("gold", [*NUMBERS, *list(FORMULAS)[::3], *long(*list(FORMULAS)[1::3], *list(FORMULAS)[2::3])])
def test_every_spelling_is_right_and_one_digit_changed_is_wrong(grader: Grader, gold: str) -> None:
    said = spellings(gold) if gold in NUMBERS else FORMULAS[gold]
    assert [answer for answer in (gold, *said) if value(grader, gold, answer) != 1.0] == []
    assert [answer for answer in changed(gold) if value(grader, gold, answer) != 0.0] == []
