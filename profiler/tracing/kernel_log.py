"""The kernels of one step as it is traced, for every batch size.

An operator without a rule is a kernel that reads its inputs and writes its outputs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trappm.profiler.errors import BatchOrderError
from trappm.profiler.graphs.nodes import ATEN
from trappm.profiler.records import IntArray
from trappm.profiler.traced_step import KernelKind, KernelTable, Pass, Size
from trappm.profiler.tracing.tensors import HALVES, bytes_of, channels_last, in_backward, tensors_of


@dataclass(frozen=True)
class Product:
    """Matrix products of one kernel: `products` of (rows, depth) by (depth, columns)."""

    rows: int
    columns: int
    depth: int
    products: int = 1
    window: int = 1
    """Height times width of a convolution's kernel."""
    stride: int = 1
    pixels: int = 1
    """Height times width of a convolution's result."""

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.depth * self.products


NOT_A_PRODUCT = Product(0, 0, 0, 0)


def convolution_kind(weight: Tensor, groups: int) -> KernelKind:
    if groups == 1:
        pointwise = all(size == 1 for size in weight.shape[2:])
        return KernelKind.POINTWISE if pointwise else KernelKind.DENSE
    return KernelKind.DEPTHWISE if weight.shape[1] == 1 else KernelKind.GROUPED


def convolution(
    which: Pass, images: Tensor, weight: Tensor, output: Tensor, stride: Sequence[int], groups: int
) -> Product:
    """Return the product of a convolution in one of its passes (implicit GEMM)."""
    window = math.prod(weight.shape[2:])
    batch, pixels = output.shape[0], math.prod(output.shape[2:])
    fan_in, fan_out = images.shape[1] // groups, output.shape[1] // groups
    if which is Pass.FORWARD:
        shape = batch * pixels, fan_out, fan_in * window
    elif which is Pass.DATA_GRADIENT:
        # Strided: each pixel of the image got gradients from only some pixels of the result.
        depth = fan_out * window * pixels / math.prod(images.shape[2:])
        shape = batch * math.prod(images.shape[2:]), fan_in, max(round(depth), 1)
    else:
        shape = fan_out, fan_in * window, batch * pixels
    return Product(*shape, groups, window, max(stride, default=1), pixels)


FACTORS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "_grouped_mm": ("self", "mat2"),
}


