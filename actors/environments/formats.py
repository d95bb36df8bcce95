"""Supported formats of tool calls in chat templates, and why others are refused."""


def format_fault(template: str | None) -> str:
    """Return why calls in this chat template's format cannot be read; "": it is Hermes'. None: plain text, with Hermes'
    format."""
    if template is None:
        return ""
    if "tools" not in template:
        return "the chat template shows the model no tools"
    if "<tool_call>" not in template:
        return "the chat template writes tool calls in another format than <tool_call>{json}</tool_call>"
    if "<function=" in template or "<arg_key>" in template:
        return "the chat template writes tool calls as XML, not as <tool_call>{json}</tool_call>"
    return ""
