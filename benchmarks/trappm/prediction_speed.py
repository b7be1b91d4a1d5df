"""How long predictions take: the first of a new process, and the next ones (docs/snapshots.md).

    PYTHONPATH=. python benchmarks/trappm/prediction_speed.py [--model resnet50] [--runs 9]

Exports the model to ONNX (with weights, so the file has its true size), asks about it once so that
its profiles are kept, then measures. "First" is `import trappm` and a prediction in a new process,
wall and CPU; "next" is a prediction in the same process, of the same batch size and of a new one
each time. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICES = (("a100", "train"), ("rtx3090", "train"), ("rtx4090", "infer"))
FIRST = """
import os, sys, time
begin = time.time(), time.process_time()
import trappm
trappm.predict(sys.argv[1], batch_size=64, device=sys.argv[2], phase=sys.argv[3])
print(time.time() - begin[0], time.process_time() - begin[1])
"""


def export(model: str, path: Path) -> None:
    """As anyone exports one: with weights, at a free batch size."""
    import torch

    from trappm.profiler.models.zoo import create_model

    image = torch.zeros(1, 3, 224, 224)
    torch.onnx.export(
        create_model(model, 224).eval(), image, path, dynamo=False, opset_version=17,
        input_names=["x"], dynamic_axes={"x": {0: "batch"}},
    )  # fmt: skip


def first(path: str, device: str, phase: str, runs: int) -> dict[str, float]:
    rows = []
    for _ in range(runs):
        arguments = [sys.executable, "-c", FIRST, path, device, phase]
        done = subprocess.run(arguments, check=True, capture_output=True, text=True)
        rows.append([float(x) for x in done.stdout.split()])
    wall, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
    return {"first_wall_s": round(wall, 2), "first_cpu_s": round(cpu, 2)}


def following(path: str, device: str, phase: str, runs: int) -> dict[str, float]:
    import trappm

    def ask(batch: int) -> Any:
        return trappm.predict(path, batch_size=batch, device=device, phase=phase)

    ask(64)
    return {
        "next_same_ms": _median_ms(lambda _: ask(64), runs),
        "next_new_batch_ms": _median_ms(lambda i: ask(65 + i), runs),
    }


def _median_ms(ask: Callable[[int], Any], runs: int) -> float:
    taken = []
    for i in range(runs):
        begin = time.process_time()
        ask(i)
        taken.append(1000 * (time.process_time() - begin))
    return round(statistics.median(taken), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--runs", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRAPPM_HOME"] = folder
        path = Path(folder) / "model.onnx"
        export(arguments.model, path)
        print(json.dumps({"file_mb": round(path.stat().st_size / 1e6)}))
        for device, phase in DEVICES:
            begin = time.process_time()
            following(str(path), device, phase, 1)
            row: dict[str, Any] = {"device": device, "phase": phase}
            row["not_kept_cpu_s"] = round(time.process_time() - begin, 2)
            row |= following(str(path), device, phase, 5 * arguments.runs)
            row |= first(str(path), device, phase, arguments.runs)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
