"""A judge's prompt: the fields that a template may name. Standard library only: the configuration reads it."""

import re
import string

FIELDS = ("prompt", "response", "record", "finish_reason")


def template_fault(template: str) -> str:
    """Return the fault of a template; "" without one."""
    try:
        named = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        return f"{error}; braces that are text are doubled: {{{{ and }}}}"
    strange = [name for name in named if re.split(r"[.\[]", name)[0] not in FIELDS]
    if strange:
        return f"{{{strange[0]}}} is none of {', '.join(f'{{{name}}}' for name in FIELDS)}; {{record[...]}} is a field"
    return "" if "response" in named else "has no {response}: every response would get the same score"
