"""How well a training step is known from an ONNX file: by a module rebuilt from it, and roughly.

    python benchmarks/profiler/rebuilt_modules.py --results FILE [--files FOLDER] [--seconds N]
    python benchmarks/profiler/rebuilt_modules.py --corpus

Of every module of timm one small model is exported (native input size, without weights), and three
accounts of its training step are compared at batch 32: traced on the model itself, on the module
rebuilt from the file, and guessed from the graph (live memory only); and whether the file has the
graph of the name. Goes on where it stopped; a model that takes over a minute to export is left out
and told. With `--corpus`, how many of the files in the `onnx` wheel have a graph and a step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

BATCH_SIZE = 32
EXPORT_SECONDS = 60
SMALL = (
    "femto", "atto", "pico", "nano", "zepto", "xxtiny", "xxs", "xtiny", "tiny", "mini", "_xs",
    "small", "_s", "18", "_t", "_b0", "_a0", "pt",
)  # fmt: skip
"""Marks of small models, smallest first."""


def models() -> list[str]:
    """One small model of every module of timm."""
    from trappm.profiler.models.torchvision_shim import register_missing_operators

    register_missing_operators()
    import timm

    chosen = []
    for module in sorted(timm.list_modules()):
        names = sorted(timm.list_models(module=module), key=lambda name: (len(name), name))
        names = [n for n in names if not n.startswith("test_")] or names
        if names:
            small = (n for mark in SMALL for n in names if mark in n)
            chosen.append(next(small, names[0]))
    return sorted(set(chosen))


def export(name: str, input_size: int, path: Path) -> None:
    from tests.onnx_export import export_onnx

    def late(*_: object) -> None:
        raise TimeoutError(f"export took over {EXPORT_SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(EXPORT_SECONDS)
    try:
        export_onnx(name, input_size, path)
    finally:
        signal.alarm(0)


def compare(name: str, folder: Path) -> dict[str, Any]:
    from trappm.learner.physics.step_memory import step_memory
    from trappm.learner.workload import Workload
    from trappm.profiler.errors import TrappmError
    from trappm.profiler.models import zoo
    from trappm.profiler.static_profile import file_profile, graph_template, step_profile

    input_size = zoo.native_input_size(name) or 224
    path = folder / f"{name}.onnx"
    row: dict[str, Any] = {"model": name}
    try:
        original = step_profile(name, input_size)
        if not path.exists():
            export(name, input_size, path)
    except TrappmError as error:
        return {**row, "left_out": str(error)[:200]}
    memory = original.memory(BATCH_SIZE)
    row |= {"live": memory.live_mib, "reserved": memory.reserved_mib}
    row["saved"] = original.saved_bytes.at(BATCH_SIZE)
    try:
        started = time.process_time()
        profile = file_profile(path)
        row["seconds"] = time.process_time() - started
        graph = profile.graph.at(BATCH_SIZE)
    except TrappmError as error:
        return {**row, "left_out": str(error)[:200]}
    if profile.step is not None:
        memory = profile.step.memory(BATCH_SIZE)
        row |= {"rebuilt_live": memory.live_mib, "rebuilt_reserved": memory.reserved_mib}
        row["rebuilt_saved"] = profile.step.saved_bytes.at(BATCH_SIZE)
    else:
        row["refusal"] = profile.step_refusal
    row["same_graph"] = profile.graph.content_hash == graph_template(name, input_size).content_hash
    row["graph_live"] = step_memory(Workload(graph=graph)).live_mib
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    judged = [row for row in rows if "left_out" not in row]
    rebuilt = [row for row in judged if "rebuilt_live" in row]
    table: dict[str, Any] = {
        "models": len(rows),
        "left_out": {r["model"]: r["left_out"] for r in rows if "left_out" in r},
        "judged": len(judged),
        "rebuilt": len(rebuilt),
        "another_graph": [r["model"] for r in judged if not r["same_graph"]],
        "refused": {r["model"]: r["refusal"] for r in judged if "refusal" in r},
        "seconds_median_p95": np.quantile([r["seconds"] for r in judged], [0.5, 0.95])
        .round(2)
        .tolist(),
    }
    accounts = (
        ("rebuilt", rebuilt, ("live", "reserved", "saved")),
        ("graph", judged, ("live",)),
    )
    for source, chosen, sizes in accounts:
        for what in sizes:
            gaps = np.array([abs(r[f"{source}_{what}"] / r[what] - 1) * 100 for r in chosen])
            worst = int(gaps.argmax())
            table[f"{source}_{what}"] = {
                "median_%": round(float(np.median(gaps)), 2),
                "p95_%": round(float(np.quantile(gaps, 0.95)), 2),
                "worst_%": [chosen[worst]["model"], round(float(gaps[worst]), 1)],
                "share_within_1_%": round(float((gaps <= 1).mean()), 3),
                "share_within_5_%": round(float((gaps <= 5).mean()), 3),
            }
    return table


def corpus() -> None:
    """Prints how many files of the `onnx` wheel are read, by kind, and why others are not."""
    import onnx.backend.test
    from onnx.backend.test.loader import load_model_tests

    from trappm.profiler.errors import TrappmError
    from trappm.profiler.static_profile import file_profile

    saved = Path(onnx.backend.test.__file__).parent / "data"
    files = {
        kind: [path.read_bytes() for path in sorted((saved / kind).glob("**/*.onnx"))]
        for kind in ("light", "pytorch-converted", "pytorch-operator", "simple")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about the values that the tests expect
        files["node"] = [c.model.SerializeToString() for c in load_model_tests(kind="node")]
    refusals: Counter[str] = Counter()
    print("kind, files, graphs, of these with a step or nothing to train")
    for kind, contents in files.items():
        graphs = steps = 0
        for content in contents:
            with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
                Path(file.name).write_bytes(content)
                try:
                    profile = file_profile(Path(file.name))
                except TrappmError:
                    continue
            graphs += 1
            refusal = profile.step_refusal
            if refusal is None or "depends on a trainable parameter" in refusal:
                steps += 1
            else:
                refusals[refusal] += 1
        print(f"{kind}, {len(contents)}, {graphs}, {steps}")
    for refusal, count in refusals.most_common():
        print(f"{count:5} {refusal[:150]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--results", type=Path, help="JSON lines; gone on with")
    what.add_argument("--corpus", action="store_true", help="the files of the onnx wheel instead")
    parser.add_argument("--files", type=Path, help="keeps the ONNX files here")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then stop")
    arguments = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    if arguments.corpus:
        corpus()
        return
    started = time.monotonic()
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {row["model"] for row in rows}
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.files or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in models():
            if name in done or time.monotonic() - started > arguments.seconds:
                continue
            row = compare(name, folder)
            rows.append(row)
            with arguments.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(json.dumps(summary(rows), indent=2))


if __name__ == "__main__":
    main()
