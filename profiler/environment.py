"""What surrounded a measurement: the facts that make two labels comparable, or not.

A device gives the hardware and software facts (`Device.environment`), which hold for all its
measurements; a run adds its own (threads, precision, load). `stack_fingerprint` hashes the few that
decide whether labels may be mixed, so it is the same for both.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any

from profiler import procfs
from profiler.records import Configuration

MEASURING_VERSION = 1
"""The protocol's version: raised whenever a change to this room changes what a label means."""

SEED = 0
"""Seeds weights, images and targets of every measurement; none of them changes its cost."""

_STACK = (
    "device",
    "device_name",
    "device_power_limit_w",
    "measuring_version",
    "python",
    "torch",
    "timm",
    "cuda",
    "cudnn",
    "driver",
    "tf32",
    "cudnn_benchmark",
)


def utc_now() -> str:
    """Now in UTC, ISO 8601, to the microsecond."""
    return datetime.now(UTC).isoformat()


@cache
def host_facts() -> Mapping[str, Any]:
    """Host, processor and software versions, from package metadata: torch is not imported."""
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "cpu_model": _cpu_model(),
        "cpu_cores": os.cpu_count(),
        "host_memory_mib": round(procfs.total_memory_mib()),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": _version("torch"),
        "timm": _version("timm"),
        "code_version": _version("trappm"),
        "measuring_version": MEASURING_VERSION,
    }


def run_facts(configuration: Configuration) -> dict[str, Any]:
    """What one run adds: how it computes, when, and how busy the host was before."""
    return {
        "precision": configuration.precision.value,
        "memory_format": configuration.memory_format.value,
        "optimizer": configuration.optimizer.value,
        "phase": configuration.phase.value,
        "seed": SEED,
        "utc": utc_now(),
        "load_average_before": os.getloadavg()[0],
    }


def stack_fingerprint(environment: Mapping[str, Any]) -> str:
    """16 hexadecimal digits, equal where labels may be mixed: same hardware, software and rules.

    The host's name, kernel and load do not count; two equal nodes are one device.
    """
    stack = {name: environment.get(name) for name in _STACK}
    text = json.dumps(stack, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None  # run from a checkout that was not installed


def _cpu_model() -> str:
    """The processor's name, with family and model: virtual machines often say only "AMD EPYC"."""
    facts: dict[str, str] = {}
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if not line.strip():
                break  # the first processor stands for all
            facts[name.strip()] = value.strip()
    name = facts.get("model name", platform.machine())
    if "cpu family" in facts and "model" in facts:
        return f"{name} (family {facts['cpu family']}, model {facts['model']})"
    return name
