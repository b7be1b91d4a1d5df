"""NeuSight's published kernels: forward passes in fp32 on NVIDIA's cards, TF32 switched off.

Of sitar-lab/NeuSight, "Forecasting GPU Performance for Deep Learning Training and Inference"
(ASPLOS 2025), PyTorch 2.1.0 under CUDA 12.1. Each time is the mean of the fastest 5 of 25 runs
between two CUDA events, so the launch is inside; convolutions were timed with cuDNN's autotuning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from research.importers.sheets import UNTOLD, UNTOLD_TIME, Cells, number_in, read_rows, whole_in
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import InputError
from trappm.profiler.kernels.kernel_call import KernelCall, KernelMeasurement, Operator
from trappm.profiler.records import Outcome, Protocol, Provenance

SOURCE = "NeuSight, published kernels"
PROTOCOL = Protocol(name="neusight", warmup_steps=0, min_steps=25, max_steps=25)
_LONGEST_MS, _LARGEST_SIZE = 1e6, 1e10
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
_MISSING = dict.fromkeys(("power_w", "energy_j"), UNTOLD)


def read_neusight(path: Path) -> Iterator[KernelMeasurement]:
    """Yield the kernels of a NeuSight CSV file, which may be compressed with gzip.

    Raises:
        InputError: The file is not such a table, or a row cannot be read; with its number.
    """
    return read_rows(path, COLUMNS, _measurement, "table")


def _measurement(row: Cells) -> KernelMeasurement:
    name = row["device"]
    if not 1 <= len(name) <= 64 or not name.isascii() or not name.isprintable():
        raise InputError(f"device is {name[:60]!r}; it must be the name of a card")
    call, time_ms = _call(row), number_in(row, "latency_ms", _LONGEST_MS)
    identity = f"{name} {call.text} {time_ms} {row.get('rep')}"
    return KernelMeasurement(
        call=call,
        device=_environment(name)["device"],
        outcome=Outcome.OK,
        protocol=PROTOCOL,
        started_at=UNTOLD_TIME,
        duration_s=0.0,
        attempt_key=hashlib.sha256(f"neusight {identity}".encode()).hexdigest()[:32],
        provenance=Provenance.IMPORTED,
        time_ms=time_ms,
        missing=_MISSING,
        environment=_environment(name),
    )


@lru_cache(maxsize=64)
def _environment(name: str) -> Mapping[str, Any]:
    """Return the environment of a card by its name; one object for all of its rows."""
    return {
        # `a100-pcie-40gb` for A100-PCIE-40GB: cards of one name differ by memory and socket.
        "device": "-".join(str(read_name(name)).split()),
        "device_name": name,
        "torch": "2.1.0",
        "cuda": "12.1",
        "cudnn": "8.9.2",
        "tf32": "not used",
        "cudnn_benchmark": True,
        "source": SOURCE,
    }


def _call(row: Cells) -> KernelCall:
    operator = _OPERATORS.get(row["op"])
    if operator is None:
        raise InputError(f"op is {row['op'][:60]!r}; it must be one of {', '.join(_OPERATORS)}")
    columns = _SIZES.get(operator, _ELEMENTWISE)
    sizes: dict[str, Any] = {
        name: whole_in(row, column, _LARGEST_SIZE) for name, column in columns.items()
    }
    if operator is not Operator.CONV2D:
        return KernelCall.of(operator, **sizes)
    call = KernelCall.of(operator, **sizes, groups=1)
    if number_in(row, "padding", _LARGEST_SIZE) != call.padding:
        raise InputError(f"padding is {row['padding']}; here it must be {call.padding}")
    return call
