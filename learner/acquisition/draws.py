"""Strategies that need no geometry: a uniform draw, one by family, and the most uncertain first."""

from __future__ import annotations

from collections import Counter

import numpy as np

from trappm.learner.acquisition.request import AcquisitionRequest, Pick, explained
from trappm.profiler.errors import InputError


class RandomChoice:
    """A uniform draw: what every other strategy has to beat."""

    name = "random"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        chosen = request.generator.permutation(request.open)[: request.count]
        return explained(request, chosen.tolist())


class Stratified:
    """A draw that gives every family its share of the pool, what is known counted in."""

    name = "stratified"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        if request.families is None:
            raise InputError("stratified needs the families of the pool")
        families = np.array(request.families)
        shares = Counter(families[np.union1d(request.open, request.known)].tolist())
        total = shares.total()
        had = Counter(families[request.known].tolist())
        remaining: dict[str, list[int]] = {}
        for index in request.generator.permutation(request.open).tolist():
            remaining.setdefault(str(families[index]), []).append(index)
        chosen: list[int] = []
        for _ in range(request.count):
            after = had.total() + 1
            owed = {name: shares[name] / total * after - had[name] for name in sorted(remaining)}
            name = max(owed, key=owed.__getitem__)
            chosen.append(remaining[name].pop())
            had[name] += 1
            if not remaining[name]:
                del remaining[name]
        return explained(request, chosen)


class MostUncertain:
    """Where the heads' members disagree most, one by one: alike picks are not avoided."""

    name = "uncertainty"

    def select(self, request: AcquisitionRequest) -> list[Pick]:
        if request.uncertainty is None:
            raise InputError("uncertainty needs trained heads; begin with another strategy")
        order = np.argsort(-request.uncertainty[request.open], kind="stable")
        return explained(request, request.open[order[: request.count]].tolist())
