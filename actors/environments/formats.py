"""How a model writes tool calls, by its chat template: what we read, and why another one is refused."""


def format_fault(template: str | None) -> str:
    """Why calls cannot be read in the format that this chat template asks for; "": they are Hermes'. None: plain text,
    where Hermes' is the format."""
    if template is None:
        return ""
    if "tools" not in template:
        return "the chat template shows the model no tools"
    if "<tool_call>" not in template:
        return "the chat template writes tool calls in another format than <tool_call>{json}</tool_call>"
    if "<function=" in template or "<arg_key>" in template:
        return "the chat template writes tool calls as XML, not as <tool_call>{json}</tool_call>"
    return ""
