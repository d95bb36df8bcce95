"""An own reward, to copy from: half for a short answer in the wanted form, half for the right one."""

import re
from typing import Any

ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


def grade(prompt: str, response: str, record: dict[str, Any]) -> float:
    """Return a reward in [0, 1]. `record` is the whole line of the data file. An exception here fails only this
    response."""
    found = ANSWER.search(response)
    if found is None:
        return 0.0
    return 0.5 + 0.5 * (found[1].casefold() == str(record["answer"]).casefold())
