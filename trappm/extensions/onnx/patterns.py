"""Fuses operators that exporters decompose: GELU, SiLU, norms, attention, Linear.

Memory in training depends on it: a fused GELU keeps its input for the backward pass, its eight
operators in a file would keep six tensors.

Patterns are nested tuples of an operator and its inputs. A word binds a tensor, a number matches a
constant of that value, `_` anything. Words with `w_` bind what is computed from weights alone,
those with `c_` constants or arithmetic on shapes; `Operator:word` binds the operator's output.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from trappm.extensions.onnx.checked_model import Operation
from trappm.extensions.onnx.constant_folding import Array

Pattern = str | float | tuple[Any, ...]
Bindings = Mapping[str, str]


IN_PLACE = "trappm.in_place"
"""Attribute of activations that overwrite their input."""

_OVERWRITES = frozenset({"Relu", "LeakyRelu", "Clip", "HardSwish", "trappm.Silu"})
_NORMS = frozenset({"BatchNormalization", "GroupNormalization"})
_OVERWRITTEN = _NORMS | {"Conv", "Add"}
_COMMUTES = frozenset({"Add", "Mul"})
_TOLERANCE = 1e-3
"""Tolerance of constants such as the square root of 2, which exporters round."""


def _times(*factors: Pattern) -> Pattern:
    product = factors[0]
    for factor in factors[1:]:
        product = ("Mul", product, factor)
    return product


_ROOT = math.sqrt(0.5)
_ERF = [
    ("Add", ("Erf", argument), 1.0) for argument in (("Div", "x", 1 / _ROOT), _times("x", _ROOT))
]
_CUBES = (_times("x", _times("x", "x")), ("Pow", "x", 3.0))
_TANH = [
    ("Add", ("Tanh", _times(("Add", "x", _times(cube, 0.044715)), math.sqrt(2 / math.pi))), 1.0)
    for cube in _CUBES
]  # fmt: skip


def _half_forms(factor: Pattern) -> list[Pattern]:
    return [
        _times(_times("x", factor), 0.5),
        _times(_times("x", 0.5), factor),
        _times("x", _times(factor, 0.5)),
    ]


_RELU6 = ("Clip", ("Add", "x", 3.0), 0.0, 6.0)
_CENTERED = ("Sub", "x", ("ReduceMean", "x"))
_SCORES = ("MatMul", _times("q", "c_scale"), _times("k", "c_scale2"))


def _normalization(top: Pattern, squares: Pattern) -> Pattern:
    return ("Div", top, ("Sqrt", ("Add", ("ReduceMean:mean", squares), "c_epsilon")))


_GROUPS = ("Reshape", ("InstanceNormalization", ("Reshape", "x", "_"), "c_ones", "_"), "_")

_PATTERNS: Sequence[tuple[str, tuple[str, ...], Pattern, Mapping[str, Any]]] = (
    *(("Gelu", ("x",), form, {}) for factor in _ERF for form in _half_forms(factor)),
    *(
        ("Gelu", ("x",), form, {"approximate": "tanh"})
        for factor in _TANH
        for form in _half_forms(factor)
    ),
    ("Mish", ("x",), _times("x", ("Tanh", ("Softplus", "x"))), {}),
    ("trappm.Silu", ("x",), _times("x", ("Sigmoid", "x")), {}),
    ("HardSwish", ("x",), _times("x", ("HardSigmoid", "x")), {}),
    ("HardSwish", ("x",), ("Div", _times("x", _RELU6), 6.0), {}),
    ("HardSwish", ("x",), _times("x", ("Div", _RELU6, 6.0)), {}),
    ("HardSigmoid", ("x",), ("Div", _RELU6, 6.0), {}),
    *(
        ("LayerNormalization", ("x", "w_scale", "w_bias"),
         ("Add", _times(_normalization(_CENTERED, squares), "w_scale"), "w_bias"), {})
        for squares in (("Pow", _CENTERED, 2.0), _times(_CENTERED, _CENTERED))
    ),
    *(
        ("RMSNormalization", ("x", "w_scale"), _times(form, "w_scale"), {})
        for squares in (("Pow", "x", 2.0), _times("x", "x"))
        for form in (_normalization("x", squares),)
    ),
    ("GroupNormalization", ("x", "w_scale", "w_bias"),
     ("Add", _times(_GROUPS, "w_scale"), "w_bias"), {}),
    ("trappm.ScaledAttention", ("q", "k", "v"), ("MatMul", ("Softmax", _SCORES), "v"), {}),
    ("trappm.ScaledAttention", ("q", "k", "v", "m"),
     ("MatMul", ("Softmax", ("Add", _SCORES, "m")), "v"), {}),
    ("trappm.Variance", ("x",), ("Div", _times(
        ("ReduceMean:mean", _times(_CENTERED, _CENTERED)), "c_count"), "c_less"), {}),
    ("trappm.Rsqrt", ("x",), ("Div", 1.0, ("Sqrt", "x")), {}),
    ("trappm.WrittenInto", ("x", "part"), ("ScatterND", "x", "c_places", "part"), {}),
    ("trappm.Linear", ("x", "w_matrix", "w_bias"),
     ("Add", ("MatMul", "x", "w_matrix"), "w_bias"), {}),
    ("trappm.Linear", ("x", "w_matrix"), ("MatMul", "x", "w_matrix"), {}),
)  # fmt: skip


def fuse_operations(
    steps: Sequence[Operation],
    outputs: Set[str],
    constants: Mapping[str, Array],
    inputs: Sequence[str],
    weights: Set[str],
) -> list[Operation]:
    """Return the steps that the outputs need, fused where a pattern matches.

    Args:
        steps: In topological order.
        outputs: Names of the wanted tensors.
        constants: Known values by name.
        inputs: Names of the inputs.
        weights: Names of parameters and buffers.
    """
    matcher = _Matcher(steps, constants, inputs, weights)
    fused = [matcher.fuse(step) for step in steps]
    needed = set(outputs)
    kept = []
    for step in reversed(fused):
        if needed.intersection(step.outputs):
            kept.append(step)
            needed.update(step.inputs)
    kept.reverse()
    return list(_mark_in_place(kept, outputs))


def _mark_in_place(steps: Sequence[Operation], outputs: Set[str]) -> Iterator[Operation]:
    """Mark activations that overwrite their input, as image models of PyTorch do.

    They follow a norm, a convolution or an addition whose result has no other reader. A file does
    not say so. Live memory hardly depends on it; fragmentation does, by up to 6 %.
    """
    maker = {name: step.operator for step in steps for name in step.outputs}
    readers = Counter(name for step in steps for name in step.inputs)
    reading: dict[str, list[str]] = {}
    for step in steps:
        for name in step.inputs:
            reading.setdefault(name, []).append(step.operator)

    def readers_of(step: Operation) -> list[str]:
        return reading.get(step.outputs[0], [])

    for step in steps:
        name = step.inputs[0] if step.inputs else ""
        alone = readers[name] == 1 and name not in outputs
        overwritten = _OVERWRITTEN if step.operator in _OVERWRITES else ()
        if step.operator == "Add" and readers_of(step) == ["Relu"]:
            overwritten = _NORMS
        if alone and maker.get(name) in overwritten:
            yield step._replace(attributes={**step.attributes, IN_PLACE: True})
        else:
            yield step


class _Matcher:
    def __init__(
        self,
        steps: Sequence[Operation],
        constants: Mapping[str, Array],
        inputs: Sequence[str],
        weights: Set[str],
    ) -> None:
        self._constants = constants
        self._maker = {name: step for step in steps for name in step.outputs}
        self._on_image = set(inputs)
        self._on_weights = set(weights)
        for step in steps:
            if step.operator in ("Shape", "Size"):
                continue
            for names in (self._on_image, self._on_weights):
                if not names.isdisjoint(step.inputs):
                    names.update(step.outputs)

    def fuse(self, step: Operation) -> Operation:
        """Return the largest operator that ends with this step, or the step itself."""
        if step.outputs[0] not in self._on_image:
            return step
        for operator, inputs, pattern, attributes in _PATTERNS:
            if not isinstance(pattern, tuple) or pattern[0] != step.operator:
                continue
            for bindings in self._match(step.outputs[0], pattern, {}):
                more = self._more(operator, bindings)
                if more is not None:
                    names = tuple(bindings[name] for name in inputs)
                    return Operation(operator, names, step.outputs, {**attributes, **more})
        return step

    def _more(self, operator: str, bindings: Bindings) -> dict[str, Any] | None:
        """Return further attributes of a match, or None if it is not this operator."""
        if operator == "GroupNormalization":
            ones = self._constants.get(bindings["c_ones"])
            return None if ones is None else {"num_groups": ones.size}
        if operator == "trappm.Variance":
            return dict(self._maker[bindings["mean"]].attributes)
        if operator in ("LayerNormalization", "RMSNormalization"):
            return self._last_axes(self._maker[bindings["mean"]])
        return {}

    def _last_axes(self, mean: Operation) -> dict[str, Any] | None:
        """Return the first of the mean's axes, if they are the last ones."""
        axes = mean.attributes.get("axes")
        if axes is None and len(mean.inputs) > 1 and mean.inputs[1] in self._constants:
            axes = self._constants[mean.inputs[1]].tolist()
        axes = sorted(axes or ())
        return {"axis": axes[0]} if axes and axes == list(range(-len(axes), 0)) else None

    def _match(self, name: str, pattern: Pattern, bindings: Bindings) -> Iterator[Bindings]:
        if isinstance(pattern, str):
            if self._binds(name, pattern, bindings):
                yield bindings if pattern == "_" else {**bindings, pattern: name}
            return
        if isinstance(pattern, float):
            if self._is(name, pattern):
                yield bindings
            return
        operator, _, label = pattern[0].partition(":")
        step = self._maker.get(name)
        if step is None or step.operator != operator:
            return
        bindings = {**bindings, label: name} if label else bindings
        wanted = pattern[1:]
        yield from self._match_all(step.inputs[: len(wanted)], wanted, bindings)
        if operator in _COMMUTES:
            yield from self._match_all(step.inputs, wanted[::-1], bindings)

    def _match_all(
        self, names: Sequence[str], patterns: Sequence[Pattern], bindings: Bindings
    ) -> Iterator[Bindings]:
        if not patterns:
            yield bindings
        elif names:
            for first in self._match(names[0], patterns[0], bindings):
                yield from self._match_all(names[1:], patterns[1:], first)

    def _binds(self, name: str, label: str, bindings: Bindings) -> bool:
        if label == "_":
            return True
        if bindings.get(label, name) != name:
            return False
        if label.startswith("w_"):
            return name not in self._on_image and name in self._on_weights
        if label.startswith("c_"):
            return name not in self._on_image and name not in self._on_weights
        return True

    def _is(self, name: str, number: float) -> bool:
        value = self._constants.get(name)
        if value is None or value.size != 1 or value.dtype.kind not in "fiu":
            return False
        return math.isclose(float(value.reshape(())), number, rel_tol=_TOLERANCE, abs_tol=1e-9)
