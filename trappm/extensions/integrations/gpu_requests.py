"""Resource requests of a predicted step: options for Ray tasks and a Kubernetes pod.

Host memory is a rule of thumb, not a simulation: PyTorch with the CUDA libraries, plus twice the
weights to load a checkpoint. Data loader workers need additional memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from trappm.prediction.prediction import Prediction
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import InputError
from trappm.profiler.simulation.memory_breakdown import Part

HOST_MIB = 4096
"""Host memory of a process with PyTorch and CUDA, without weights and data, rounded up."""
SHARING = ("hami", "kai", "volcano")
"""Schedulers of Kubernetes that share a GPU among pods by their memory in MiB."""
PRODUCT_LABEL = "nvidia.com/gpu.product"
"""Node label set by NVIDIA GPU feature discovery: the NVML name with dashes."""
PRODUCTS = (
    "Tesla-T4",
    "Tesla-V100-SXM2-16GB",
    "Tesla-V100-SXM2-32GB",
    "Tesla-V100-PCIE-16GB",
    "Tesla-V100-PCIE-32GB",
    "NVIDIA-A10",
    "NVIDIA-A10G",
    "NVIDIA-A30",
    "NVIDIA-A40",
    "NVIDIA-A100-SXM4-40GB",
    "NVIDIA-A100-SXM4-80GB",
    "NVIDIA-A100-PCIE-40GB",
    "NVIDIA-A100-80GB-PCIe",
    "NVIDIA-L4",
    "NVIDIA-L40S",
    "NVIDIA-GeForce-RTX-3090",
    "NVIDIA-GeForce-RTX-4090",
    "NVIDIA-RTX-A6000",
    "NVIDIA-H100-PCIe",
    "NVIDIA-H100-80GB-HBM3",
    "NVIDIA-H200",
)


def ray_options(prediction: Prediction) -> dict[str, float]:
    """Return `num_gpus` and `memory` (host bytes) for `ray.remote` or `.options`.

    Raises:
        InputError: The step does not fit the device, or its memory is unknown.
    """
    memory, capacity_mib = prediction.memory, prediction.capacity_mib
    if not prediction.fits or memory is None or capacity_mib is None:
        raise InputError(f"{prediction}; lower the batch size or name a larger GPU")
    share = math.ceil(100 * memory.high_mib / capacity_mib) / 100
    return {"num_gpus": min(share, 1.0), "memory": host_mib(prediction) << 20}


def pod(
    predictions: Prediction | Sequence[Prediction], shared_by: str | None = None
) -> dict[str, Any]:
    """Return a pod that requests one GPU on nodes with GPUs that fit the step.

    Args:
        predictions: Prediction of a step, or several of one step for several devices, as from
            `trappm.compare`.
        shared_by: Scheduler that shares a GPU among pods by memory: `hami`, `kai` or `volcano`.
            The pod then requests the upper bound of the step's memory instead of a whole GPU.

    Raises:
        InputError: The step fits no device, no product name is known, or no such scheduler.
    """
    if shared_by not in {None, *SHARING}:
        raise InputError(
            f"{shared_by!r} is no scheduler that shares GPUs; known: {', '.join(SHARING)}"
        )
    if isinstance(predictions, Prediction):
        predictions = [predictions]
    fitting = [p for p in predictions if p.fits]
    if not fitting:
        raise InputError(
            f"the step does not fit {' or '.join(p.device for p in predictions)}; lower the "
            "batch size"
        )
    products = [
        product
        for product in PRODUCTS
        if any(read_name(product).may_be(read_name(p.device)) for p in fitting)
    ]
    if not products:
        raise InputError(
            f"no Kubernetes product name is known for {', '.join(p.device for p in fitting)}; "
            f"known products: {', '.join(PRODUCTS)}"
        )
    on_product = {"key": PRODUCT_LABEL, "operator": "In", "values": products}
    nodes = {"nodeSelectorTerms": [{"matchExpressions": [on_product]}]}
    metadata: dict[str, Any] = {"generateName": "train-"}
    limits: dict[str, Any] = {"nvidia.com/gpu": "1"}
    scheduler: dict[str, Any] = {}
    gpu_mib = str(max(math.ceil(p.memory.high_mib) for p in fitting if p.memory is not None))
    if shared_by == "hami":
        limits["nvidia.com/gpumem"] = gpu_mib
    elif shared_by == "kai":
        metadata["annotations"] = {"gpu-memory": gpu_mib}
        limits, scheduler = {}, {"schedulerName": "kai-scheduler"}
    elif shared_by == "volcano":
        limits = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": gpu_mib}
        scheduler = {"schedulerName": "volcano"}
    resources = {"limits": limits, "requests": {"memory": f"{host_mib(fitting[0])}Mi"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {
            **scheduler,
            "restartPolicy": "Never",
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": nodes}},
            "containers": [{"name": "train", "image": "your-image", "resources": resources}],
        },
    }


def yaml_text(manifest: Mapping[str, Any]) -> str:
    """Return the manifest for `kubectl create -f`."""
    return yaml.safe_dump(manifest, sort_keys=False)


def host_mib(prediction: Prediction) -> int:
    """Return the estimated host memory of the process in MiB."""
    return HOST_MIB + 2 * math.ceil(prediction.memory_breakdown.parts_mib[Part.PARAMETERS])
