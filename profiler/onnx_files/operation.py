"""A node of an ONNX file as Python values: what the modules of this folder share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import onnx


class Operation(NamedTuple):
    """A node as Python values, which are read many times."""

    operator: str
    """With its domain in front, if that is not ONNX's own: it is another operator then."""
    domain: str
    """Empty for ONNX's own."""
    inputs: tuple[str, ...]
    """Names; empty for one left out."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    node: onnx.NodeProto
    name: str
    """For messages."""
