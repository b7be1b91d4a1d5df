"""Origins of tensors: the module, the operator and the line of code that made each."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trappm.profiler.traced_step import Origin

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent) + os.sep
_TRAPPM = str(Path(__file__).parents[2]) + os.sep
_STANDARD = str(Path(os.__file__).parent) + os.sep
_PACKAGES = str(Path(torch.__file__).parents[1]) + os.sep


class OriginLog:
    """Follows which module of a model runs.

    Autograd numbers its nodes in the order of the forward pass; by this number the backward pass
    finds the forward operator.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._by_node: dict[int, tuple[str, str]] = {}

    @contextmanager
    def watch(self, model: nn.Module) -> Iterator[None]:
        """Follow the modules of this model within the block."""
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
        """Return the origin of a tensor that this operator has just made."""
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
    """Return the innermost line of the model's code, or an empty text."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        path = frame.f_code.co_filename
        if _is_of_model(path):
            is_ours = path.startswith(_TRAPPM)  # inputs and losses that are made for the model
            return "" if is_ours else f"{short_path(path)}:{line}"
    return ""


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the model's code in an error's traceback, or an empty text."""
    frames = ((f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__))
    lines = [f"{short_path(path)}:{line}" for path, line in frames if _is_of_model(path)]
    return lines[-1] if lines else ""


def _is_of_model(path: str) -> bool:
    if path.startswith(_PACKAGES):  # these may lie below the standard library
        return not path.startswith(_TORCH)
    return not path.startswith((_OURS, _STANDARD, "<frozen", "<string>"))


def short_path(path: str) -> str:
    """Return a path relative to the installed packages or the current folder."""
    for folder in (_PACKAGES, os.getcwd() + os.sep):
        if path.startswith(folder):
            return path.removeprefix(folder)
    return path
