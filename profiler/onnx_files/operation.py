"""A node of an ONNX file as Python values: what the modules of this folder share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import onnx


class Operation(NamedTuple):
    """One node of the file, or several that were put together to one operator."""

    operator: str
    """With its domain in front, if that is not ONNX's own: it is another operator then."""
    inputs: tuple[str, ...]
    """Names; empty for one left out."""
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    node: onnx.NodeProto | None = None
    """As the file has it; None for what was put together."""
