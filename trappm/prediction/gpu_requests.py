"""What a step asks a cluster for: options of Ray tasks, a pod of Kubernetes.

A process's memory on its host is a rule, and no simulation: room for PyTorch with CUDA's libraries,
and twice the weights, for a checkpoint that is read. Workers of a data loader come on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from trappm.prediction.device_names import precision_gap
from trappm.prediction.fitting import Verdict, capacity_of
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.errors import InputError

if TYPE_CHECKING:
    from trappm.prediction.estimate import Estimate

HOST_MIB = 4096
"""Of a process with PyTorch and CUDA, without weights and data: a round number above."""
PRODUCT_LABEL = "nvidia.com/gpu.product"
"""Of nodes, by NVIDIA's GPU feature discovery: NVML's name with dashes."""
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


def ray_options(estimate: Estimate, device: str) -> dict[str, float]:
    """`num_gpus` and `memory` (of the host, in bytes) for `ray.remote` or `.options`.

    Raises:
        InputError: no such card, or the step does not fit it.
    """
    memory, capacity_mib = estimate.memory(device), estimate.capacity_mib(device)
    verdict = memory.verdict(capacity_mib)
    if verdict is not Verdict.FITS:
        raise InputError(
            f"a step of {estimate.name} at batch {estimate.batch_size:,} {verdict} {device}: it "
            f"needs {memory.of(capacity_mib)}; lower --batch-size or name a larger card"
        )
    share = math.ceil(100 * memory.high_mib / capacity_mib) / 100
    return {"num_gpus": min(share, 1.0), "memory": host_mib(estimate) << 20}


def ray_text(by_device: Mapping[str, Mapping[str, float]]) -> str:
    """A line of Python for each device."""
    return "".join(
        f"@ray.remote(num_gpus={options['num_gpus']:g}, memory={options['memory']:d})  # {device}\n"
        for device, options in by_device.items()
    )


def pod(estimate: Estimate, devices: Sequence[str] | None = None) -> dict[str, Any]:
    """A pod with a whole GPU, on nodes whose cards the step fits.

    Args:
        estimate: of the step.
        devices: cards that may be taken; by default all of PRODUCTS.

    Raises:
        InputError: no such card, none of them has a known product name, or the step fits none.
    """
    for device in devices or ():
        capacity_of(device)
    may_be = [
        product
        for product in PRODUCTS
        if devices is None or any(read_name(product).may_be(read_name(d)) for d in devices)
    ]
    if not may_be:
        raise InputError(
            f"no product of Kubernetes is known for {', '.join(devices or ())}; there are "
            f"{', '.join(PRODUCTS)}"
        )
    fitting = [
        product
        for product in may_be
        if precision_gap(product, estimate.precision) is None and estimate.fits(product)
    ]
    if not fitting:
        raise InputError(
            f"a step of {estimate.name} at batch {estimate.batch_size:,} fits none of "
            f"{', '.join(may_be)}; lower --batch-size"
        )
    on_product = {"key": PRODUCT_LABEL, "operator": "In", "values": fitting}
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
                        "requests": {"memory": f"{host_mib(estimate)}Mi"},
                    },
                }
            ],
        },
    }


def yaml_text(manifest: Mapping[str, Any]) -> str:
    """The manifest for `kubectl create -f`."""
    return yaml.safe_dump(manifest, sort_keys=False)


def host_mib(estimate: Estimate) -> int:
    """Memory of the process on its host, by the rule above."""
    trace = estimate.trace
    weights = int(trace.parameter_bytes.sum()) + int(trace.buffer_bytes.sum())
    return HOST_MIB + 2 * math.ceil(weights / (1 << 20))
