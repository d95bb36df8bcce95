"""The site's menu has every page, and its links are those of the repository (`make docs` builds it, strictly)."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import COMING, NOT_YET, PAGES, ROOT


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_menu_has_every_page_once() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = [f"docs/{page}" for page in re.findall(r"([\w/]+\.md)$", menu, re.MULTILINE)]
    assert len(listed) == len(set(listed))
    pages = {str(page.relative_to(ROOT)) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    pages = {page for page in pages if not page.startswith("docs/results/")}  # docs/site.py lists them
    assert pages - NOT_YET - set(listed) == set()
    assert set(listed) - pages - COMING == set()


def test_links_out_of_the_manual_lead_to_a_copy(site: ModuleType) -> None:
    text = "[a](../CONTRIBUTING.md#tests) [b](faq.md) [c](https://example.org/x.md) [d](../examples/smollm/)"
    assert site.rewritten(text, "index.md") == (
        "[a](repo/CONTRIBUTING.md#tests) [b](faq.md) [c](https://example.org/x.md) [d](repo/examples/smollm/README.md)"
    )
    text = "[a](config.yaml) [b](../../docs/faq.md) [c](gone.md)"
    page = "repo/examples/smollm/README.md"
    assert site.rewritten(text, page) == "[a](config.yaml) [b](../../../faq.md) [c](gone.md)"


def test_blocks_stay_in_their_list_items(site: ModuleType) -> None:
    text = "1. One:\n\n   ```\n   code\n   ```\n\n   more\n   of it\n2. Two\n- x\n\n```\nplain\n  code\n```"
    assert site.rewritten(text, "index.md").split("\n") == [
        *("1. One:", "", "    ```", "    code", "    ```", "", "    more", "    of it", "", "2. Two", "- x"),
        *("", "```", "plain", "  code", "```"),
    ]


def test_files_outside_are_found(site: ModuleType) -> None:
    assert Path("CONTRIBUTING.md") in {Path(path) for path in site.outside(site.source_of("index.md"))}
