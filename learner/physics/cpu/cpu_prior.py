"""What the formulas of CPUs have in common: sums of terms that are computed once a workload.

They start from another CPU's constants (the step time from a part of them) without being held to
them, which served better than holding them or a choice by cross-validation
(docs/studies/cpu_cores.md).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from torch import Tensor

from trappm.learner.physics.graph_terms import PriorSpec
from trappm.learner.physics.term_prior import TermPrior
from trappm.learner.workload import Workload

Array = npt.NDArray[np.float64]


class CpuPrior(TermPrior):
    """See `learner.physics.prior.Prior`. Instances do not change."""

    SPEC: ClassVar[PriorSpec]
    transfer_tightness = 1.0

    def __init__(self, log_constants: Array | None = None) -> None:
        super().__init__(self.SPEC, log_constants)

    @staticmethod
    @abstractmethod
    def terms_of(workload: Workload) -> list[float]:
        """The terms of one workload in the metric's unit, in the order of `SPEC`."""

    def terms(self, workloads: Sequence[Workload]) -> Array:
        rows = []
        for workload in workloads:
            known = _KNOWN.setdefault(workload, {})
            if type(self) not in known:
                known[type(self)] = self.terms_of(workload)
            rows.append(known[type(self)])
        return np.array(rows, dtype=np.float64).reshape(len(workloads), len(self.SPEC.terms))

    def with_constants(self, log_constants: Array) -> Self:
        return type(self)(log_constants)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        return cls(tensors["log_constants"].numpy())


_KNOWN: WeakKeyDictionary[Workload, dict[type[CpuPrior], list[float]]] = WeakKeyDictionary()
"""A fit needs the same workloads many times."""
