"""Who allocates in a traced step: the module, its line of code and the operator."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from trappm.profiler.simulation.step_trace import Origin

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent) + os.sep
_TRAPPM = str(Path(__file__).parents[2]) + os.sep
_STANDARD = str(Path(os.__file__).parent) + os.sep
_PACKAGES = str(Path(torch.__file__).parents[1]) + os.sep


class OriginLog:
    """Follows which module of a model runs.

    Autograd numbers its nodes in the order in which the forward pass makes them; by this number the
    backward pass finds out whose gradient it computes.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._by_node: dict[int, tuple[str, str]] = {}
        self._line = ""

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Within, the modules of this model are followed."""
        self._stack.clear()
        self._by_node.clear()
        hooks = []
        for name, module in model.named_modules():
            hooks += [
                module.register_forward_pre_hook(lambda *_, name=name: self._stack.append(name)),
                module.register_forward_hook(lambda *_: self._leave(), always_call=True),
            ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __call__(self, operator: Any) -> Origin:
        """Of a tensor that this operator has just made."""
        name = operator._schema.name.removeprefix("aten::") if operator is not None else ""
        node = torch._C._current_autograd_node()
        if node is None or self._stack:  # what is computed again has modules in the backward pass
            module = self._stack[-1] if self._stack else ""
            line = _line_of_model()
            number = torch._C._autograd._get_sequence_nr()
            self._by_node[number - 1] = module, line
        else:
            number = node._sequence_nr()
            while number not in self._by_node and 0 < number < sys.maxsize:
                number -= 1
            module, line = self._by_node.get(number, ("", ""))
        return Origin(module, name, line, node is not None)

    def _leave(self) -> None:
        self._stack.pop()


def _line_of_model() -> str:
    """The innermost frame that is neither PyTorch's nor the recorder's; empty if it is ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if _is_of_model(path):
            if path.startswith(_TRAPPM):  # inputs and losses that are made for the model
                return ""
            return f"{short_path(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of_error(error: BaseException) -> str:
    """The innermost line of the model's code that an error came through; empty if there is none."""
    traceback, line = error.__traceback__, ""
    while traceback is not None:
        path = traceback.tb_frame.f_code.co_filename
        if _is_of_model(path):
            line = f"{short_path(path)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line


def _is_of_model(path: str) -> bool:
    if path.startswith(_PACKAGES):  # these may lie below the standard library
        return not path.startswith(_TORCH)
    return not path.startswith((_OURS, _STANDARD, "<frozen", "<string>"))


def short_path(path: str) -> str:
    """A path as people know it: below the installed packages, or below the current folder."""
    for folder in (_PACKAGES, os.getcwd() + os.sep):
        if path.startswith(folder):
            return path.removeprefix(folder)
    return path
