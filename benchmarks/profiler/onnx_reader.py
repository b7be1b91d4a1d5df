"""Files of all eleven families: milliseconds from file to features, and counts against PyTorch's.

    python benchmarks/profiler/onnx_reader.py [--models 110] [--folder FOLDER]
        [--export-seconds 3600]

Exporting takes seconds a model, and is done once: files and PyTorch's own counts stay in the
folder, and an interrupted run goes on where it was. Measured are one thread and a warm process,
which has PyTorch loaded as a prediction has. Features are those of the nodes and the static ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.onnx_export import export_onnx, file_graph
from trappm.profiler.errors import TrappmError
from trappm.profiler.graphs.features import node_features, static_features
from trappm.profiler.graphs.nodes import CONVOLUTIONS, PRODUCTS
from trappm.profiler.models import zoo
from trappm.profiler.models.families import FAMILIES, family_of

LARGEST_PARAMETERS = 120e6
REPEATS = 5
BATCH_SIZE = 8


def chosen(count: int) -> list[str]:
    """About as many architectures of each family, evenly spread by name."""
    share = -(-count // len(FAMILIES))
    names = []
    for family in FAMILIES:
        members = [name for name in zoo.architectures(["*"]) if family_of(name) == family]
        names += members[:: max(1, len(members) // share)]
    return names


def exported(folder: Path, names: list[str], seconds: float) -> Iterator[tuple[Path, Any]]:
    """Files with PyTorch's counts, as many as are there or can be made within these seconds.

    Where only the time for counting was lacking, None stands for the counts.
    """
    end = time.monotonic() + seconds
    for name in names:
        path, counts = folder / f"{name}.onnx", folder / f"{name}.json"
        if not counts.exists() and time.monotonic() < end:
            exported = json.dumps(_export(name, path))
            counts.with_suffix(".part").write_text(exported)
            counts.with_suffix(".part").rename(counts)  # whole, or not there
        if counts.exists():
            exported = json.loads(counts.read_text())
            if "refused" in exported:
                print(f"not taken: {exported['refused'].split('  [')[0]}")
            else:
                yield path, exported
        elif path.exists():
            yield path, None  # no time was left to count it


def _export(name: str, path: Path) -> dict[str, Any]:
    size = zoo.native_input_size(name) or 224
    with torch.device("meta"):
        module = zoo.create_model(name, size).eval()
        images = torch.empty(BATCH_SIZE, 3, size, size)
    parameters = sum(p.numel() for p in module.parameters())
    if parameters > LARGEST_PARAMETERS:
        return {"refused": f"{name} has {parameters:,} parameters"}
    try:
        if not path.exists():
            export_onnx(name, size, path)
    except TrappmError as error:
        return {"refused": str(error)}
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        module(images)
    return {"macs": counter.get_total_flops() // 2, "parameters": parameters}


def measured_ms(path: Path) -> list[tuple[float, float]]:
    """Milliseconds from file to features, by the clock and of the CPU, several times."""
    runs = []
    for _ in range(REPEATS):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        graph = file_graph(path).at(BATCH_SIZE)
        node_features(graph)
        static_features(graph)
        cpu_ms = 1000 * (time.process_time() - cpu_begin)
        runs.append((1000 * (time.perf_counter() - begin), cpu_ms))
    return runs


def compare(files: list[tuple[Path, Any]]) -> None:
    """Prints how far MACs of linear algebra and parameters are from PyTorch's, at most."""
    differences: dict[str, dict[str, float]] = {"macs": {}, "parameters": {}}
    for path, counts in files:
        graph = file_graph(path).at(BATCH_SIZE)
        linear = sum(
            macs
            for macs, operator in zip(graph.macs.tolist(), graph.operators, strict=True)
            if operator in CONVOLUTIONS | PRODUCTS
        )
        exported = {"macs": linear, "parameters": int(graph.parameters.sum())}
        for name, values in differences.items():
            values[path.stem] = exported[name] / counts[name] - 1
    for name, values in differences.items():
        ordered = sorted((v for v in values.items() if v[1]), key=lambda v: -abs(v[1]))
        print(f"{name} against PyTorch: {len(values) - len(ordered)} of {len(values)} equal")
        for stem, value in ordered[:10]:
            print(f"  {100 * value:+9.4f} %  {stem}")


def main() -> None:
    """Prints the median, the 95th percentile and the slowest, then the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=110)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "trappm-onnx")
    parser.add_argument("--export-seconds", type=float, default=3600.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.folder.mkdir(exist_ok=True)
    files = list(exported(arguments.folder, chosen(arguments.models), arguments.export_seconds))
    runs = {path.stem: measured_ms(path) for path, _ in files}
    for place, title in enumerate(("by the clock", "of the CPU")):
        for kind, figure in (("best", min), ("median", statistics.median)):
            times_ms = sorted(figure([run[place] for run in values]) for values in runs.values())
            p95_ms = times_ms[int(0.95 * len(times_ms))]
            print(
                f"{len(times_ms)} files, ms {title}, {kind} of {REPEATS} runs: median "
                f"{statistics.median(times_ms):.1f}, p95 {p95_ms:.1f}, longest {times_ms[-1]:.1f}"
            )
    for name in sorted(runs, key=lambda name: -min(runs[name])[0])[:10]:
        print(f"  {min(runs[name])[0]:8.1f} ms  {name}")
    compare([(path, counts) for path, counts in files if counts is not None])


if __name__ == "__main__":
    main()
