"""What people read follows the writing guide: plain technical English.

These checks see patterns only; CONTRIBUTING.md has the rules that need a reader.
"""

import ast
import re
from pathlib import Path

import pytest
import typer.main

from trappm.cli import app

ROOT = Path(__file__).parents[1]
CODE = sorted(
    path
    for folder in ("profiler", "learner", "store", "cluster", "trappm", "research")
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WIDTH = 100

OPENERS = {
    "what", "how", "whose", "so", "of", "in", "for", "with", "without", "by", "from", "to", "at",
    "on", "as", "if", "because", "when", "where", "whether", "than", "and", "or", "but", "nor",
    "while", "between", "beside", "behind", "after", "before", "into", "through", "against",
    "among",
}  # fmt: skip
"""First words that make a sentence a fragment."""
WORDS = (
    "beside", "anew", "any more", "thrice", "foretold", "whoever", "nobody", "everybody",
    "rests? on", "hangs? on", "so many", "but for", "mend(?:s|ed|ing)?", "wild labels?", "twins?",
    "sisters?", "thrift", "untold", "a step costs", "alike", "dear", "meanwhile",
    "surpris(?:e|es|ed|ing)",
)  # fmt: skip
"""Words and phrases with a plainer word in the guide."""
ALLOWED = {"store mend"}
"""Strings that name something earlier, such as a removed command."""
FORBIDDEN = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)


def strings(path):
    """Yield the line, the text and whether it is a docstring of each string, and all comments."""
    tree = ast.parse(path.read_text())
    documented = {
        id(statement.value)
        for node in ast.walk(tree)
        for statement in (node.body if isinstance(getattr(node, "body", None), list) else ())
        if isinstance(statement, ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, id(node) in documented
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if match := re.search(r"(?:^|\s)# (?!noqa|type:|fmt:)(.*)", line):
            yield number, match[1], False


def is_fragment(text):
    first = re.match(r"\W*(\w+)", text)
    return first is not None and first[1].lower() in OPENERS


@pytest.mark.parametrize("path", CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_are_no_fragments_and_words_are_plain(path):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()[:80]}"
        for line, text, is_docstring in strings(path)
        if (is_docstring and is_fragment(text))
        or (" " in text and text not in ALLOWED and FORBIDDEN.search(text))
    ]
    assert found == []


def options():
    """Yield each command's options with their help."""
    waiting = [("trappm", typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop()
        waiting += [(f"{name} {n}", c) for n, c in getattr(command, "commands", {}).items()]
        for parameter in command.params:
            if parameter.param_type_name == "argument" or parameter.hidden:
                continue
            yield f"{name} {parameter.opts[0]}", getattr(parameter, "help", None)


def test_helps_of_options_are_noun_phrases():
    assert [name for name, text in options() if not text or is_fragment(text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_lines_of_pages_are_short(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert [
        line
        for line in text.splitlines()
        if len(line) > WIDTH
        and not line.startswith(("|", "    "))
        and not re.search(r"\]\(| \| ", line)
    ] == []


def test_words_of_pages_are_plain():
    found = [
        f"{page.name}: {line}"
        for page in PAGES
        for line in page.read_text().splitlines()
        if FORBIDDEN.search(line)
    ]
    assert found == []
