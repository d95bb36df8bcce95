"""Rules that keys declare: every one names keys that exist, and is held against lists of sections and absent ones."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from config.rules import Rule
from config.tree import Config
from launch.config import ConfigError, load_config
from launch.config.rules import rule_issues
from launch.config.schema import by_name, keys
from tests.launch.test_config_check import Write


def declared() -> Iterator[tuple[str, type[BaseModel], Rule]]:
    """Key, the section that it is in, and each rule of it."""
    sections = {"": Config} | {key.name: key.section for key in keys() if key.section is not None}
    for name, section in sections.items():
        for field, info in section.model_fields.items():
            yield from (
                (f"{name}.{field}".lstrip("."), section, rule) for rule in info.metadata if isinstance(rule, Rule)
            )


def exists(name: str, section: type[BaseModel]) -> bool:
    parent, _, last = name.rpartition(".")
    if parent:
        above = by_name().get(parent)
        section = above.section if above is not None and above.section is not None else Config
    return name in by_name() or last in section.model_fields or isinstance(getattr(section, last, None), property)


def test_every_rule_names_keys_that_exist() -> None:
    rules = list(declared())
    assert len(rules) > 60
    for key, section, rule in rules:
        named = [getattr(rule, part, "") for part in ("key", "when")]
        assert all(exists(name, section) for name in named if name), (key, rule)


def test_a_rule_counts_in_each_element_of_a_list_and_says_both_keys(write_config: Write) -> None:
    terms = "reward.terms=[{kind: math}, {kind: code, url: 'http://j'}]"
    with pytest.raises(ConfigError) as caught:
        load_config(write_config(), [terms, "rollout.workers={min: 3, max: 2}"])
    assert [(issue.key, issue.message) for issue in caught.value.issues] == [
        ("rollout.workers.max", "2 is less than rollout.workers.min = 3"),
        ("reward.terms.1.url", "only kind judge uses it, this is code"),
    ]


def test_a_section_that_is_absent_breaks_no_rule(write_config: Write) -> None:
    config = load_config(write_config(), ["environment=null", "warmup=null"]).config
    assert list(rule_issues(config)) == []
