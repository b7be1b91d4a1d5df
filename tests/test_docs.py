"""What of the documentation can be checked without building it: links, the site, names."""

import ast
import itertools
import re
from pathlib import Path

import pytest
import yaml

from trappm import cli_reference

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def _leaves(nav):
    for entry in nav:
        for value in entry.values():
            if isinstance(value, str):
                yield value
            else:
                yield from _leaves(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "#", "mailto:")):
            assert (page.parent / target.partition("#")[0]).exists(), target
    if page.name != "CHANGELOG.md":  # it tells what was
        paths = [ROOT / path for path in PATH.findall(page.read_text())]
        assert [p for p in paths if not p.exists() and not p.with_suffix(".py").exists()] == []


PATH = re.compile(r"`((?:profiler|store|learner|cluster|trappm|tests|research)/[\w/.]*)`")


def test_the_site_has_every_page_once_under_four_tabs():
    named = list(_leaves(SITE["nav"]))
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(pages)
    assert [*itertools.chain(*SITE["nav"])] == ["Get started", "How-to", "Reference", "Research"]


CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
GUIDES = [page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "research"]
WRITTEN = [page for page in GUIDES if page.parent.name != "reference"]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_a_guide_is_short_and_narrow_and_types_one_command_per_block(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert len(text.split()) <= 1000
    lines = [line for line in text.splitlines() if not line.startswith(("|", "!["))]
    assert [line for line in lines if len(line) > 100 and not line.startswith("    ")] == []
    for block in CONSOLE.findall(page.read_text()):
        typed = [line for line in block.splitlines() if line.startswith("$ ")]
        assert len(typed) == 1
        assert " #" not in typed[0]


def test_guides_and_reference_stay_small():
    assert len(GUIDES) <= 26
    assert sum(len(page.read_text().split()) for page in GUIDES) <= 20_000
    assert len([*(ROOT / "docs/research").glob("*.md")]) <= 9


def test_the_reference_is_of_names_that_there_are():
    names = [
        name
        for page in (ROOT / "docs/reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    assert names
    assert [name for name in names if not _is_there(name)] == []


def test_the_page_of_commands_is_current():
    assert (ROOT / "docs/reference/cli.md").read_text() == cli_reference.page()


def test_the_readme_is_short_and_its_console_blocks_fit_a_terminal_without_comments():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    assert [line for line in text.splitlines() if len(line) > 100] == []
    blocks = CONSOLE.findall(text)
    lines = [line for block in blocks for line in block.splitlines()]
    assert blocks
    assert [line for line in lines if len(line) > 80] == []
    assert [line for line in lines if line.startswith("$ ") and "#" in line] == []


def _is_there(name):
    path = ROOT / name.replace(".", "/")
    if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
        return True
    home, _, member = name.rpartition(".")
    source = ROOT / (home.replace(".", "/") + ".py")
    if not source.is_file():
        return False
    tree = ast.parse(source.read_text())
    return member in {getattr(node, "name", None) for node in tree.body}
