"""How this package was installed: what to type for more of it."""

import importlib.metadata
import json


def install_extra(extra: str) -> str:
    """Return the command that adds an extra of pyproject.toml to this installation: from the checkout if it was
    installed from one in place, or not at all."""
    try:
        found = importlib.metadata.distribution("paceline").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        found = '{"dir_info": {"editable": true}}'
    editable = json.loads(found or "{}").get("dir_info", {}).get("editable", False)
    return f"pip install -e '.[{extra}]'" if editable else f"pip install 'paceline[{extra}]'"
