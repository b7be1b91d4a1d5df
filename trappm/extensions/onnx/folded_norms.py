"""Restores batch norms that an exporter folded into convolutions.

PyTorch's exporters write a model in evaluation mode, where a batch norm becomes part of the
convolution before it. Training such a file would keep fewer activations than training the model.
The file does not say so. But image classifiers whose residual additions or depthwise convolutions
have no norm at all are not trained in practice; other networks without norms, such as VGG, stay as
they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace

import onnx

from trappm.extensions.onnx.checked_model import CheckedModel, Kind, Operation

_NORM = "BatchNormalization"
_OTHER_NORMS = frozenset({"InstanceNormalization", "LayerNormalization", "GroupNormalization"})
_PARTS = ("convolution", "scale", "bias", "mean", "variance")
_POOLS = frozenset({"GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceMax"})
_BEFORE_ANY_NORM = frozenset({"Add", "Concat", "MaxPool", "AveragePool"})
"""Inputs of batch norms that no exporter can fold, in networks with pre-activation."""
_AFTER_A_NORM = frozenset({
    "Add", "AveragePool", "Clip", "Concat", "Conv", "Div", "Elu", "Erf", "Gelu",
    "GlobalAveragePool", "HardSigmoid", "HardSwish", "LeakyRelu", "MaxPool", "Mish", "Mul", "PRelu",
    "Pad", "ReduceMean", "Relu", "Resize", "Sigmoid", "Slice", "Softplus", "Split", "Swish", "Tanh",
})  # fmt: skip
"""Readers of a norm's result after a convolution; others never follow a batch norm."""
_DEEP = 30
"""Convolutions in a row; GoogLeNet, the deepest trained without norms or residuals, has 22."""
_UNKNOWN: Kind = (0, ())


def restore_norms(model: CheckedModel) -> CheckedModel:
    """Return the model with a batch norm after each convolution that clearly lost its own."""
    operations, kinds = list(_skip_identities(model.operations)), _kinds(model)
    pooled = _find_pooled(operations, set(kinds))
    if not pooled.issuperset(model.outputs):
        return model  # no classifier of images
    maker = {name: o.operator for o in operations for name in o.outputs}
    normalised = [maker.get(o.inputs[0]) for o in operations if o.operator == _NORM]
    if not _BEFORE_ANY_NORM.issuperset(normalised):
        return model  # the exporter folded none, or the network has none after convolutions
    convolutions = [o for o in operations if o.operator == "Conv" and o.inputs[0] not in pooled]
    bare = _find_bare(convolutions, operations, model.outputs)
    known = all(len(kinds.get(c.inputs[1], _UNKNOWN)[1]) == 4 for c in bare.values())
    if 2 * len(bare) < len(convolutions) or not (bare and known):
        return model
    biased = {name: c for name, c in bare.items() if len(c.inputs) > 2}
    if normalised:  # where activations come before convolutions, others lost none
        bare = biased
    elif not _needs_norms(operations, _find_open(operations, bare, set(kinds)), kinds, pooled):
        return model
    # A folded norm leaves a bias behind, except in a network that was never trained.
    return _insert_norms(model, operations, biased or bare, kinds)


def _find_bare(
    convolutions: Sequence[Operation], operations: Sequence[Operation], outputs: Sequence[str]
) -> dict[str, Operation]:
    """Map output names to convolutions whose batch norm may have been folded away."""
    readers: dict[str, set[str]] = {}
    for operation in operations:
        for name in operation.inputs:
            readers.setdefault(name, set()).add(operation.operator)
    return {
        name: convolution
        for convolution in convolutions
        for name in convolution.outputs
        if name not in outputs and readers.get(name) and readers[name] <= _AFTER_A_NORM
    }


