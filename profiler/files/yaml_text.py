"""Reads YAML that anyone may have written: plain data, or one line of what is wrong with it.

PyYAML lets through what Python itself raises at a value that looks like a date or a number and is
none (`2026-13-01`, five thousand digits); takes the last of two equal keys; and copies what merge
keys (`<<`) name, so that two kilobytes can fill all memory. Here these are faults of the file.
"""

from __future__ import annotations

from typing import Any

import yaml

from trappm.profiler.errors import InputError


def load_yaml(text: str | bytes, origin: str) -> Any:
    """What the text says, by YAML's safe subset.

    Args:
        text: the file.
        origin: names the file in errors.

    Raises:
        InputError: it is no YAML, or has a key twice.
    """
    try:
        return _Loader(text).get_single_data()
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, OverflowError) as error:
        where = " ".join(str(error).split())
        raise InputError(f"{origin} is not valid YAML: {where}") from error


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise yaml.MarkedYAMLError(
                    problem="merge keys (<<) are not supported", problem_mark=key_node.start_mark
                )
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} stands here twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
