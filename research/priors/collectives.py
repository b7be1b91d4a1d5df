"""Constants of links, fitted to published collectives and judged on held-out series
(docs/research/step_time.md).

Labels: NCCL's collectives on A100 and H100 nodes (Microsoft Vidur, MIT), on A100 and V100 nodes
(vTrain, MIT) and on nodes from A100 to B200 (aiconfigurator, Apache-2.0). Each series (a collective
of a system with its GPUs and nodes) is held out in turn, then each system; of a held-out system
only the data sheet is known. Not used: messages between A100 nodes with pairs on NVLink, as they
are erratic (README of the labels), and fewer than 8 V100s, whose rings depend on which GPUs are
chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from research.data import data_folder
from research.held_out import Array, percent_errors
from research.priors import IsWriting
from trappm.extensions.parallel import links
from trappm.extensions.parallel.links import LinkKind, NodeLinks, RankGroup

BINS = 40
LARGE_BYTES = 1 << 20
"""Minimum size of gradient buckets and blocks."""
STIFFNESS = 0.2
"""Weight of the starting constants against one bin of a series."""
INNER = {
    "a100_dgx": (LinkKind.NVLINK, 300.0),
    "h100_dgx": (LinkKind.NVLINK, 450.0),
    "a100_pairwise_nvlink": (LinkKind.PCIE, 31.5),
    "h100_pairwise_nvlink": (LinkKind.PCIE, 63.0),
    "vtrain_a100": (LinkKind.NVLINK, 300.0),
    "vtrain_v100": (LinkKind.NVLINK, 150.0),
    "a100_sxm": (LinkKind.NVLINK, 300.0),
    "h100_sxm": (LinkKind.NVLINK, 450.0),
    "h200_sxm": (LinkKind.NVLINK, 450.0),
    "b200_sxm": (LinkKind.NVLINK, 900.0),
}
PAIR_GBS = 300.0
"""Bandwidth of two GPUs with a bridge: 600 GB/s in both directions."""
NETWORKS = {"a100_dgx": ("rdma", 200.0, 4), "h100_dgx": ("rdma", 400.0, 8)}
FITTED = {
    "nvlink": ("latency_us", "hop_us", "efficiency", "sharpness"),
    "pcie": ("latency_us", "efficiency", "sharpness"),
    "rdma": ("latency_us", "hop_us", "sharpness"),
    "a100_dgx": ("efficiency",),
}
"""Fitted constants of kinds of links, and of the networks of systems."""
NAMES = [(owner, name) for owner, names in FITTED.items() for name in names]
START = {
    "latency_us": (30.0, 0.7), "hop_us": (5.0, 1.0), "efficiency": (0.6, 0.5),
    "sharpness": (0.9, 0.4),
}  # fmt: skip
"""Starting value of each constant, and the width of its logarithm's prior."""


