"""Power and energy of training under power limits, from Zeus's traces (ml-energy/zeus, Apache-2.0).

You, Chung and Chowdhury, "Zeus: Understanding and Optimizing GPU Energy Consumption of DNN
Training" (NSDI 2023). A row is the mean of one epoch of one setting. A step's time follows from the
epoch, so it includes the loader. The limit is of the software stack of a label
(`device_power_limit_w`), as for labels of our own; precision is not stated, speeds fit fp32.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from research.importers.sheets import (
    SECOND,
    UNTOLD,
    Cells,
    known_input_size,
    number_in,
    published,
    read_rows,
    rejected,
    whole_in,
)
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.models.zoo import current_name
from trappm.profiler.records import Configuration, Measurement, Optimizer, Protocol
from trappm.profiler.records.step_scope import KEY, StepScope
from trappm.store.files import Verdict

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
"""Input size by data set: the usual one, as the source does not tell it."""
_UNTOLD = ("precision", "input_size", "device_memory_mib", "torch", "cuda", "cudnn")


def verdicts(path: Path) -> list[Verdict]:
    """Return the verdict on each row of the sheet.

    Raises:
        InputError: The file or a row of it cannot be read, or it is not of this source.
    """
    seen: set[tuple[object, ...]] = set()

    def verdict(cells: Cells) -> Verdict:
        if not cells["timm_name"]:
            return rejected("timm has no such model")
        if cells["dataset"] not in PIXELS or not cells["step_ms_derived"]:
            return rejected("the size of images or of the data is not told")
        if cells["optimizer"] not in OPTIMIZERS:
            return rejected(f"{cells['optimizer'][:80]!r} is no optimizer here")
        architecture = current_name(cells["timm_name"])
        if known_input_size(architecture) is None:
            return rejected("timm does not know the architecture")
        label = _label(architecture, cells)
        limit_w = label.environment["device_power_limit_w"]
        run = label.device, limit_w, label.environment["run"], label.configuration
        if run in seen:
            return SECOND
        seen.add(run)
        return Verdict(kind="imported", reason="power", measurement=label)

    return list(read_rows(path, COLUMNS, verdict))


def _label(architecture: str, cells: Cells) -> Measurement:
    what = Configuration(
        architecture=architecture,
        batch_size=whole_in(cells, "batch_size"),
        input_size=PIXELS[cells["dataset"]],
        optimizer=OPTIMIZERS[cells["optimizer"]],
    )
    power_w = number_in(cells, "avg_power_w")
    environment = {
        "device": read_name(cells["device"]).key,
        "device_name": cells["device"],
        "device_power_limit_w": number_in(cells, "power_limit_w"),
        "source": SOURCE,
        "licence": LICENCE,
        "run": f"{cells['network']} {cells['dataset']} {cells['optimizer']}",
        KEY: StepScope(loads_data=True).to_dict(),
        "power_method": "mean of an epoch",
        "untold": dict.fromkeys(_UNTOLD, UNTOLD),
    }
    label = published(
        what,
        PROTOCOL,
        environment,
        row=str(power_w),
        step_time_ms=number_in(cells, "step_ms_derived"),
    )
    missing = {
        name: why for name, why in label.missing.items() if name not in ("power_w", "energy_j")
    }
    energy_j = number_in(cells, "step_energy_j_derived")
    return replace(label, power_w=power_w, energy_j=energy_j, missing=missing)