def product_of(name: str, call: Mapping[str, Any]) -> Product | None:
    """Return the product of an operator that multiplies matrices, or None."""
    if name.startswith("trappm::flex_attention"):
        shapes = call["query"].shape, call["value"].shape
        return attention_product(*shapes, call["keys"], is_backward="grad" in call)
    if name not in FACTORS:
        return None
    left, right = (call[factor] for factor in FACTORS[name])
    rows, columns, depth = left.shape[-2], right.shape[-1], left.shape[-1]
    products = left.shape[0] if left.dim() == 3 else 1
    if name == "_grouped_mm" and left.dim() == 2:  # experts share the tokens
        products = len(call["offs"])
        if right.dim() == 3:
            rows = max(rows // products, 1)
        else:
            depth = max(depth // products, 1)
    elif name == "_grouped_mm" and right.dim() == 2:
        columns = max(columns // products, 1)
    return Product(rows, columns, depth, products)


def attention_product(
    query: torch.Size, value: torch.Size, keys: int, *, is_backward: bool
) -> Product:
    """Return the product of a fused attention of queries (..., length, width).

    Its backward pass has five products instead of two.
    """
    width, value_width = query[-1], value[-1]
    depth = 3 * width + 2 * value_width if is_backward else width + value_width
    return Product(query[-2], keys, depth, query[:-2].numel())


def shape_of(kind: KernelKind, name: str, call: Mapping[str, Any], written: Tensor) -> Product:
    """Return the sizes that decide the efficiency of a kernel without a product."""
    first = next(iter(call.values()), None)
    first = first if isinstance(first, Tensor) else written
    if not first.dim():
        return NOT_A_PRODUCT
    if kind is KernelKind.BATCH_NORM:
        channels = first.shape[1]
        return replace(NOT_A_PRODUCT, columns=channels, depth=first.numel() // max(channels, 1))
    if kind is KernelKind.LAYER_NORM:
        width = first.shape[1 if "group" in name else -1]
        return replace(NOT_A_PRODUCT, columns=width, depth=width)
    if kind is KernelKind.SOFTMAX:
        axis = -1 if call.get("dim") is None else call["dim"]
        return replace(NOT_A_PRODUCT, columns=first.shape[axis], depth=first.shape[axis])
    if kind is KernelKind.REDUCTION:
        kept = max(written.numel(), 1)
        return replace(NOT_A_PRODUCT, columns=kept, depth=max(first.numel() // kept, 1))
    if kind is KernelKind.POOLING and "adaptive" not in name:
        sizes = call.get("kernel_size", ())
        return replace(NOT_A_PRODUCT, window=max(math.prod(sizes), 1))
    return NOT_A_PRODUCT


@cache
def kind_of(func: Any) -> KernelKind | None:
    """Return the kernel of an operator; None if it runs none, as for views.

    Elementwise operators are ELEMENTWISE here, whatever the layout of their tensors.
    """
    name = name_of(func)
    if name == "contiguous":
        return KernelKind.COPY
    if func.is_view or name.startswith(("empty", "sym_", "_assert")):
        return None
    if name in _KIND_OF:
        return _KIND_OF[name]
    if torch.Tag.pointwise in func.tags:
        return KernelKind.ELEMENTWISE
    for part, kind in _KIND_BY_WORD.items():
        if part in name:
            return kind
    return KernelKind.OTHER


def name_of(func: Any) -> str:
    """Return `add` for `aten::add_.Tensor`."""
    return str(func._schema.name).removeprefix("aten::").rstrip("_")


_KIND_OF = {
    row.operator: None if row.kernel == "none" else KernelKind[row.kernel.upper()]
    for row in ATEN.values()
    if row.kernel
}
_KIND_BY_WORD = {
    "batch_norm": KernelKind.BATCH_NORM,
    "softmax": KernelKind.SOFTMAX,
    "pool": KernelKind.POOLING,
    "pad": KernelKind.COPY,
    "upsample": KernelKind.INDEX,
    "grid_sampler": KernelKind.INDEX,
    "index": KernelKind.INDEX,
}


class Column(enum.IntEnum):
    """Columns of a kernel's row before its sizes (`Size`)."""

    KIND = 0
    PASS = 1
    HALF = 2
    CHANNELS_LAST = 3
    WINDOW = 4
    STRIDE = 5
    PIXELS = 6


DESCRIPTION = len(Column)
"""Number of columns before the sizes."""


class KernelLog:
    """The kernels of one step at one batch size, in order."""

    def __init__(self) -> None:
        self.forward_ended = False
        self._rows: list[tuple[int, ...]] = []
        self._counts: list[int] = []

    def begin_loss(self) -> None:
        """Note that the model has returned."""

    def operator(self, func: Any, call: Mapping[str, Any], output: Any) -> None:
        """Add the kernel of an operator, if it runs any.

        Args:
            func: ATen operator.
            call: Its arguments by name.
            output: Its result.
        """
        kind = kind_of(func)
        if kind is None:
            return
        name = name_of(func)
        read, written = tensors_of(call.values()), tensors_of((output,))
        if not written or (name == "contiguous" and read[0].stride() == written[0].stride()):
            return
        backward = self.forward_ended or in_backward()
        which = Pass.DATA_GRADIENT if backward else Pass.FORWARD
        product = product_of(name, call)
        if product is not None:
            pass
        elif kind is KernelKind.ELEMENTWISE:
            kind = _by_layout(read, written[0])
        elif kind is KernelKind.CAST and read and read[0].dtype == written[0].dtype:
            kind = KernelKind.COPY
        elif kind is KernelKind.FILL:
            read = []
        elif kind is KernelKind.BATCH_NORM and (call.get("training") or call.get("train")):
            read = read + read[: 2 if "backward" in name else 1]  # statistics first
        if name == "copy":
            read = read[1:]
        elif name == "embedding":  # the rows that are picked, not the whole table
            read = [*written, *read[1:]]
        self.add(kind, which, read, written, product or shape_of(kind, name, call, written[0]))

    def add_accumulation(self, gradient: Tensor, other: Tensor) -> None:
        """Add the in-place addition of a gradient to another."""
        kind = _by_layout([gradient, other], gradient)
        self.add(kind, Pass.DATA_GRADIENT, [gradient, other], [gradient])

    def convolution(self, call: Mapping[str, Any], images: Tensor, output: Tensor) -> None:
        """Add the forward pass of a convolution, with images as the kernel reads them."""
        weight, groups, stride = call["weight"], call["groups"], call["stride"]
        if call["transposed"]:  # PyTorch runs the gradient of the other direction
            product = convolution(Pass.DATA_GRADIENT, output, weight, images, stride, groups)
        else:
            product = convolution(Pass.FORWARD, images, weight, output, stride, groups)
        kind = convolution_kind(weight, groups)
        self.add(kind, Pass.FORWARD, [images, weight], [output], product)
        if call["bias"] is not None:
            self.add(KernelKind.BROADCAST, Pass.FORWARD, [output, call["bias"]], [output])

    def convolution_backward(
        self, call: Mapping[str, Any], gradient: Tensor, gradients: Sequence[Tensor | None]
    ) -> None:
        """Add the other two passes, with the gradient as the kernel reads it."""
        images, weight, groups, stride = (
            call[name] for name in ("input", "weight", "groups", "stride")
        )
        kind = convolution_kind(weight, groups)
        transposed = call["transposed"]
        source, result = (gradient, images) if transposed else (images, gradient)
        data = Pass.FORWARD if transposed else Pass.DATA_GRADIENT
        of_images, of_weight, of_bias = gradients
        if of_images is not None:
            product = convolution(data, source, weight, result, stride, groups)
            self.add(kind, Pass.DATA_GRADIENT, [gradient, weight], [of_images], product)
        if of_weight is not None:
            product = convolution(Pass.WEIGHT_GRADIENT, source, weight, result, stride, groups)
            self.add(kind, Pass.WEIGHT_GRADIENT, [gradient, images], [of_weight], product)
        if of_bias is not None:
            self.add(KernelKind.REDUCTION, Pass.DATA_GRADIENT, [gradient], [of_bias])

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        output: Tensor,
        causal: bool,
        gradients: Sequence[Tensor] = (),
    ) -> None:
        """Add a fused attention, or its backward pass."""
        read = [query, key, value] + ([] if mask is None else [mask])
        written = [output]
        if gradients:
            read, written = [*read, output, output], list(gradients)
        which = Pass.DATA_GRADIENT if gradients else Pass.FORWARD
        keys = key.shape[-2]
        if causal:  # the kernels leave out blocks above the diagonal
            keys = (keys + 1) // 2
        product = attention_product(query.shape, value.shape, keys, is_backward=bool(gradients))
        self.add(KernelKind.ATTENTION, which, read, written, product)

    def add(
        self,
        kind: KernelKind,
        which: Pass,
        read: Sequence[Tensor],
        written: Sequence[Tensor],
        product: Product = NOT_A_PRODUCT,
        count: int = 1,
    ) -> None:
        """Add `count` kernels that read and write these tensors."""
        read_bytes, written_bytes = map(bytes_of, (read, written))
        if not (read_bytes or written_bytes):
            return
        self._counts.append(count)
        self._rows.append(  # in the order of `Column` and `Size`
            (
                int(kind),
                int(which),
                any(t.dtype in HALVES for t in (read[:2] or written)),
                any(map(channels_last, (*read[:1], *written[:1]))),
                product.window,
                product.stride,
                product.pixels,
                read_bytes,
                written_bytes,
                product.flops,
                product.rows,
                product.columns,
                product.depth,
                product.products,
            )
        )

    def __len__(self) -> int:
        return len(self._rows)

    def sizes(self) -> IntArray:
        """Return the sizes of each kernel before fusion, by `Size` (n, 7)."""
        return KernelLog.rows(self)[:, DESCRIPTION:]

    def rows(self) -> IntArray:
        return np.array(self._rows, dtype=np.int64).reshape(-1, DESCRIPTION + len(Size))

    def counts(self) -> IntArray:
        return np.array(self._counts, dtype=np.int64)


def _weight_gradients(rows: IntArray, sizes: IntArray) -> npt.NDArray[np.bool_]:
    """Return which products of a backward pass have the shape of a weight's gradient (n).

    Its rows and columns are those of a weight, and its depth the rows of the forward product.
    """
    order = [Size.ROWS, Size.COLUMNS, Size.DEPTH]
    forward = (rows[:, Column.KIND] == KernelKind.LINEAR) & (rows[:, Column.PASS] == Pass.FORWARD)
    shapes = set[tuple[int, ...]]()
    for samples, outputs, inputs in sizes[forward][:, order].tolist():
        shapes |= {(outputs, inputs, samples), (inputs, outputs, samples)}
    return np.array([tuple(shape) in shapes for shape in sizes[:, order].tolist()], dtype=bool)


def kernel_table(first: KernelLog, second: KernelLog, batch_sizes: tuple[int, int]) -> KernelTable:
    """Return the kernels for every batch size from those at two; equal ones are one row.

    Args:
        first, second, batch_sizes: Logs, whose sizes are affine in the batch size, and their sizes.

    Raises:
        BatchOrderError: More than the kernels' sizes depends on the batch size.
    """
    rows, others = first.rows(), second.rows()
    if rows.shape != others.shape or (rows[:, :DESCRIPTION] != others[:, :DESCRIPTION]).any():
        raise BatchOrderError("the order of its kernels changes with the batch size")
    sizes, more = rows[:, DESCRIPTION:], others[:, DESCRIPTION:]
    slope = (more - sizes) // max(batch_sizes[1] - batch_sizes[0], 1)
    fixed = sizes - slope * batch_sizes[0]
    linear = (rows[:, Column.KIND] == KernelKind.LINEAR) & (
        rows[:, Column.PASS] == Pass.DATA_GRADIENT
    )
    of_weights = slope[:, Size.DEPTH] > 0
    if batch_sizes[0] == batch_sizes[1]:
        of_weights = _weight_gradients(rows, sizes)
    rows[linear & of_weights, Column.PASS] = Pass.WEIGHT_GRADIENT
    affine = np.stack([fixed, slope], -1).reshape(len(rows), 2 * len(Size))
    whole = np.hstack([rows[:, :DESCRIPTION], affine])
    _, at, inverse = np.unique(whole, axis=0, return_index=True, return_inverse=True)
    counts = np.bincount(inverse.ravel(), first.counts(), len(at)).astype(np.int32)
    order = np.argsort(at)
    once = whole[at[order]]
    return KernelTable(
        kinds=once[:, Column.KIND].astype(np.int8),
        passes=once[:, Column.PASS].astype(np.int8),
        half=once[:, Column.HALF].astype(np.bool_),
        channels_last=once[:, Column.CHANNELS_LAST].astype(np.bool_),
        windows=once[:, Column.WINDOW].astype(np.int32),
        strides=once[:, Column.STRIDE].astype(np.int32),
        pixels=once[:, Column.PIXELS].astype(np.int32),
        sizes=once[:, DESCRIPTION:].reshape(-1, len(Size), 2),
        counts=counts[order],
    )


def _by_layout(read: Sequence[Tensor], written: Tensor) -> KernelKind:
    """Return the kind of a kernel that works element by element."""
    stride = written.stride()
    if all(t.stride() == stride for t in read if t.dim()):
        return KernelKind.ELEMENTWISE
    whole = [t for t in read if t.shape == written.shape and 0 not in t.stride()]
    same = all(t.stride() == stride for t in whole)
    return KernelKind.BROADCAST if same else KernelKind.STRIDED
