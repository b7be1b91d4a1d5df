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


def pod(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return a pod that requests one GPU on nodes with GPUs that fit the step.

    Args:
        predictions: Predictions of one step for several devices, as from `trappm.compare`.

    Raises:
        InputError: The step fits no device, or no product name is known.
    """
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
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "train-"},
        "spec": {
            "restartPolicy": "Never",
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": nodes}},
            "containers": [
                {
                    "name": "train",
                    "image": "your-image",
                    "resources": {
                        "limits": {"nvidia.com/gpu": "1"},
                        "requests": {"memory": f"{host_mib(fitting[0])}Mi"},
                    },
                }
            ],
        },
    }


def yaml_text(manifest: Mapping[str, Any]) -> str:
    """Return the manifest for `kubectl create -f`."""
    return yaml.safe_dump(manifest, sort_keys=False)


def host_mib(prediction: Prediction) -> int:
    """Return the estimated host memory of the process in MiB."""
    return HOST_MIB + 2 * math.ceil(prediction.memory_breakdown.parts_mib[Part.PARAMETERS])
