"""Makes the profile of timm's architectures and says how long it took and how right it is.

    python benchmarks/profiler/static_profile.py --processes 2 --every 1

For each architecture at its native input size: CPU seconds from the name to the whole profile
(graph, allocations and kernels), CPU ms of its memory at one more batch size, parameters against
`sum(p.numel())`, MACs of linear algebra against PyTorch's FlopCounterMode (whose own time does not
count), with and without products of weights and constants alone, which our graphs fold away.
`--results FILE` keeps one JSON line for each architecture and
goes on where an earlier run stopped.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import re
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LINEAR = frozenset({"Conv", "ConvTranspose", "Einsum", "Gemm", "LSTM", "MatMul"})
DEFAULT_SIZE = 224
BATCH_SIZE = 2


def profile(architecture: str) -> dict[str, Any]:
    """The figures of one architecture, or why it was refused."""
    import torch

    from trappm.profiler.errors import TrappmError
    from trappm.profiler.models import zoo
    from trappm.profiler.static_profile import static_profile

    torch.set_num_threads(1)
    size = zoo.native_input_size(architecture) or DEFAULT_SIZE
    started = time.process_time()
    try:
        whole = static_profile(architecture, size)
    except TrappmError as error:
        return {"architecture": architecture, "refusal": str(error)}
    seconds = time.process_time() - started
    template, replay_ms = whole.graph, None
    if whole.step is not None:
        started = time.process_time()
        whole.step.memory(64)
        replay_ms = round(1000 * (time.process_time() - started), 2)
    graph = template.at(BATCH_SIZE)
    is_linear = [operator in LINEAR for operator in graph.operators]
    linear_macs = int(graph.macs[is_linear].sum())
    macs, parameters, used = _references(architecture, size)
    folded_macs = 0 if macs == linear_macs else _macs_without_images(architecture, size)
    return {
        "architecture": architecture,
        "cpu_seconds": round(seconds, 4),
        "replay_cpu_ms": replay_ms,
        "step_refusal": whole.step_refusal,
        "nodes": graph.node_count,
        "bytes": len(template.to_bytes()),
        "operators": dict(collections.Counter(graph.operators)),
        "linear_macs": linear_macs,
        "reference_macs": macs,
        "image_macs": macs - folded_macs,
        "parameters": int(graph.parameters.sum()),
        "reference_parameters": parameters,
        "used_parameters": used,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _references(architecture: str, size: int) -> tuple[int, int, int]:
    """MACs of a forward pass, all parameters, and those with a gradient path to the result."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from trappm.profiler.models import zoo

    with torch.device("meta"):
        model = zoo.create_model(architecture, size).eval()
        images = torch.empty(BATCH_SIZE, 3, size, size)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        result = model(images)
    waiting, seen, used = [result.grad_fn], set(), {}
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            used[id(function.variable)] = function.variable.numel()
        waiting += [following for following, _ in function.next_functions]
    parameters = sum(p.numel() for p in model.parameters())
    return counter.get_total_flops() // 2, parameters, sum(used.values())


