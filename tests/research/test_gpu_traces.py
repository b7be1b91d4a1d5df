"""Kernels and allocations from PyTorch's traces, and the recorded files of an H100."""

from __future__ import annotations

import csv
import lzma
from pathlib import Path
from typing import Any

from research.gpu_day import gpu_traces
from trappm.profiler.records import Configuration

ROOT = Path(__file__).parents[2]
STEP = Configuration(architecture="resnet18", batch_size=2, input_size=64)


def test_kernels_are_those_of_the_second_step_with_who_launched_them() -> None:
    def event(cat: str, name: str, ts: int, number: int, **facts: Any) -> dict[str, Any]:
        args = {"External id": number, **facts}
        return {"cat": cat, "name": name, "ts": ts, "dur": ts / 10, "args": args}

    events = [
        event("cpu_op", "aten::conv", 1, 7, **{"Input Dims": [[2, 3]], "Input type": ["float"]}),
        event("kernel", "second", 40, 7, grid=[1, 1, 1], block=[32, 1, 1]),
        event("kernel", "first", 20, 7),
        event("gpu_memset", "Memset", 50, 8),
        event("gpu_memset", "Memset", 30, 8),
        {"cat": "python_function", "name": "forward", "ts": 1},
    ]
    rows = [
        dict(zip(gpu_traces.COLUMNS, row, strict=True))
        for row in gpu_traces.kernel_rows(STEP, events)
    ]
    assert [(row["order"], row["kernel"]) for row in rows] == [(0, "second"), (1, "Memset")]
    assert rows[0]["operator"] == "aten::conv"
    assert (rows[0]["input_shapes"], rows[0]["duration_us"]) == ("[[2, 3]]", 4.0)
    assert (rows[0]["architecture"], rows[0]["phase"]) == ("resnet18", "train")
    assert rows[1]["operator"] == ""


def test_requests_number_their_blocks_and_name_who_asked() -> None:
    frame = {"filename": "/somewhere/conv.py", "line": 3, "name": "forward"}
    trace = [
        {"action": "segment_alloc", "addr": 0, "size": 2048},
        {"action": "alloc", "addr": 0, "size": 512, "frames": [frame]},
        {"action": "free_requested", "addr": 9, "size": 512},  # from before the recording
        {"action": "alloc", "addr": 512, "size": 100},
        {"action": "free_requested", "addr": 0, "size": 512},
        {"action": "free_completed", "addr": 0, "size": 512},
        {"action": "alloc", "addr": 0, "size": 300},
    ]
    record = gpu_traces.allocation_record(STEP, trace, (1024, 2048))
    assert record["requests"] == [[512, ["conv.py:3:forward"]], [100, []], [-1], [300, []]]
    assert record["segments_bytes"] == [2048]
    assert Configuration(**record["configuration"]) == STEP


def test_recorded_kernels_have_these_columns() -> None:
    path = ROOT / "examples" / "data" / "h100" / "traces" / "kernels.csv.xz"
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == gpu_traces.COLUMNS
    assert len({tuple(row.values())[:7] for row in rows}) == 24
    assert all(float(row["duration_us"]) > 0 for row in rows)
