"""The accuracy reward of trl_format.yaml. Its format reward is a pattern and needs no function."""

import re
from typing import Any

ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


def accuracy(prompt: str, response: str, record: dict[str, Any]) -> float:
    """Return 1 if the text within the last <answer></answer> is the solution. In TRL the text of a conversational
    completion was `completion[0]["content"]`; here a response is a text, whatever its prompt was."""
    found = ANSWER.findall(response)
    return float(bool(found) and found[-1].casefold() == str(record["solution"]).strip().casefold())
