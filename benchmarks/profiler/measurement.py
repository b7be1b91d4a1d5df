"""How far measurements repeat, what each costs beyond its own steps, and how faults end.

    python benchmarks/profiler/measurement.py --device cpu-2t --protocol quick --results repeat

Repeatability: the same configurations twice, the second time in another order, on a machine that
does nothing else. `--results` begins the names of the two files of JSON lines that keep the
measurements, and from which an interrupted run goes on. Overhead: wall time of a measurement less
what was spent in creating the model and in steps, and less waiting for the lock. Outcomes: each
fault of `tests/profiler/measuring/measuring_faults.py`, what became of it and what it left behind
(processes, descriptors, temporary files; shared memory, where other programs' shows as well).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "profiler" / "measuring")]

import numpy as np  # noqa: E402
import psutil  # noqa: E402

from trappm.profiler.devices import open_device  # noqa: E402
from trappm.profiler.errors import TrappmError  # noqa: E402
from trappm.profiler.files.json_lines import JsonLines  # noqa: E402
from trappm.profiler.measuring.isolation import Measurer  # noqa: E402
from trappm.profiler.measuring.protocols import PROTOCOLS, protocol_named  # noqa: E402
from trappm.profiler.measuring.sweep import Sweep  # noqa: E402
from trappm.profiler.records import Configuration, Measurement, Outcome, Protocol  # noqa: E402

# Twenty architectures of 18 families, from a few to some hundred milliseconds a step on two cores.
REPEATED = [
    Configuration(architecture=name, batch_size=batch_size, input_size=size)
    for name, batch_size, size in (
        ("resnet18", 4, 224), ("resnet50", 1, 224), ("mobilenetv3_small_100", 8, 224),
        ("mobilenetv2_100", 4, 160), ("efficientnet_b0", 2, 224), ("regnetx_002", 8, 224),
        ("regnety_004", 4, 224), ("densenet121", 2, 128), ("vgg11", 1, 224),
        ("repvgg_a0", 4, 224), ("tinynet_a", 4, 160), ("mnasnet_100", 4, 224),
        ("convnext_atto", 4, 224), ("deit_tiny_patch16_224", 4, 224),
        ("vit_tiny_patch16_224", 8, 224), ("swin_tiny_patch4_window7_224", 1, 224),
        ("ghostnet_100", 4, 224), ("mixer_s32_224", 4, 224), ("resmlp_12_224", 2, 224),
        ("xcit_nano_12_p16_224", 2, 224),
    )
]  # fmt: skip
METRICS = {"step_time_ms": 0.02, "memory_mib": 0.005, "power_w": 0.05}
"""What is repeated, and the median relative difference that we aim at."""

SMALL = Configuration(architecture="test_resnet", batch_size=1, input_size=64)
FAULTS = [
    "fault-sigkill", "fault-segfault", "fault-abort", "fault-hang", "fault-native-hang",
    "fault-100-gib", "fault-limit", "fault-exception", "fault-sys-exit", "fault-exit",
    "fault-full-disk", "fault-endless-flood", "fault-close-everything", "fault-leave-process",
    "fault-strays", "fault-kill-server",
]  # fmt: skip


def repeatability(device: str, protocol: Protocol, results: Path, count: int) -> dict[str, Any]:
    """Measures everything twice; medians of the relative differences, and each of them."""
    rounds = []
    for seed in (1, 2):
        order = np.random.default_rng(seed).permutation(count)
        path = results.with_name(f"{results.name}.{seed}.jsonl")
        with JsonLines(path, Measurement) as file, Measurer() as measurer:
            wanted, environment = [REPEATED[i] for i in order], open_device(device).environment()
            sweep = Sweep(wanted, file, device, protocol, environment, retries=4)
            sweep.run(lambda c, m=measurer: m.measure(c, device, protocol), _tell)  # type: ignore[misc]
        with JsonLines(path, Measurement) as file:
            by_configuration = {m.configuration: m for m in file.found if m.outcome is Outcome.OK}
        rounds.append(by_configuration)
    rows = []
    for configuration in REPEATED[:count]:
        if not all(configuration in by_configuration for by_configuration in rounds):
            continue  # told as not repeated
        row: dict[str, Any] = {"configuration": str(configuration)}
        for metric in METRICS:
            first, second = (
                getattr(by_configuration[configuration], metric) for by_configuration in rounds
            )
            row[metric] = first
            if first is not None and second is not None:
                row[f"{metric} difference"] = abs(second - first) / ((first + second) / 2)
        rows.append(row)
    medians = {}
    for metric in METRICS:
        differences = [row[f"{metric} difference"] for row in rows if f"{metric} difference" in row]
        medians[metric] = statistics.median(differences) if differences else None
    return {"wanted": count, "repeated": len(rows), "medians": medians, "rows": rows}


def overhead(device: str, count: int) -> dict[str, Any]:
    """Seconds of each measurement beyond its own model and steps, on a warm fork server."""
    protocol = dataclasses.replace(protocol_named("quick"), max_seconds=0.2)
    overheads_s: list[float] = []
    with Measurer() as measurer:
        measurer.measure(SMALL, device, protocol)  # starts the server
        for _ in range(count):
            begin = time.monotonic()
            measurement = measurer.measure(SMALL, device, protocol)
            wall_s = time.monotonic() - begin
            facts = measurement.environment
            own_s = sum(facts["phase_seconds"].values()) + facts["lock_wait_s"]
            overheads_s.append(wall_s - own_s)
    return {
        "measurements": count,
        "median_s": statistics.median(overheads_s),
        "longest_s": max(overheads_s),
        "load_average": os.getloadavg()[0],
    }


def outcomes(device: str) -> list[dict[str, Any]]:
    """What became of each fault, whether the worker measures on, and what is left behind."""
    import measuring_faults

    rows = []
    protocol = Protocol(name="faults", timeout_s=3.0)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder  # for the server and all its children
        touch = Path(folder) / "touch"
        os.environ[measuring_faults.TOUCH_VARIABLE] = str(touch)
        with Measurer(run="measuring_faults:run") as measurer:

            def measure(name: str) -> Measurement:
                what = Configuration(architecture=name, batch_size=1, input_size=64)
                return measurer.measure(what, device, protocol)

            measure("steady")
            for fault in FAULTS:
                touch.write_text("")
                before = _held(folder)
                measurement = measure(fault)
                alive = measure("steady").outcome is Outcome.OK
                strays = [int(pid) for pid in touch.read_text().split()]
                left = {k: v - before[k] for k, v in _held(folder).items() if v != before[k]}
                running = sum(map(psutil.pid_exists, strays))
                rows.append(
                    {
                        "fault": fault.removeprefix("fault-"),
                        "outcome": measurement.outcome.value,
                        "phase": measurement.failed_in,
                        "message": measurement.message,
                        "worker_alive": alive,
                        "left_behind": left | ({"strays": running} if running else {}),
                    }
                )
        rows.append(_full_disk(Path(folder) / "results"))
    return rows


def _full_disk(path: Path) -> dict[str, Any]:
    """Appends results until the file may not grow, as on a full disk."""
    measurement = Measurement(
        configuration=SMALL, device="none", outcome=Outcome.ERROR, protocol=Protocol(),
        started_at="", duration_s=0.0,
    )  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    written, message = 0, "nothing"
    with JsonLines(path, Measurement) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            for _ in range(100):
                file.append(measurement)
                written += 1
        except TrappmError as error:
            message = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with JsonLines(path, Measurement) as file:
        kept = len(file.found)
    return {
        "fault": "results on a full disk",
        "outcome": f"{kept} of {written} kept",
        "phase": "append",
        "message": message.replace(str(path), "FILE"),
        "worker_alive": True,
        "left_behind": {},
    }


def _held(folder: str) -> dict[str, int]:
    """What a measurement may leave behind, counted."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "processes": len(psutil.Process().children(recursive=True)),
        "shared memory": len(os.listdir("/dev/shm")),  # noqa: S108  # counted only
        "temporary files": len(os.listdir(folder)),
    }


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show(report: dict[str, Any]) -> None:
    if "repeatability" in report:
        part = report["repeatability"]
        print(f"\nrepeatability: {part['repeated']} of {part['wanted']} configurations twice")
        for row in part["rows"]:
            parts = [
                f"{row[metric]:9.1f} ({row[f'{metric} difference']:6.2%})"
                for metric in METRICS
                if row.get(f"{metric} difference") is not None
            ]
            print(f"  {row['configuration']:<48}" + "".join(parts))
        for metric, aim in METRICS.items():
            median = part["medians"][metric]
            known = "not measured" if median is None else f"{median:.2%}"
            print(f"  median relative difference of {metric}: {known} (aim {aim:.1%})")
    if "overhead" in report:
        part = report["overhead"]
        print(
            f"\noverhead of {part['measurements']} measurements: median {part['median_s']:.3f} s, "
            f"longest {part['longest_s']:.3f} s (aim 0.5 s; load {part['load_average']:.1f})"
        )
    if "outcomes" in report:
        print("\nfault                   outcome         phase    alive  left     message")
        for row in report["outcomes"]:
            print(
                f"{row['fault']:<23} {row['outcome']:<15} {row['phase'] or '':<8} "
                f"{'yes' if row['worker_alive'] else 'NO':<6} {_counts(row['left_behind']):<8} "
                f"{(row['message'] or '')[:100]}"
            )


def _counts(left: dict[str, int]) -> str:
    return ", ".join(f"{count:+d} {what}" for what, count in left.items()) or "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu-1t")
    parser.add_argument("--protocol", choices=[*PROTOCOLS], default="quick")
    parser.add_argument("--only", choices=("repeatability", "overhead", "outcomes"))
    parser.add_argument("--results", type=Path, default=Path("repeat"), help="begin of file names")
    parser.add_argument("--count", type=int, default=20, help="configurations, and measurements")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report: dict[str, Any] = {"device": options.device, "protocol": options.protocol}
    if options.only in {None, "outcomes"}:
        report["outcomes"] = outcomes(options.device)
    if options.only in {None, "overhead"}:
        report["overhead"] = overhead(options.device, options.count)
    if options.only in {None, "repeatability"}:
        protocol = protocol_named(options.protocol)
        count = min(options.count, len(REPEATED))
        report["repeatability"] = repeatability(options.device, protocol, options.results, count)
    if options.json:
        print(json.dumps(report))
    else:
        show(report)


if __name__ == "__main__":
    main()
