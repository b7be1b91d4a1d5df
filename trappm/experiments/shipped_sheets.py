"""The published sheets that the snapshot which ships with the package is trained on."""

from __future__ import annotations

from dataclasses import dataclass

from trappm.profiler.records import Phase


@dataclass(frozen=True)
class Sheet:
    """Published files of one device, and what is learned from them."""

    files: tuple[str, ...]
    device: str
    phases: tuple[Phase, ...]
    metric: str
    usable: str | None = None
    """A file of the rows that judge."""
    keys: tuple[str, ...] = ()
    """Of the devices whose rows are taken; by default there are no others."""
    kernels: str | None = None
    """A card whose kernels alone NeuSight timed."""


BOTH = (Phase.TRAIN, Phase.INFER)
SHEETS = (
    Sheet(
        ("a100_40gb_train_memory.csv",),
        "a100-40gb",
        (Phase.TRAIN,),
        "memory_mib",
        usable="a100_40gb_train_memory_quality.csv",
    ),
    Sheet(("rtx3090_train_step_amp_nchw.csv",), "rtx3090", (Phase.TRAIN,), "step_time_ms"),
    Sheet(("rtx3090_infer_step_amp_nchw.csv",), "rtx3090", (Phase.INFER,), "step_time_ms"),
    Sheet(("rtx4090_infer_step_amp_nchw.csv",), "rtx4090", (Phase.INFER,), "step_time_ms"),
    Sheet(
        ("nodes/pycls_v100_step_fp32.csv", "nodes/pgb_torchvision_step.csv"),
        "v100-16gb",
        BOTH,
        "step_time_ms",
        keys=("v100-16gb", "v100-dgxs-16gb"),
        kernels="v100-pcie-32gb",
    ),
)
KERNELS_FILE = "nodes/neusight_kernels_fp32_v100_a100.csv.gz"
KERNELS = {"conv2d": 100, "linear": 24, "matmul": 16, "layer-norm": 10, "softmax": 10, "add": 10,
           "add-scalar": 8, "relu": 10, "gelu": 6}  # fmt: skip
"""So many of each operator: a minute of measuring."""
