"""What steps of language models say of a device's kernels in 16 bits, beside its other labels.

Constants of devices were learned from images: of attention over some hundred tokens, and of
products of moderate size. These few are round values from llm-foundry's published steps
(Apache-2.0) of MPT on A100 and H100 nodes, in bf16 with flash attention;
`benchmarks/learner/language_models.py --fit` fits them anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from torch import Tensor

from trappm.learner.physics.kernel_terms import Peak
from trappm.learner.physics.kernel_times import group_rows
from trappm.profiler.devices.catalogue import read_name
from trappm.profiler.simulation.kernel_profile import KernelKind


@dataclass(frozen=True, kw_only=True)
class TransformerTimes:
    """Factors of the times that a device's constants give, and how well FSDP hides collectives."""

    products: float = 1.0
    """Of large products in 16 bits."""
    attention: float
    """Of flash attention."""
    exposed: float = 0.5
    """Share of a collective that a step waits for, within a node."""
    exposed_between: float = 0.5
    """The same between nodes."""

    def moved(self, constants: Tensor) -> Tensor:
        """Constants of a device (c), for a step of a transformer in 16 bits."""
        moved = constants.clone()
        for group, rows in group_rows():
            if group.name == "peak":
                moved[rows.start + Peak.HALF] += log(self.products)
            elif group.name == "slowdown":
                moved[rows.start + KernelKind.ATTENTION] += log(self.attention / self.products)
        return moved


KNOWN = {
    "a100": TransformerTimes(products=1.1, attention=1.87),
    "h100": TransformerTimes(products=0.95, attention=1.87),
}
"""By a card's model."""
OTHERS = TransformerTimes(attention=1.87)
"""The two agree on attention, so other cards are taken to be like them in that."""


def transformer_times(device: str) -> TransformerTimes:
    """Those of a device."""
    return KNOWN.get(read_name(device).model, OTHERS)
