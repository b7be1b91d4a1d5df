"""Sheets that the shipped snapshot is trained on."""

from __future__ import annotations

import lzma
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from research.evaluation.label_files import read_labels
from research.importers.neusight import read_neusight
from research.priors.joint_fit import Evidence
from research.priors.kernel_calls import KernelCall, kernel_evidence
from trappm.profiler.devices.catalogue import spec_of
from trappm.profiler.errors import InputError, one_line
from trappm.profiler.records import Measurement, Outcome, Phase
from trappm.store.files import read_file

SEED = 1337
"""Seed of every draw."""

OUR_OWN = Path(__file__).resolve().parents[2] / "examples/data"
"""Folder of our own labels; not part of a wheel."""


@dataclass(frozen=True)
class LabelSheet:
    """Label files of one device, and the metric to learn from them."""

    files: tuple[str, ...]
    """Files of published labels, or of our own if `measured`."""
    device: str
    phases: tuple[Phase, ...]
    metric: str
    usable: str | None = None
    """File of the rows to evaluate."""
    keys: tuple[str, ...] = ()
    """Keys of the devices to include (default: all)."""
    kernels: str | None = None
    """Card whose single kernels NeuSight timed."""
    measured: bool = False
    """True for our own measurements; their files are in `OUR_OWN`."""
    hosts_apart: float = 0.0
    """Deviation of the logarithm between hosts whose devices have the same key."""
    published: tuple[str, ...] = ()
    """Files of published labels of the same device, in addition to our own."""

    def labels(self, data: Path) -> dict[str, list[Measurement]]:
        """Return the labels by file; `data` is the folder of published ones.

        Raises:
            InputError: A file is missing or cannot be read.
        """
        own = self.files if self.measured else ()
        published = self.published if self.measured else self.files
        return {file: our_labels(file) for file in own} | {
            file: [m for m in read_labels(data / file) if not self.keys or m.device in self.keys]
            for file in published
        }


def our_labels(file: str) -> list[Measurement]:
    """Return the usable labels of a file of `OUR_OWN`; errors as `our_attempts`."""
    return [m for m in our_attempts(file) if m.outcome in {Outcome.OK, Outcome.OOM}]


def our_attempts(file: str | Path) -> list[Measurement]:
    """Return all measurements of a file of `OUR_OWN`, also compressed.

    Raises:
        InputError: The file is missing or cannot be read.
    """
    path = OUR_OWN / file
    if path.suffix == ".xz":
        try:
            data = lzma.decompress(path.read_bytes())
        except (OSError, lzma.LZMAError) as error:
            raise InputError(f"{path} cannot be read: {one_line(error)}") from error
        with TemporaryDirectory() as folder:
            plain = Path(folder) / path.stem
            plain.write_bytes(data)
            return our_attempts(plain)
    return [v.measurement for v in read_file(path) if v.measurement is not None]


BOTH = (Phase.TRAIN, Phase.INFER)
H100_FILES = ("h100/sweeps/check.jsonl.xz", "h100/sweeps/first.jsonl.xz")
MILABENCH_FILE = "new/milabench_memory_and_throughput.csv.gz"
OUR_METRICS = ("step_time_ms", "memory_mib")
HOSTS_APART = 0.5
"""Deviation of the log step time between CPUs with the same number of threads: the two measured
CPUs differ by a factor of 1.8 (0.6), and others are assumed to deviate similarly."""


def cpu_files(device: str) -> tuple[str, ...]:
    return tuple(f"cpu/{host}/{device}.jsonl.xz" for host in ("amd-epyc", "intel-xeon"))


SHEETS = (
    LabelSheet(
        ("a100_40gb_train_memory.csv",),
        "a100-40gb",
        (Phase.TRAIN,),
        "memory_mib",
        usable="a100_40gb_train_memory_quality.csv",
    ),
    LabelSheet(("rtx3090_train_step_amp_nchw.csv",), "rtx3090", (Phase.TRAIN,), "step_time_ms"),
    LabelSheet(("rtx3090_infer_step_amp_nchw.csv",), "rtx3090", (Phase.INFER,), "step_time_ms"),
    LabelSheet(("rtx4090_infer_step_amp_nchw.csv",), "rtx4090", (Phase.INFER,), "step_time_ms"),
    LabelSheet(
        ("nodes/pycls_v100_step_fp32.csv", "nodes/pgb_torchvision_step.csv"),
        "v100-16gb",
        BOTH,
        "step_time_ms",
        keys=("v100-16gb", "v100-dgxs-16gb"),
        kernels="v100-pcie-32gb",
    ),
    *(
        LabelSheet(
            H100_FILES,
            "h100",
            BOTH,
            metric,
            keys=("h100-80gb",),
            measured=True,
            published=(MILABENCH_FILE,),
        )
        for metric in OUR_METRICS
    ),
    *(
        LabelSheet(
            cpu_files(device),
            device,
            (Phase.TRAIN,),
            metric,
            measured=True,
            hosts_apart=HOSTS_APART if metric == "step_time_ms" else 0.0,
        )
        for device in ("cpu-2t", "cpu-1t")
        for metric in OUR_METRICS
    ),
)
KERNELS_FILE = "nodes/neusight_kernels_fp32_v100_a100.csv.gz"
KERNELS = {"conv2d": 100, "linear": 24, "matmul": 16, "layer-norm": 10, "softmax": 10, "add": 10,
           "add-scalar": 8, "relu": 10, "gelu": 6}  # fmt: skip
"""Number of kernels of each operator, about a minute of measurement."""


def neusight_kernels(path: Path, card: str) -> Evidence:
    """Return kernels of a card that NeuSight timed, drawn at random: `KERNELS` of each operator.

    Raises:
        InputError: The file cannot be read.
    """
    times_ms: dict[str, list[tuple[KernelCall, float]]] = defaultdict(list)
    for row in read_neusight(path):
        if row.device == card:
            times_ms[row.call.operator].append((row.call, row.time_ms))
    generator = np.random.default_rng(SEED)
    drawn = [
        times_ms[name][i]
        for name, count in KERNELS.items()
        for i in generator.permutation(len(times_ms[name]))[:count]
    ]
    # TF32 was switched off.
    return kernel_evidence(card, "neusight", replace(spec_of(card), tf32_tflops=None), drawn)
