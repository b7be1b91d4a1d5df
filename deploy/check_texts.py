"""Check the texts of code and pages for what ruff, import-linter and mkdocs cannot.

    python deploy/check_texts.py

Prints one line per problem: unplain words, fragments, lines that are too long, links between pages
outside of `docs`, commands of pages that do not exist, help of options, and the generated page of
commands. CONTRIBUTING.md has the rules that need a reader.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import typer.main
from typer.core import TyperGroup

from trappm import cli, cli_reference

ROOT = Path(__file__).parents[1]
CODE = [
    path
    for folder in ("profiler", "learner", "store", "cluster", "trappm", "research")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not any(parent.is_symlink() for parent in path.parents)
]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
MAX_COLUMNS = 100
MAX_WORDS = 1000
"""Length of a guide without its blocks."""
FRAGMENT = re.compile(
    r"\W*(what|how|whose|so|of|in|for|with|without|by|from|to|at|on|as|if|because|when|where"
    r"|whether|than|and|or|but|nor|while|between|beside|behind|after|before|into|through|against"
    r"|among)\b",
    re.IGNORECASE,
)
"""Beginnings that make a sentence a fragment."""
UNPLAIN = re.compile(
    r"\b(beside|anew|any more|thrice|foretold|whoever|nobody|everybody|rests? on|hangs? on|so many"
    r"|but for|mend(s|ed|ing)?|wild labels?|twins?|sisters?|thrift|untold|a step costs|alike|dear"
    r"|meanwhile|surpris(e|es|ed|ing))\b",
    re.IGNORECASE,
)
"""Words with a plainer one in the writing guide."""
EARLIER_NAMES = {"store mend"}
"""Strings with the name of a removed command."""
OWN_PATH = re.compile(r"`((?:profiler|store|learner|cluster|trappm|tests|research)/[\w/.]*)`")


def problems_of_code(path: Path) -> Iterator[tuple[int, str]]:
    """Yield lines of docstrings that are fragments, and of strings and comments in other words."""
    text = path.read_text()
    tree = ast.parse(text)
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    documented = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in strings:
        if isinstance(node.value, str):
            if id(node) in documented and FRAGMENT.match(node.value):
                yield node.lineno, "the docstring is a fragment"
            if " " in node.value and node.value not in EARLIER_NAMES and UNPLAIN.search(node.value):
                yield node.lineno, "a word that has a plainer one"
    for number, line in enumerate(text.splitlines(), 1):
        comment = re.search(r"(?:^|\s)# (?!noqa|type:|fmt:)(.*)", line)
        if comment and UNPLAIN.search(comment[1]):
            yield number, "a word that has a plainer one"


def problems_of_page(page: Path) -> Iterator[tuple[int, str]]:
    """Yield lines that are too long, in other words, or with links and paths to nowhere."""
    text, in_block = page.read_text(), False
    if page.parent == ROOT / "docs":
        if len(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split()) > MAX_WORDS:
            yield 1, f"more than {MAX_WORDS} words"
        for block in re.finditer(r"```console\n(.*?)```", text, re.DOTALL):
            if len(re.findall(r"^\$ ", block[1], re.MULTILINE)) != 1:
                yield text.count("\n", 0, block.start()) + 1, "a console block has one command"
    for number, line in enumerate(text.splitlines(), 1):
        in_block ^= line.startswith("```")
        may_be_long = in_block or line.startswith(("|", "    ")) or re.search(r"\]\(| \| ", line)
        if len(line) > MAX_COLUMNS and not may_be_long:
            yield number, f"more than {MAX_COLUMNS} columns"
        if page.name == "CHANGELOG.md":  # it says what was
            continue
        if UNPLAIN.search(line):
            yield number, "a word that has a plainer one"
        paths = [ROOT / path for path in OWN_PATH.findall(line)]
        if page.parent == ROOT:  # mkdocs knows the pages in docs only
            targets = re.findall(r"\]\((?!http|#|mailto:)([^)#\s]+)", line)
            paths += [ROOT / target for target in targets]
        for path in paths:
            if not path.exists() and not path.with_suffix(".py").exists():
                yield number, f"there is no {path.relative_to(ROOT)}"


def commands_of_page(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command in a block, without what may be left out."""
    rest = ""
    for line in re.findall(r"(?m)^(?:    |\$ )(.*)$", re.sub(r"\\\n +", "", page.read_text())):
        if rest or line.startswith("trappm "):
            rest += line + " "
            try:
                words = shlex.split(re.sub(r"\[[^]]*\]", "", rest), comments=True)
            except ValueError:  # a quotation continues in the next line
                continue
            ends = [words.index(mark) for mark in ("&&", "|", ">", "&") if mark in words]
            yield words[1 : min(ends, default=None)]
            rest = ""


def invalid_commands() -> Iterator[str]:
    """Yield commands of pages that the command line does not know."""
    for page in PAGES:
        for words in commands_of_page(page):
            command, rest = typer.main.get_command(cli.app), words
            context = typer.Context(command)
            try:
                while isinstance(command, TyperGroup):
                    _, command, rest = command.resolve_command(context, rest)
                    context = typer.Context(command, parent=context)
                command.make_context(command.name, rest, parent=context)
            except typer.TyperException as error:
                yield f"{page.name}: trappm {' '.join(words)}: {error}"


def undescribed_options() -> Iterator[str]:
    """Yield options whose help is missing or a fragment."""
    waiting = [("trappm", typer.main.get_command(cli.app))]
    while waiting:
        name, command = waiting.pop()
        waiting += [(f"{name} {n}", c) for n, c in getattr(command, "commands", {}).items()]
        for option in command.params:
            if option.param_type_name != "argument" and not option.hidden:
                text = getattr(option, "help", None)
                if not text or FRAGMENT.match(text):
                    yield f"{name} {option.opts[0]}: its help is missing or a fragment"


def main() -> int:
    """Print all problems; return the exit status."""
    problems = [
        f"{path.relative_to(ROOT)}:{line}: {problem}"
        for paths, problems_of in ((CODE, problems_of_code), (PAGES, problems_of_page))
        for path in paths
        for line, problem in problems_of(path)
    ]
    problems += [*invalid_commands(), *undescribed_options()]
    page = "docs/reference/cli.md"
    if (ROOT / page).read_text() != cli_reference.page():
        problems.append(f"{page} is not current; run: python -m trappm.cli_reference > {page}")
    print("\n".join(problems), file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
