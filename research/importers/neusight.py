"""NeuSight's published kernels: forward passes in fp32 on NVIDIA's cards, TF32 switched off.

Of sitar-lab/NeuSight, "Forecasting GPU Performance for Deep Learning Training and Inference"
(ASPLOS 2025), PyTorch 2.1.0 under CUDA 12.1. Each time is the mean of the fastest 5 of 25 runs
between two CUDA events, so the launch is inside; convolutions were timed with cuDNN's autotuning.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from research.importers.sheets import UNTOLD_TIME
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import InputError
from trappm.profiler.kernels.kernel_call import KernelCall, Operator
from trappm.profiler.kernels.kernel_measurement import KernelMeasurement
from trappm.profiler.records import Outcome, Protocol, Provenance
from trappm.store.exchange.files import check_columns, checked_size

SOURCE = "NeuSight, published kernels"
PROTOCOL = Protocol(name="neusight", warmup_steps=0, min_steps=25, max_steps=25)
MAX_BYTES = 256 << 20
"""Of the table when it is unpacked; both files have 12 MiB."""
_MAX_LINE = 1 << 16
"""Names of kernels with all their parameters are long."""
_LONGEST_MS, _LARGEST_SIZE = 1e6, 1e10
_SIZES = ("b", "m", "n", "k", "h", "c_in", "c_out", "kernel_size", "in_size", "stride", "padding")
_COLUMNS = ("op", "device", "latency_ms", *_SIZES)
_ROWS = {
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
_MISSING = {"power_w": "not told by the source", "energy_j": "not told by the source"}


def read_neusight(path: Path) -> Iterator[KernelMeasurement]:
    """The kernels of a CSV file of NeuSight's, packed with gzip or not.

    Raises:
        InputError: the file cannot be read, is no such table, or a row cannot be; with its number.
    """
    checked_size(path)
    with _opened(path) as file:
        reader = csv.DictReader(_bounded(file), strict=True)
        try:
            names = reader.fieldnames or ()
            check_columns(names)
            if missing := sorted({*_COLUMNS} - {*names}):
                raise InputError(f"the table lacks the columns {', '.join(missing)}")
            for row in reader:
                yield _measurement(row)
        except (InputError, csv.Error, UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"{path.name}, line {reader.line_num}: {error}; nothing was imported"
            ) from error


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _bounded(file: IO[str]) -> Iterator[str]:
    """The lines, as long as all of them stay within MAX_BYTES: a small file may unpack to any."""
    read = 0
    while line := file.readline(_MAX_LINE + 1):
        read += len(line)
        if len(line) > _MAX_LINE or read > MAX_BYTES:
            raise InputError("a line or the whole is too long for such a table")
        yield line


def _measurement(row: Mapping[str, str | None]) -> KernelMeasurement:
    name = row["device"] or ""
    if not 1 <= len(name) <= 64 or not name.isascii() or not name.isprintable():
        raise InputError(f"device is {name[:60]!r}; it must be the name of a card")
    call, time_ms = _call(row), _number("latency_ms", row["latency_ms"])
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
    """Of a card by its name; the same object for all of its rows."""
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


def _call(row: Mapping[str, str | None]) -> KernelCall:
    op = row["op"] or ""

    def size(name: str) -> int:
        value = _number(name, row[name])
        if value != int(value):
            raise InputError(f"{name} is {value}; it must be a whole number")
        return int(value)

    if op in _ROWS:
        return KernelCall.of(_ROWS[op], batch=size("b"), width=size("h"))
    if op == "linear":
        return KernelCall.of(
            Operator.LINEAR, batch=size("b"), rows=size("m"), inputs=size("n"), outputs=size("k")
        )
    if op == "bmm":
        return KernelCall.of(
            Operator.MATMUL, batch=size("b"), rows=size("m"), depth=size("n"), columns=size("k")
        )
    if op == "conv":
        window = size("kernel_size")
        call = KernelCall.of(
            Operator.CONV2D, batch=size("b"), inputs=size("c_in"), outputs=size("c_out"),
            height=size("in_size"), window=window, stride=size("stride"), groups=1,
        )  # fmt: skip
        if _number("padding", row["padding"]) != call.padding:
            raise InputError(f"padding is {row['padding']}; here it must be {call.padding}")
        return call
    raise InputError(
        f"op is {op[:60]!r}; it must be linear, bmm, conv or one of {', '.join(_ROWS)}"
    )


def _number(name: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = 0.0
    if not 0 < value < (_LONGEST_MS if name == "latency_ms" else _LARGEST_SIZE):
        raise InputError(f"{name} is {(text or '')[:40]!r}; it must be a number above 0")
    return value
