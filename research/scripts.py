"""Scripts that fit shipped constants or print tables, by name, and their execution."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from research.data import data_folder
from trappm.profiler.errors import InputError
from trappm.profiler.nearest import nearest


@dataclass(frozen=True)
class Script:
    """A module with a `main`, and the arguments that produce its result."""

    module: str
    makes: str
    """Shipped file or documentation page that the output belongs to."""
    arguments: tuple[str, ...] = ()
    """`{data}` and `{traces}` are replaced by these folders."""


_TRACED = ("{data}", "--traces", "{traces}")
PRIORS: Mapping[str, Script] = {
    "step-time": Script(
        "research.priors.step_time_nodes",
        "learner/physics/devices/known_devices.safetensors",
        (*_TRACED, "--write"),
    ),
    "other-devices": Script(
        "research.priors.other_devices",
        "learner/physics/devices/other_devices.safetensors",
        (*_TRACED, "--write"),
    ),
    "power": Script(
        "research.priors.power",
        "learner/physics/power/known_power.safetensors",
        (*_TRACED, "--write"),
    ),
    "links": Script(
        "research.priors.collectives",
        "trappm/extensions/parallel/link_kinds.csv",
        ("{data}", "--write"),
    ),
    "scatter": Script(
        "research.priors.ddp_steps",
        "prints the constants of trappm/extensions/parallel/schedules.py",
        ("{data}",),
    ),
    "transformers": Script(
        "research.priors.language_models",
        "prints the constants of trappm/extensions/transformers/step_times.py",
        ("{data}", "--fit"),
    ),
    "workspace": Script(
        "research.priors.memory_simulation",
        "prints the constants of profiler/simulation/memory_simulation.py",
        ("{data}", "--traces", "{traces}/memory_traces.jsonl", "--fit"),
    ),
}
"""Fits of shipped constants, in the order in which they depend on each other."""

TABLES: Mapping[str, Script] = {
    "cpu-cores": Script("research.priors.cpu_cores", "docs/studies/cpu_cores.md"),
    "step-time": Script("research.priors.step_time", "docs/studies/rtx_step_time.md", _TRACED),
    "second-device": Script(
        "research.priors.step_time_nodes", "docs/studies/step_time_constants.md", _TRACED
    ),
    "other-devices": Script("research.priors.other_devices", "docs/studies/other_gpus.md", _TRACED),
    "power": Script("research.priors.power", "docs/studies/power.md", _TRACED),
    "links": Script("research.priors.collectives", "docs/studies/many_gpus.md", ("{data}",)),
    "ddp": Script("research.priors.ddp_steps", "docs/studies/many_gpus.md", ("{data}",)),
    "language-models": Script(
        "research.priors.language_models", "docs/studies/language_models.md", ("{data}",)
    ),
    "foreign-modules": Script("research.tables.foreign_modules", "docs/foreign_modules.md"),
    "figures": Script("research.tables.doc_figures", "docs/figures"),
    "h100": Script(
        "research.gpu_day.gpu_check", "docs/studies/h100_day.md", ("examples/data/h100/sweeps",)
    ),
}
"""Tables and figures of the documentation."""


def chosen(scripts: Mapping[str, Script], name: str | None) -> Sequence[Script]:
    """Return the named script, or all of them.

    Raises:
        InputError: There is no script of this name.
    """
    if name is None:
        return list(scripts.values())
    if name not in scripts:
        raise InputError(f"Unknown name {name!r}; {nearest(name, list(scripts))}")
    return [scripts[name]]


def run(script: Script, traces: Path, extra: Sequence[str] = ()) -> None:
    """Run a script as if its module had been called with its arguments.

    Args:
        script: Script to run.
        traces: Folder that keeps traced kernels, created if needed.
        extra: Further arguments of the module.

    Raises:
        InputError: The script needs published sheets and there is no folder of them.
    """
    data = str(data_folder()) if "{data}" in script.arguments else ""
    if any("{traces}" in argument for argument in script.arguments):
        traces.mkdir(parents=True, exist_ok=True)
    arguments = [a.format(data=data, traces=traces) for a in script.arguments]
    with mock.patch.object(sys, "argv", [script.module, *arguments, *extra]):
        runpy.run_module(script.module, run_name="__main__")
