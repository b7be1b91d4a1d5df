"""Milliseconds from an ONNX file to the features of its graph, over models of all eleven families.

    python benchmarks/onnx_reader.py [--models 110] [--folder FOLDER]

The files are exported from timm at native input sizes on the first run, and kept in the folder.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from profiler import zoo
from profiler.errors import TrappmError
from profiler.export import export_onnx
from profiler.families import FAMILIES, family_of
from profiler.features import node_features, static_features
from profiler.onnx_reader import read_onnx

LARGEST_PARAMETERS = 120e6
REPEATS = 3


def exported(folder: Path, count: int) -> list[Path]:
    """About as many files of each family, its architectures evenly spread by name."""
    by_family = {
        family: [n for n in zoo.architectures(["*"]) if family_of(n) == family]
        for family in FAMILIES
    }
    share = -(-count // len(FAMILIES))
    paths = []
    for names in by_family.values():
        for name in names[:: max(1, len(names) // share)]:
            path = folder / f"{name}.onnx"
            if not path.exists():
                with torch.device("meta"):
                    size = zoo.native_input_size(name) or 224
                    module = zoo.create_model(name, size)
                if sum(p.numel() for p in module.parameters()) > LARGEST_PARAMETERS:
                    continue
                try:
                    export_onnx(name, size, path)
                except TrappmError as error:
                    print(f"not exported: {error}")
                    continue
            paths.append(path)
    return paths


def main() -> None:
    """Prints the median, the 95th percentile and the slowest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=110)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "trappm-onnx")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.folder.mkdir(exist_ok=True)
    times_ms = {}
    for path in exported(arguments.folder, arguments.models):
        runs = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            graph = read_onnx(path).at(8)
            node_features(graph)
            static_features(graph)
            runs.append(1000 * (time.perf_counter() - begin))
        times_ms[path.stem] = statistics.median(runs)
    ordered = sorted(times_ms.values())
    p95_ms = ordered[int(0.95 * len(ordered))]
    print(f"{len(ordered)} models: median {statistics.median(ordered):.1f} ms, p95 {p95_ms:.1f} ms")
    for name in sorted(times_ms, key=lambda name: -times_ms[name])[:10]:
        print(f"  {times_ms[name]:8.1f} ms  {name}")


if __name__ == "__main__":
    main()
