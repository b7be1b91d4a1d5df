"""Power and energy of training under power limits, of Zeus's traces (ml-energy/zeus, Apache-2.0).

You, Chung and Chowdhury, "Zeus: Understanding and Optimizing GPU Energy Consumption of DNN
Training" (NSDI 2023). A row is the mean of one epoch of one setting. What a step takes follows from
the epoch, so the loader is inside. The limit is of the software stack of a label
(`device_power_limit_w`), as for labels of our own; precision is not stated, speeds fit fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from research.importers.sheets import (
    current_name,
    known_input_size,
    number_in,
    published,
    read_cells,
    whole_in,
)
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import InputError
from trappm.profiler.records import Configuration, Measurement, Optimizer, Protocol
from trappm.profiler.records.step_scope import KEY, StepScope
from trappm.store.exchange.files import Verdict

SOURCE = "zeus"
LICENCE = "Apache-2.0"
PROTOCOL = Protocol(name=SOURCE, warmup_steps=0, min_steps=1, max_steps=1)
COLUMNS = frozenset(
    ("device", "dataset", "network", "timm_name", "batch_size", "optimizer", "power_limit_w",
     "avg_power_w", "step_ms_derived", "step_energy_j_derived", "source_path")
)  # fmt: skip
OPTIMIZERS = {"adadelta": Optimizer.ADAM, "adam": Optimizer.ADAM, "adamw": Optimizer.ADAM}
"""Adadelta keeps two numbers for each parameter, as Adam does; the environment has its name."""
PIXELS = {"imagenet": 224}
"""By data set: not told by the source, its usual size."""
_UNTOLD = ("precision", "input_size", "device_memory_mib", "torch", "cuda", "cudnn")


def verdicts(path: Path) -> list[Verdict]:
    """What becomes of each row of the sheet.

    Raises:
        InputError: the file or a row of it cannot be read, or it is not of this source.
    """
    result = []
    seen: set[tuple[object, ...]] = set()
    for line, cells in read_cells(path, COLUMNS):
        try:
            verdict = _verdict(cells)
        except InputError as error:
            raise InputError(f"{path.name}, line {line}: {error}; nothing was imported") from error
        label = verdict.measurement
        if label is not None:
            limit = label.environment["device_power_limit_w"]
            run = label.device, limit, label.environment["run"], label.configuration
            if run in seen:
                verdict = Verdict(kind="rejected", reason="a second row for the same run")
            seen.add(run)
        result.append(verdict)
    return result


def _verdict(cells: Mapping[str, str]) -> Verdict:
    if not cells["timm_name"]:
        return Verdict(kind="rejected", reason="timm has no such model")
    if cells["dataset"] not in PIXELS or not cells["step_ms_derived"]:
        return Verdict(kind="rejected", reason="the size of images or of the data is not told")
    if cells["optimizer"] not in OPTIMIZERS:
        return Verdict(kind="rejected", reason=f"{cells['optimizer'][:80]!r} is no optimizer here")
    architecture = current_name(cells["timm_name"])
    if known_input_size(architecture) is None:
        return Verdict(kind="rejected", reason="timm does not know the architecture")
    return Verdict(kind="imported", reason="power", measurement=_label(architecture, cells))


def _label(architecture: str, cells: Mapping[str, str]) -> Measurement:
    what = Configuration(
        architecture=architecture,
        batch_size=whole_in("batch_size", cells["batch_size"]),
        input_size=PIXELS[cells["dataset"]],
        optimizer=OPTIMIZERS[cells["optimizer"]],
    )
    power_w = number_in("avg_power_w", cells["avg_power_w"])
    environment = {
        "device": read_name(cells["device"]).key,
        "device_name": cells["device"],
        "device_power_limit_w": number_in("power_limit_w", cells["power_limit_w"]),
        "source": SOURCE,
        "licence": LICENCE,
        "run": f"{cells['network']} {cells['dataset']} {cells['optimizer']}",
        KEY: StepScope(loads_data=True).to_dict(),
        "power_method": "mean of an epoch",
        "untold": dict.fromkeys(_UNTOLD, "not told by the source"),
    }
    label = published(
        what,
        PROTOCOL,
        environment,
        row=str(power_w),
        step_time_ms=number_in("step_ms_derived", cells["step_ms_derived"]),
    )
    missing = {name: why for name, why in label.missing.items() if name not in _TOLD}
    energy_j = number_in("step_energy_j_derived", cells["step_energy_j_derived"])
    return replace(label, power_w=power_w, energy_j=energy_j, missing=missing)


_TOLD = frozenset(("power_w", "energy_j"))
