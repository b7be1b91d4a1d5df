"""NeuSight's published kernels: forward passes in fp32 on NVIDIA's cards, TF32 switched off.

Of sitar-lab/NeuSight, "Forecasting GPU Performance for Deep Learning Training and Inference"
(ASPLOS 2025), PyTorch 2.1.0 under CUDA 12.1. Each time is the mean of the fastest 5 of 25 runs
between two CUDA events, so the launch is inside; convolutions were timed with cuDNN's autotuning.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from research.importers.sheets import Cells, number_in, read_rows, whole_in
from research.priors.kernel_calls import KernelCall, Operator
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import InputError

SOURCE = "NeuSight, published kernels"
_MAX_MS, _MAX_SIZE = 1e6, 1e10
COLUMNS = frozenset(
    ("op", "device", "latency_ms", "b", "m", "n", "k", "h", "c_in", "c_out", "kernel_size",
     "in_size", "stride", "padding")
)  # fmt: skip
_ELEMENTWISE = {"batch": "b", "width": "h"}
_SIZES = {
    Operator.LINEAR: {"batch": "b", "rows": "m", "inputs": "n", "outputs": "k"},
    Operator.MATMUL: {"batch": "b", "rows": "m", "depth": "n", "columns": "k"},
    Operator.CONV2D: {
        "batch": "b", "inputs": "c_in", "outputs": "c_out", "height": "in_size",
        "window": "kernel_size", "stride": "stride",
    },
}  # fmt: skip
"""Columns of the sizes of operators; all others have those of `_ELEMENTWISE`."""
_OPERATORS = {
    "linear": Operator.LINEAR,
    "bmm": Operator.MATMUL,
    "conv": Operator.CONV2D,
    "add": Operator.ADD,
    "addu": Operator.ADD_SCALAR,
    "mul": Operator.MULTIPLY,
    "mulu": Operator.MULTIPLY_SCALAR,
    "div": Operator.DIVIDE,
    "divu": Operator.DIVIDE_SCALAR,
    "pow": Operator.POWER,
    "powu": Operator.POWER_SCALAR,
    "relu": Operator.RELU,
    "gelu": Operator.GELU,
    "tanh": Operator.TANH,
    "ln": Operator.LAYER_NORM,
    "softmax": Operator.SOFTMAX,
}


class TimedKernel(NamedTuple):
    """A row of a NeuSight table."""

    device: str
    """`a100-pcie-40gb` for A100-PCIE-40GB: cards of one name differ by memory and socket."""
    call: KernelCall
    time_ms: float


def read_neusight(path: Path) -> Iterator[TimedKernel]:
    """Yield the kernels of a NeuSight CSV file, which may be compressed with gzip.

    Raises:
        InputError: The file is not such a table, or a row cannot be read; with its number.
    """
    return read_rows(path, COLUMNS, _timed_kernel, "table")


def _timed_kernel(row: Cells) -> TimedKernel:
    name = row["device"]
    if not 1 <= len(name) <= 64 or not name.isascii() or not name.isprintable():
        raise InputError(f"device is {name[:60]!r}; it must be the name of a card")
    time_ms = number_in(row, "latency_ms", _MAX_MS)
    return TimedKernel("-".join(str(read_name(name)).split()), _call(row), time_ms)


def _call(row: Cells) -> KernelCall:
    operator = _OPERATORS.get(row["op"])
    if operator is None:
        raise InputError(f"op is {row['op'][:60]!r}; it must be one of {', '.join(_OPERATORS)}")
    columns = _SIZES.get(operator, _ELEMENTWISE)
    sizes: dict[str, Any] = {
        name: whole_in(row, column, _MAX_SIZE) for name, column in columns.items()
    }
    if operator is not Operator.CONV2D:
        return KernelCall.of(operator, **sizes)
    call = KernelCall.of(operator, **sizes, groups=1)
    if number_in(row, "padding", _MAX_SIZE) != call.padding:
        raise InputError(f"padding is {row['padding']}; here it must be {call.padding}")
    return call