def _macs_without_images(architecture: str, size: int) -> int:
    """MACs of calls whose result has no gradient path to the images, by PyTorch's own counter."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.overrides import TorchFunctionMode
    from torch.utils.flop_counter import FlopCounterMode

    from trappm.profiler.models import zoo

    counter = FlopCounterMode(display=False)
    operations = 0

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal operations
            before = counter.get_total_flops()
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not result.requires_grad:
                operations += counter.get_total_flops() - before
            return result

    with torch.device("meta"):
        model = zoo.create_model(architecture, size).eval().requires_grad_(False)
        images = torch.empty(BATCH_SIZE, 3, size, size, requires_grad=True)
    with counter, sdpa_kernel(SDPBackend.MATH), Watch():
        model(images)
    return operations // 2


def _attempt(architecture: str) -> dict[str, Any]:
    try:
        return profile(architecture)
    except Exception as error:  # a fault of the benchmark or ours: shown, not hidden
        return {"architecture": architecture, "refusal": f"CRASH {error!r}"}


def report(results: list[dict[str, Any]], wall_s: float) -> None:
    done = [r for r in results if "refusal" not in r]
    print(f"architectures {len(results)}, graphs {len(done)} ({len(done) / len(results):.2%})")
    if not done:
        return
    stepless = [r["architecture"] for r in done if r["step_refusal"]]
    print(f"without a step: {len(stepless)} ({', '.join(stepless[:8])})")
    replays = sorted(r["replay_cpu_ms"] for r in done if r["replay_cpu_ms"] is not None)
    print(
        f"CPU ms of one more batch size: median {statistics.median(replays):.1f}, "
        f"p95 {replays[int(0.95 * (len(replays) - 1))]:.1f}"
    )
    seconds = sorted(r["cpu_seconds"] for r in done)
    print(
        f"CPU seconds: median {statistics.median(seconds):.2f}, "
        f"p95 {seconds[int(0.95 * (len(seconds) - 1))]:.2f}, "
        f"longest {seconds[-1]:.2f}, sum {sum(seconds):.0f}; wall of this run {wall_s:.0f}"
    )
    print(f"peak memory of a process {max(r['peak_mib'] for r in done):.0f} MiB")
    print(f"a stored graph: median {statistics.median(r['bytes'] for r in done) / 1024:.1f} KiB")
    for ours, reference in (
        ("parameters", "reference_parameters"),
        ("parameters", "used_parameters"),
        ("linear_macs", "reference_macs"),
        ("linear_macs", "image_macs"),
    ):
        gaps = sorted(
            ((abs(r[ours] - r[reference]) / max(r[reference], 1), r["architecture"]) for r in done),
            reverse=True,
        )
        unequal = [f"{name} {gap:.2%}" for gap, name in gaps if gap]
        print(f"{ours} against {reference}: {len(unequal)} differ: {', '.join(unequal[:12])}")
    _report_operators(done)
    reasons: dict[str, list[str]] = {}
    for r in results:
        if "refusal" in r:
            reason = re.sub(r"^\S+ at \d+ px: ", "", r["refusal"])
            reasons.setdefault(reason, []).append(r["architecture"])
    for reason, names in sorted(reasons.items()):
        print(f"refused {len(names)}: {reason} ({', '.join(names[:5])})")


def _report_operators(done: list[dict[str, Any]]) -> None:
    """How much of all graphs the features know by name, and each operator's share."""
    from trappm.profiler.graphs.features import OPERATORS

    nodes, architectures = collections.Counter[str](), collections.Counter[str]()
    for r in done:
        nodes.update(r["operators"])
        architectures.update(r["operators"].keys())
    known = sum(count for name, count in nodes.items() if name in OPERATORS)
    print(
        f"operators: {len(nodes)} kinds, {nodes.total()} nodes, "
        f"{known / nodes.total():.2%} of them known to the features by name"
    )
    for name, count in nodes.most_common():
        remark = "" if name in OPERATORS else "  as Other"
        print(f"  {name:24} {count:8} nodes {architectures[name]:6} architectures{remark}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, help="take every n-th architecture")
    parser.add_argument("--first", type=int, default=0, help="number of the first one taken")
    parser.add_argument("--patterns", nargs="*", default=["*"], help="names or globs")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after")
    parser.add_argument("--results", type=Path, help="JSON lines; what is there is not done again")
    options = parser.parse_args()

    from trappm.profiler.models import zoo

    names = zoo.architectures(options.patterns)[options.first :: options.every]
    results = []
    if options.results and options.results.exists():
        results = [json.loads(line) for line in options.results.read_text().splitlines()]
    known = {r["architecture"] for r in results}
    started = time.monotonic()
    context = multiprocessing.get_context("forkserver")
    os.environ["OMP_NUM_THREADS"] = "1"
    with context.Pool(options.processes) as pool:
        for result in pool.imap_unordered(_attempt, [n for n in names if n not in known]):
            results.append(result)
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(result) + "\n")
            if time.monotonic() - started > options.seconds:
                pool.terminate()
                break
    report(results, time.monotonic() - started)


if __name__ == "__main__":
    main()
