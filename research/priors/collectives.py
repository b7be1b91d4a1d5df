"""Constants of links, fitted to published collectives, and judged on series held out.

    PYTHONPATH=. python research/priors/collectives.py ../shared/data [--write]

Labels: all-reduces and messages of NCCL on A100 and H100 nodes (Microsoft Vidur, MIT). Held out in
turn is each series (a system with so many GPUs and nodes), then each system; of what is left out
the data sheet alone is known. Messages between A100 nodes with pairs on NVLink are not used, as
they are erratic (README of the labels). `--write` writes the constants into the package.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import least_squares

from trappm.extensions.parallel import links
from trappm.extensions.parallel.collective_times import Group
from trappm.extensions.parallel.links import LinkKind, Node

Array = npt.NDArray[np.float64]
BINS = 40
LARGE_BYTES = 1 << 20
"""Gradients' buckets and blocks are larger than this."""
STIFFNESS = 0.2
"""Weight of where constants begin against one bin of a series."""
INNER = {
    "a100_dgx": (LinkKind.NVLINK, 300.0),
    "h100_dgx": (LinkKind.NVLINK, 450.0),
    "a100_pairwise_nvlink": (LinkKind.PCIE, 31.5),
    "h100_pairwise_nvlink": (LinkKind.PCIE, 63.0),
}
PAIR_GBS = 300.0
"""Of two GPUs with a bridge: 600 GB/s in both directions."""
NETWORKS = {"a100_dgx": ("rdma", 200.0, 4), "h100_dgx": ("rdma", 400.0, 8)}
FITTED = {
    "nvlink": ("latency_us", "efficiency", "sharpness"),
    "pcie": ("latency_us", "efficiency", "sharpness"),
    "rdma": ("latency_us", "hop_us", "sharpness"),
    "a100_dgx": ("efficiency",),
}
"""Of kinds of links, and of the networks of systems."""
NAMES = [(owner, name) for owner, names in FITTED.items() for name in names]
START = {
    "latency_us": (30.0, 0.7), "hop_us": (5.0, 1.0), "efficiency": (0.6, 0.5),
    "sharpness": (0.9, 0.4),
}  # fmt: skip
"""Before any label, and how far labels may move it in the logarithm."""


@dataclass(frozen=True)
class Series:
    """One collective on so many GPUs of so many nodes of a system."""

    system: str
    collective: str
    gpus: int
    nodes: int
    sizes: Array
    """Bytes, the mean of each bin."""
    times_ms: Array
    """Medians of each bin."""

    def times(self, constants: Mapping[tuple[str, str], float]) -> Array:
        """By the formula."""
        kind, gbs = INNER[self.system]
        if "pairwise" in self.system and self.gpus == 2:
            kind, gbs = LinkKind.NVLINK, PAIR_GBS

        def of(owner: str) -> dict[str, float]:
            return {name: constants[owner, name] for name in FITTED.get(owner, ())}

        inner = links.link(kind, gbs, **of(kind))
        _, network_gbs, rails = NETWORKS.get(self.system, ("rdma", 1.0, 1))
        network = links.link(LinkKind.RDMA, network_gbs, **of("rdma"), **of(self.system))
        node = Node(name=self.system, inner=inner, network=network, rails=rails)
        group = Group(node=node, gpus=self.gpus // self.nodes, nodes=self.nodes)
        return np.array([group.all_reduce_ms(size) for size in self.sizes.tolist()])

    def errors(self, constants: Mapping[tuple[str, str], float]) -> tuple[Array, Array]:
        """Of the logarithm; those of large sizes apart."""
        errors = np.log(self.times(constants) / self.times_ms)
        return errors, errors[self.sizes >= LARGE_BYTES]


def series(data: Path) -> list[Series]:
    rows = pd.read_csv(data / "nodes" / "vidur_collectives_fp16.csv.gz")
    series = []
    for key, group in rows.groupby(["system", "collective", "n_gpus", "n_nodes"]):
        system, collective, gpus, nodes = key
        if collective != "all_reduce" or ("pairwise" in system and nodes > 1):
            continue
        sizes = group["bytes"].to_numpy(dtype=float)
        edges = np.geomspace(sizes.min(), sizes.max() * 1.001, BINS)
        bins = np.digitize(sizes, edges)
        taken = [bins == place for place in np.unique(bins)]
        times = group["time_ms"].to_numpy()
        series.append(
            Series(
                system, collective, gpus, nodes,
                np.array([np.exp(np.log(sizes[rows]).mean()) for rows in taken]),
                np.array([np.median(times[rows]) for rows in taken]),
            )
        )  # fmt: skip
    return series


def fit(labels: Sequence[Series]) -> dict[tuple[str, str], float]:
    """The most probable constants, with long-tailed errors of the logarithm."""
    start = np.log([START[name][0] for _, name in NAMES])
    widths = np.array([START[name][1] for _, name in NAMES])

    def residuals(logs: Array) -> Array:
        constants = dict(zip(NAMES, np.exp(logs).tolist(), strict=True))
        errors = [each.errors(constants)[0] for each in labels]
        return np.concatenate([*errors, (logs - start) / widths * STIFFNESS])

    best = least_squares(residuals, start, loss="soft_l1", f_scale=0.1)
    return dict(zip(NAMES, np.exp(best.x).tolist(), strict=True))


def percent(errors: Array) -> float:
    return float(np.abs(np.exp(errors) - 1).mean() * 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    labels = series(arguments.data)
    constants = fit(labels)
    print("| series | GPUs x nodes | fitted, all / >= 1 MiB | series held out | system held out |")
    print("|---|---|---|---|---|")
    left_out = defaultdict(list)
    for each in labels:
        others = fit([other for other in labels if other is not each])
        far = fit([other for other in labels if other.system != each.system])
        cells = [
            " / ".join(f"{percent(errors):.0f}" for errors in each.errors(known))
            for known in (constants, others, far)
        ]
        for place, known in enumerate((constants, others, far)):
            left_out[place].append(each.errors(known))
        kind = INNER[each.system][0] if each.nodes == 1 else "rdma"
        left_out[str(kind)].append(each.errors(others))
        name = f"{each.system} {each.collective}"
        print(f"| {name} | {each.gpus // each.nodes} x {each.nodes} | {' | '.join(cells)} |")
    means = [
        " / ".join(
            f"{np.mean([percent(pair[at]) for pair in left_out[place]]):.0f}" for at in (0, 1)
        )
        for place in range(3)
    ]
    print(f"| mean of series | | {' | '.join(means)} |")
    for (owner, name), value in constants.items():
        print(owner, name, f"{value:.3g}")
    if arguments.write:
        _write(constants, left_out)


def _write(constants: Mapping[tuple[str, str], float], left_out: Mapping[object, list]) -> None:
    path = Path(links.__file__).with_name("link_kinds.csv")
    lines = path.read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    for row in rows:
        for name in FITTED.get(row["kind"], ()):
            row[name] = f"{constants[row['kind'], name]:.3g}"
        if row["kind"] in left_out:
            large = np.concatenate([pair[1] for pair in left_out[row["kind"]]])
            row["spread"] = f"{math.sqrt(np.mean(large**2)):.2g}"
    text = [*head, ",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    path.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