@dataclass(frozen=True)
class Series:
    """One collective on some GPUs and nodes of a system, in bins of its size."""

    system: str
    collective: str
    gpus: int
    nodes: int
    sizes: Array
    """Geometric mean of the bytes of each bin."""
    times_ms: Array
    """Median of each bin."""

    def times(self, constants: Mapping[tuple[str, str], float]) -> Array:
        """Return the times of the formula in ms."""
        kind, gbs = INNER[self.system]
        if "pairwise" in self.system and self.gpus == 2:
            kind, gbs = LinkKind.NVLINK, PAIR_GBS

        def of(owner: str) -> dict[str, float]:
            return {name: constants[owner, name] for name in FITTED.get(owner, ())}

        inner = links.link(kind, gbs, **of(kind))
        _, network_gbs, rails = NETWORKS.get(self.system, ("rdma", 1.0, 1))
        network = links.link(LinkKind.RDMA, network_gbs, **of("rdma"), **of(self.system))
        node = NodeLinks(name=self.system, inner=inner, network=network, rails=rails)
        group = RankGroup(node=node, gpus=self.gpus // self.nodes, nodes=self.nodes)
        time_ms = getattr(group, f"{self.collective}_ms")
        return np.array([time_ms(size) for size in self.sizes.tolist()])

    def errors(self, constants: Mapping[tuple[str, str], float]) -> Array:
        """Return log(measured / predicted) of each bin."""
        errors: Array = np.log(self.times_ms / self.times(constants))
        return errors


def read_series(data: Path) -> list[Series]:
    """Return all series of the sheets, in bins of equal width of the logarithm of bytes."""
    vidur = pd.read_csv(data / "nodes" / "vidur_collectives_fp16.csv.gz")
    vidur = vidur[(vidur.collective == "all_reduce")]
    vidur = vidur[~(vidur.system.str.contains("pairwise") & (vidur.n_nodes > 1))]
    vtrain = pd.read_csv(data / "new" / "vtrain_allreduce_fp32.csv.gz")
    vtrain = vtrain[(vtrain.device == "a100") | (vtrain.n_gpus == 8)]
    vtrain = vtrain.assign(
        system="vtrain_" + vtrain.device, collective="all_reduce", time_ms=vtrain.out_of_place_ms
    )
    nccl = pd.read_csv(data / "new" / "aiconfigurator_nccl.csv.gz")
    nccl = nccl[(nccl.nccl_dtype == "half") & (nccl.op_name != "alltoall")]
    newest = nccl.groupby("system").version.transform("max")
    nccl = nccl[nccl.system.isin(list(INNER)) & (nccl.version == newest)]
    nccl = nccl.assign(
        collective=nccl.op_name,
        n_gpus=nccl.num_gpus,
        bytes=2 * nccl.message_size,
        time_ms=nccl.latency,
    )
    sheet = pd.concat([vidur, vtrain, nccl], ignore_index=True).fillna({"n_nodes": 1})
    series = []
    for key, group in sheet.groupby(["system", "collective", "n_gpus", "n_nodes"]):
        system, collective, gpus, nodes = key
        edges = np.geomspace(group.bytes.min(), group.bytes.max() * 1.001, BINS)
        bins = group.groupby(np.digitize(group.bytes, edges))
        sizes = np.exp(bins.bytes.apply(lambda each: np.log(each).mean()))
        times_ms = bins.time_ms.median().to_numpy()
        series.append(Series(system, collective, int(gpus), int(nodes), sizes.to_numpy(), times_ms))
    return series


def fit(labels: Sequence[Series]) -> dict[tuple[str, str], float]:
    """Return the most probable constants, with long-tailed errors of the logarithm."""
    start = np.log([START[name][0] for _, name in NAMES])
    widths = np.array([START[name][1] for _, name in NAMES])

    def residuals(logs: Array) -> Array:
        constants = dict(zip(NAMES, np.exp(logs).tolist(), strict=True))
        errors = [-each.errors(constants) for each in labels]
        return np.concatenate([*errors, (logs - start) / widths * STIFFNESS])

    best = least_squares(residuals, start, loss="soft_l1", f_scale=0.1)
    return dict(zip(NAMES, np.exp(best.x).tolist(), strict=True))


def judge(labels: Sequence[Series]) -> pd.DataFrame:
    """Return the errors of each bin with nothing, its series or its system held out."""
    parts = []
    constants = fit(labels)
    for each in labels:
        fits = {
            "fitted": constants,
            "series held out": fit([other for other in labels if other is not each]),
            "system held out": fit([other for other in labels if other.system != each.system]),
        }
        kind = INNER[each.system][0] if each.nodes == 1 else "rdma"
        name = f"{each.system} {each.collective}, {each.gpus // each.nodes} x {each.nodes}"
        parts += [
            pd.DataFrame(
                {
                    "series": name,
                    "kind": str(kind),
                    "held_out": held_out,
                    "large": each.sizes >= LARGE_BYTES,
                    "error": each.errors(known),
                }
            )
            for held_out, known in fits.items()
        ]
    return pd.concat(parts, ignore_index=True)


def error_table(errors: pd.DataFrame) -> pd.DataFrame:
    """Return the mean errors in percent by series, of all sizes and of 1 MiB and more."""
    errors = errors.assign(percent=percent_errors(errors.error))
    table = pd.concat(
        {
            size: rows.pivot_table(index="series", columns="held_out", values="percent", sort=False)
            for size, rows in (("all", errors), (">= 1 MiB", errors[errors.large]))
        },
        axis=1,
    )
    table.loc["mean of series"] = table.mean()
    return table.round(0)


def main(
    is_writing: IsWriting = False,
) -> None:
    """Print the errors of each series and the fitted constants."""
    labels = read_series(data_folder())
    errors, constants = judge(labels), fit(labels)
    print(error_table(errors).to_string())
    for (owner, name), value in constants.items():
        print(owner, name, f"{value:.3g}")
    if is_writing:
        _write(constants, errors[(errors.held_out == "series held out") & errors.large])


def _write(constants: Mapping[tuple[str, str], float], held_out: pd.DataFrame) -> None:
    path = Path(links.__file__).with_name("link_kinds.csv")
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    table = pd.read_csv(path, comment="#", dtype=str, keep_default_na=False).set_index("kind")
    for kind, rows in held_out.groupby("kind"):
        table.loc[kind, "spread"] = f"{math.sqrt(np.mean(rows.error**2)):.2g}"
    for (owner, name), value in constants.items():
        if owner in table.index:
            table.loc[owner, name] = f"{value:.3g}"
    text = table.reset_index().to_csv(index=False, lineterminator="\n")
    path.write_text("\n".join([*head, text]))
