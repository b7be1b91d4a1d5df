"""Reading of untrusted YAML.

PyYAML raises various exceptions for bad dates and numbers, takes the last of two equal keys, and
expands merge keys (`<<`), so that two kilobytes can fill all memory. Here these are errors.
"""

from __future__ import annotations

from typing import Any

import yaml

from trappm.profiler.errors import InputError


def load_yaml(text: str | bytes, origin: str) -> Any:
    """Return the plain data in a YAML text.

    Args:
        text: Content of the file.
        origin: Name of the file for errors.

    Raises:
        InputError: It is not YAML, or has a key twice.
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
                    problem=f"duplicate key {key!r}", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