def _find_open(
    operations: Sequence[Operation], bare: Mapping[str, Operation], weights: Set[str]
) -> dict[str, Operation]:
    """Return the convolutions without another norm earlier in their branch."""
    maker: dict[str, str] = {}
    behind: set[str] = set()
    for operation in operations:
        inputs = {*operation.inputs} - weights - {""}
        centred = operation.operator == "Sub" and "ReduceMean" in {maker.get(n) for n in inputs}
        joins = operation.operator == "Add" and len(inputs) == 2
        if operation.operator in _OTHER_NORMS or centred or (inputs & behind and not joins):
            behind.update(operation.outputs)
        maker.update(dict.fromkeys(operation.outputs, operation.operator))
    return {name: c for name, c in bare.items() if c.inputs[0] not in behind}


def _needs_norms(
    operations: Sequence[Operation],
    bare: Mapping[str, Operation],
    kinds: Mapping[str, Kind],
    pooled: Set[str],
) -> bool:
    """Return whether such a network cannot be trained without norms.

    Its convolutions are depthwise, half of its residual additions follow them directly, or many
    convolutions are in a row.
    """
    if any(c.attributes.get("group", 1) == kinds[c.inputs[1]][1][0] > 1 for c in bare.values()):
        return True
    sums = direct = 0
    branches, depth = set(bare), dict.fromkeys(kinds, 0)
    for operation in operations:
        inputs = {*operation.inputs} - kinds.keys()
        if operation.operator == "Mul" and inputs & branches and inputs & pooled:
            branches.update(operation.outputs)  # a gate of channels
        if operation.operator == "Add" and len(inputs) == 2:
            sums, direct = sums + 1, direct + (not branches.isdisjoint(inputs))
        deepest = max((depth.get(name, 0) for name in inputs), default=0)
        more = operation.outputs[0] in bare
        depth.update(dict.fromkeys(operation.outputs, deepest + more))
    return max(depth.values(), default=0) >= _DEEP or (direct > 0 and 2 * direct >= sums)


def _kinds(model: CheckedModel) -> dict[str, Kind]:
    small = {k: (t.data_type, tuple(t.dims)) for k, t in model.constants.items()}
    return {**small, **model.weights}


def _skip_identities(operations: Sequence[Operation]) -> Iterator[Operation]:
    """Yield the operations without identities."""
    names: dict[str, str] = {}
    for operation in operations:
        inputs = tuple(names.get(name, name) for name in operation.inputs)
        if operation.operator == "Identity":
            names[operation.outputs[0]] = inputs[0]
        else:
            yield operation._replace(inputs=inputs)


def _find_pooled(operations: Sequence[Operation], weights: Set[str]) -> set[str]:
    """Return the names of tensors made of pooled images and weights alone."""
    pooled: set[str] = set()
    for operation in operations:
        inputs = {*operation.inputs} - weights - {""}
        if operation.operator in _POOLS or (inputs and inputs <= pooled):
            pooled.update(operation.outputs)
    return pooled


def _insert_norms(
    model: CheckedModel,
    operations: Sequence[Operation],
    bare: Mapping[str, Operation],
    kinds: Mapping[str, Kind],
) -> CheckedModel:
    """Return the model with these convolutions, and norms in place of their biases."""
    restored: list[Operation] = []
    weights, parameters = dict(model.weights), dict(model.parameters)
    for operation in operations:
        name = operation.outputs[0]
        if name not in bare:
            restored.append(operation)
            continue
        folded, *parts = (f"{name}:{part}" for part in _PARTS)
        channels = kinds[operation.inputs[1]][1][0]
        restored += [
            operation._replace(inputs=operation.inputs[:2], outputs=(folded,)),
            Operation(_NORM, (folded, *parts), (name,), {}),
        ]
        weights.update(dict.fromkeys(parts, (onnx.TensorProto.FLOAT, (channels,))))
        parameters.update(dict.fromkeys(parts[:2], channels))
    biases = {n for o in operations for n in o.inputs} - {n for o in restored for n in o.inputs}
    return replace(
        model,
        restored_norms=len(bare),
        operations=restored,
        constants={k: v for k, v in model.constants.items() if k not in biases},
        weights={k: v for k, v in weights.items() if k not in biases},
        parameters={k: v for k, v in parameters.items() if k not in biases},
    )
