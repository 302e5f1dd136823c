"""The documentation site: its reference is complete, and its checks find what is wrong."""

from __future__ import annotations

import re

import pytest

import accelerate
from accel_cli.launch.flags.table import known_options
from tools.docs import api, changes, evidence, options
from tools.docs.check import Page, broken_links, far_answers, fetched_elsewhere

HOME = '<a href="checkpoints/">c</a><a href="reference/">r</a><a href="parallelism/#choose">p</a>'


def site_of(**pages: str) -> dict[str, Page]:
    return {f"{name.replace('__', '/')}/" if name != "home" else "": Page(text) for name, text in pages.items()}


def test_a_link_to_a_missing_page_or_anchor_is_found(tmp_path: object) -> None:
    site = site_of(home=HOME, checkpoints="", parallelism='<h2 id="chosen">x</h2>')
    assert broken_links(site, tmp_path) == [  # type: ignore[arg-type]
        ": reference/ leads nowhere",
        ": parallelism/#choose: the page has no such anchor",
    ]


def test_what_comes_from_other_servers_is_found() -> None:
    site = site_of(home='<script src="https://cdn.example/x.js"></script><a href="https://example.org">fine</a>')
    assert fetched_elsewhere(site) == [": fetches https://cdn.example/x.js"]


def test_readers_see_no_evidence() -> None:
    page = "| what | goal | figure |\n|---|---|---|\n| a \\| b | 1 | 2 |\n\ntext\n<!-- evidence -->\nhow\n<!-- /evidence -->\nend\n"
    assert evidence.without_evidence(page) == "| what | figure |\n| --- | --- |\n| a \\| b | 2 |\n\ntext\nend\n"
    ((_, collected),) = evidence.pages()
    assert "| goal |" in collected, "contributors do"
    assert "<!-- evidence -->" not in collected


def test_releases_are_listed_newest_first() -> None:
    assert list(changes.releases("# C\n\n## Unreleased\n\nnew\n\n## 0.1.0 - 2026-11-25\n\nold\n")) == [
        ("Unreleased", "\nnew\n\n"),
        ("0.1.0 - 2026-11-25", "\nold\n"),
    ]
    ((_, page),) = changes.pages()
    dates = re.findall("^## (.+)", page, re.MULTILINE)
    assert dates[0] == "Not yet released"
    assert dates[1:] == sorted(dates[1:], reverse=True)


def test_an_answer_more_than_three_clicks_away_is_found() -> None:
    chain = {"home": HOME, "checkpoints": "", "parallelism": "", "reference": '<a href="a/">a</a>'}
    chain |= {"reference__a": '<a href="b/">b</a>', "reference__a__b": '<a href="../../commands/launch/">l</a>'}
    chain |= {"reference__commands__launch": '<a href="../../../hangs-and-crashes/">h</a>', "hangs-and-crashes": ""}
    assert [line.partition("?")[0] for line in far_answers(site_of(**chain))] == [
        "why does it hang",
        "what does this flag do",
    ]


def test_a_name_without_an_entry_is_found() -> None:
    everything = {page: {name.canonical for m in api.MODULES for name in api.exports(m)} for page, _ in api.pages()}
    assert len(everything) == len(api.MODULES) + len(api.TOPICS)
    assert api.missing(everything) == []
    everything["reference/accel-ops.md"].discard("accel_ops.collectives.tensors.gather")
    gone = {line.partition(":")[0] for line in api.missing(everything)}
    assert gone == {"accel_ops.gather", "accelerate.utils.gather"}


def test_the_reference_lists_every_name_that_can_be_imported() -> None:
    assert {name.name for name in api.exports("accelerate")} == set(accelerate.__all__)


@pytest.mark.parametrize("kind", ["flag", "variable", "key"])
def test_the_option_pages_list_every(kind: str) -> None:
    pages = dict(options.pages())
    launch, keys, variables = (
        set(re.findall(r'<a id="([^"]+)"', pages[f"reference/{page}.md"]))
        for page in ("commands/launch", "config-file", "environment")
    )
    rows = known_options()
    wanted = {
        "flag": ({row.flags.split()[-1].lstrip("-").replace("-", "_") for row in rows.values() if row.flags}, launch),
        "variable": ({name for row in rows.values() for name in row.environment.split()}, variables),
        "key": ({"mixed_precision", "fsdp_config.fsdp_version", "ec2_instance_type"}, keys),
    }[kind]
    assert wanted[0] - wanted[1] == set()
    assert len(wanted[1]) > 60


def test_a_variable_that_only_stands_in_code_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "variables_in_code", lambda: {"ACCELERATE_NEW"})
    assert "reference/environment.md has no entry for ACCELERATE_NEW" in options.missing({})
