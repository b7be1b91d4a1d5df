"""The keys of a campaign file, as a page for people and as a JSON schema for editors."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from trappm.cluster.scheduler.stop_rules import StopRules
from trappm.cluster.spec import (
    CampaignSpec,
    Characterisation,
    Devices,
    Evaluation,
    Rounds,
    Share,
)
from trappm.profiler.measuring.canary import CanaryPlan
from trappm.profiler.models.pool import PoolGroup
from trappm.profiler.records import Protocol as MeasuringProtocol

SECTIONS: tuple[tuple[str, type[Any]], ...] = (
    ("The file", CampaignSpec),
    ("devices", Devices),
    ("evaluation", Evaluation),
    ("initial", Share),
    ("rounds", Rounds),
    ("stop", StopRules),
    ("canary", CanaryPlan),
    ("characterise", Characterisation),
    ("protocol", MeasuringProtocol),
    ("pool.groups", PoolGroup),
)
HEAD = """# Keys of a campaign file

These are all keys of a campaign file. `trappm campaign validate FILE` checks a file, and
`trappm campaign validate --schema` prints a JSON schema for editors. This page is generated with
`python -m trappm.cluster.file_reference`.
"""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a campaign file."""
    schema = CampaignSpec.model_json_schema()
    for key in ("canary", "characterise"):
        schema["properties"][key]["anyOf"].append({"const": False})
    return schema


def page() -> str:
    """Return the reference page in Markdown."""
    parts = [HEAD]
    for title, model in SECTIONS:
        name = title if model is CampaignSpec else f"`{title}`"
        rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
        rows += ["| " + " | ".join(row) + " |" for row in _rows(model)]
        parts.append(f"\n## {name}\n\n{_first_sentence(model)}\n\n" + "\n".join(rows) + "\n")
    return "".join(parts)


def _rows(model: type[Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield key, type, default and meaning of each field."""
    texts = _docstrings(model)
    for name, annotation, default in _fields(model):
        kind = annotation.replace("datetime.", "").replace("|", "or")
        kind = kind.replace("MeasuringProtocol", "mapping")
        yield f"`{name}`", kind, default, texts.get(name, "")


def _fields(model: type[Any]) -> Iterator[tuple[str, str, str]]:
    annotations = {
        name: text for part in reversed(model.__mro__) for name, text in _annotations(part).items()
    }
    if issubclass(model, BaseModel):
        for name, field in model.model_fields.items():
            default = field.default
            if field.default_factory is not None:
                default = "the defaults below"
            yield name, annotations[name], _shown(default, is_missing=field.is_required())
        return
    for entry in dataclasses.fields(model):
        is_missing = entry.default is dataclasses.MISSING
        yield entry.name, annotations[entry.name], _shown(entry.default, is_missing=is_missing)


def _shown(default: Any, *, is_missing: bool) -> str:
    if is_missing or default is PydanticUndefined:
        return "required"
    if default is None:
        return ""
    if isinstance(default, tuple):
        return ", ".join(map(str, default))
    return str(default)


def _body(model: type[Any]) -> list[ast.stmt]:
    if model.__module__ == "builtins" or issubclass(BaseModel, model):
        return []
    tree = ast.parse(textwrap.dedent(inspect.getsource(model)))
    (definition,) = tree.body
    return definition.body if isinstance(definition, ast.ClassDef) else []


def _annotations(model: type[Any]) -> dict[str, str]:
    return {
        statement.target.id: ast.unparse(statement.annotation)
        for statement in _body(model)
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _docstrings(model: type[Any]) -> dict[str, str]:
    """Return the texts below the fields of a class and of its bases."""
    texts = {}
    for part in reversed(model.__mro__):
        body = _body(part)
        for statement, below in pairwise(body):
            if (
                isinstance(statement, ast.AnnAssign)
                and isinstance(statement.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                text = " ".join(str(below.value.value).split())
                texts[statement.target.id] = text.replace("|", "or")
    return texts


def _first_sentence(model: type[Any]) -> str:
    return (inspect.getdoc(model) or "").split("\n\n")[0].replace("\n", " ")


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201
