"""The keys of a campaign file, as a JSON schema for editors and as a page for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from trappm.cluster.spec import ALL, CampaignSpec

SECTIONS = {
    "devices": "Devices",
    "evaluation": "Evaluation",
    "initial": "Share",
    "rounds": "Rounds",
    "stop": "StopRules",
    "max_workers": "Workers",
    "canary": "CanaryPlan",
    "protocol": "Protocol",
    "pool.groups": "PoolGroup",
}
"""Models in the JSON schema by the key where they stand in a file."""

SIZES = ("evaluation", "initial", "rounds")
"""Keys that `strategy: all` derives from the pool."""

HEAD = """# Keys of a campaign file

These are all keys of a campaign file. `trappm campaign validate FILE` checks a file, and
`trappm campaign validate --schema` prints a JSON schema for editors. This page is generated with
`python -m trappm.cluster.file_reference`.
"""


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a campaign file."""
    schema = CampaignSpec.model_json_schema()
    schema["properties"]["canary"]["anyOf"].append({"const": False})
    sizes = [name for name in schema["required"] if name in SIZES]
    schema["required"] = [name for name in schema["required"] if name not in SIZES]
    has_all = {"properties": {"strategy": {"const": ALL}}, "required": ["strategy"]}
    schema |= {"if": has_all, "else": {"required": sizes}}
    return schema


def page() -> str:
    """Return the reference page in Markdown."""
    schema = json_schema()
    parts = [HEAD, _table("The file", schema)]
    parts += [_table(f"`{key}`", schema["$defs"][name]) for key, name in SECTIONS.items()]
    return "\n".join(parts)


def _table(title: str, schema: Mapping[str, Any]) -> str:
    """Return the section of a model: key, type, default and meaning of each field."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, field in schema["properties"].items():
        default = _default_text(field.get("default"))
        if key in schema.get("required", ()):
            default = "required"
        elif key in schema.get("else", {}).get("required", ()):
            default = "required, except with `strategy: all`"
        meaning = " ".join(field.get("description", "").split()).replace("|", "or")
        rows.append(f"| `{key}` | {_type(field)} | {default} | {meaning} |")
    text = schema.get("description", "").split("\n\n")[0].replace("\n", " ")
    return "\n".join([f"## {title}", "", *([text, ""] if text else []), *rows, ""])


def _type(field: Mapping[str, Any]) -> str:
    if branches := field.get("anyOf") or field.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_type, branches)))
    if "$ref" in field:
        return f"{field['$ref'].rpartition('/')[2]}"
    if "const" in field:
        return f"`{str(field['const']).lower()}`"
    if "items" in field:
        return f"list of {_type(field['items'])}"
    return str(field.get("format", field.get("type", "any")))


def _default_text(default: Any) -> str:
    if isinstance(default, list):
        return ", ".join(map(_default_text, default))
    return "" if default is None else str(default)


if __name__ == "__main__":
    sys.stdout.write(page())
