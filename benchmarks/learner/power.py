"""Power, energy and time of steps under power limits, judged on labels held out.

    PYTHONPATH=. python benchmarks/learner/power.py ../shared/data --traces FOLDER [--write]

Labels: Zeus's training on a V100 and a P100 under limits (ResNet-50; ShuffleNet V2 at 32 px and
BERT, whose structures `zeus_networks` has), and our own of an H100 (examples/data/h100). Held out
in turn are batch sizes, limits, whole networks of Zeus's (on all cards) or architectures of the
H100, and whole cards, of which then only the data sheet is known. Each is judged with the step
time as it was measured under the card's own limit, and with a simulated one; beside it the mean
power of the training labels, and the limit times a constant share. `--write` writes what is known
into the package. Kernels are traced once and kept in FOLDER.
"""

from __future__ import annotations

import argparse
import csv
import lzma
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.learner.zeus_networks import Bert, shufflenet
from trappm.learner.physics.device_specs import spec_of
from trappm.learner.physics.devices.known_devices import known_devices
from trappm.learner.physics.power.joint_fit import Fitted, Labels, fit
from trappm.learner.physics.power.known_power import MEASURED, UNKNOWN, CardPower, write
from trappm.learner.physics.power.loads import loads_of
from trappm.learner.physics.power.operating_point import Sheet
from trappm.learner.physics.step_time_prior import StepTimePrior
from trappm.learner.snapshots.snapshot import load_snapshot
from trappm.learner.workload import Workload
from trappm.prediction.power import UNTIMED, StepPower
from trappm.prediction.snapshot_choice import SHIPPED
from trappm.profiler.devices.catalogue import card_of
from trappm.profiler.models.model_input import Sample
from trappm.profiler.records import Graph, Measurement, Optimizer, Phase
from trappm.profiler.simulation.kernel_profile import KernelProfile
from trappm.profiler.static_profile import kernel_profile
from trappm.store.exchange.files import read_file

Array = npt.NDArray[np.float64]
Chosen = npt.NDArray[np.bool_]

H100 = Path(__file__).parents[2] / "examples" / "data" / "h100" / "sweeps"
NETWORKS = {
    ("resnet50", "imagenet"): 1_281_167,
    ("shufflenetv2", "cifar100"): 50_000,
    ("bert_base_uncased", "squad"): 88_524,
}
"""Samples of an epoch; SQuAD's are sequences of 384 tokens (its usual number of features)."""
EPOCH_IDLE_S = 1.5
"""At the start of an epoch nothing runs while the loader's processes start: it counts where an
epoch takes ten seconds (CIFAR-100), and was chosen with the formula, on the V100."""
IDLE_W = {"v100": 37.5, "p100": 34.0}
"""While nothing runs but the process is there: Zeus's NCF, whatever the batch size."""
FOLDS = 5
LEAST_NOISE = 0.03


@dataclass(frozen=True, eq=False)
class Rows:
    """Labels of a card, and what they are of (n)."""

    labels: Labels
    prior: StepTimePrior
    workloads: Sequence[Workload]
    networks: npt.NDArray[np.str_]
    settings: npt.NDArray[np.str_]
    """Batch size and all else but the limit."""

    @property
    def card(self) -> str:
        return self.labels.card


def traced(folder: Path, name: str, make: Callable[[], KernelProfile]) -> KernelProfile:
    path = folder / name
    if not path.exists():
        path.write_bytes(make().to_bytes())
    return KernelProfile.from_bytes(path.read_bytes())


def prior_of(card: str) -> StepTimePrior:
    """Of step times: the shipped V100's, which has not seen Zeus's, and what all cards share."""
    name = MEASURED[card][0]
    if card == "v100":
        heads = load_snapshot(SHIPPED).heads["v100-16gb"][Phase.TRAIN].heads
        shipped: StepTimePrior = heads.of_kernels["step_time_ms"].prior  # type: ignore[attr-defined]
        return StepTimePrior(spec_of(name), shipped.constants)
    return StepTimePrior.like_others(spec_of(name), known_devices())


def zeus(path: Path, traces: Path) -> list[Rows]:
    """Labels of Zeus's networks by card; the time under the highest limit is the usual one."""
    profiles = {
        "resnet50": traced(traces, "resnet50@224", lambda: kernel_profile("resnet50", 224)),
        "shufflenetv2": traced(
            traces,
            "shufflenetv2@32",
            lambda: kernel_profile(shufflenet(), 32, fused_attention=False),
        ),
        "bert_base_uncased": traced(
            traces,
            "bert@384",
            lambda: kernel_profile(
                Bert(), Sample((384, 768), torch.float32), fused_attention=False
            ),
        ),
    }
    groups: dict[str, dict[tuple[str, int, str], list[tuple[float, float, float]]]]
    groups = defaultdict(lambda: defaultdict(list))
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            network, card = row["network"], row["device"].lower()
            samples = NETWORKS.get((network, row["dataset"]))
            if samples is None or card not in IDLE_W:
                continue
            batch, epoch_s, power_w = (
                float(row[n]) for n in ("batch_size", "epoch_s", "avg_power_w")
            )
            idle_s = EPOCH_IDLE_S if network == "shufflenetv2" else 0.0
            busy_s = epoch_s - idle_s
            groups[card][network, int(batch), row["optimizer"]].append(
                (
                    float(row["power_limit_w"]),
                    (power_w * epoch_s - IDLE_W[card] * idle_s) / busy_s,
                    1e3 * busy_s / np.ceil(samples / batch),
                )
            )
    result = []
    for card, of_card in groups.items():
        prior, numbers, about, workloads = prior_of(card), [], [], []
        for (network, batch, optimizer), measured in sorted(of_card.items()):
            usual_w, _, usual_ms = max(measured)
            workload = Workload(
                graph=Graph.empty(batch), optimizer=Optimizer.ADAM, kernels=profiles[network]
            )
            for limit_w, power_w, time_ms in sorted(measured):
                known_ms = np.nan if limit_w == usual_w else time_ms
                share = 2 / len(measured)
                numbers.append((usual_ms, usual_w, limit_w, power_w, known_ms, share))
                about.append((network, f"{batch} {optimizer}"))
                workloads.append(workload)
        sheet = Sheet.of(_card(card))
        columns = np.array(numbers).T
        labels = Labels(card, sheet, loads_of(workloads, prior), *columns)
        networks, settings = np.array(about).T
        result.append(Rows(labels, prior, workloads, networks, settings))
    return result


def h100(traces: Path) -> Rows:
    """Our own labels, each at the card's own limit."""
    prior, workloads, numbers, about = prior_of("h100"), [], [], []
    for label in _h100_labels():
        what = label.configuration
        if label.power_w is None or label.step is None:
            continue
        name = f"{what.architecture}@{what.input_size}-{what.precision}-{what.memory_format}"
        kernels = traced(
            traces,
            name,
            lambda: kernel_profile(
                what.architecture,  # noqa: B023  (called at once)
                what.input_size,  # noqa: B023
                precision=what.precision,  # noqa: B023
                memory_format=what.memory_format,  # noqa: B023
            ),
        )
        workloads.append(
            Workload(
                graph=Graph.empty(what.batch_size),
                precision=what.precision,
                memory_format=what.memory_format,
                optimizer=what.optimizer,
                phase=what.phase,
                kernels=kernels,
            )
        )
        numbers.append((label.step.mean_ms, 700.0, 700.0, label.power_w, np.nan))
        about.append((what.architecture, f"{what.batch_size} {name} {what.phase}"))
    count = Counter(about)
    weights = np.array([1 / count[key] for key in about])
    labels = Labels(
        "h100", Sheet.of(_card("h100")), loads_of(workloads, prior), *np.array(numbers).T, weights
    )
    networks, settings = np.array(about).T
    return Rows(labels, prior, workloads, networks, settings)


def _h100_labels() -> list[Measurement]:
    labels = []
    with tempfile.TemporaryDirectory() as folder:
        for file in sorted(H100.glob("*.xz")):
            path = Path(folder) / file.stem
            path.write_bytes(lzma.decompress(file.read_bytes()))
            labels += [v.measurement for v in read_file(path) if v.measurement is not None]
    return labels


def _card(model: str):  # type: ignore[no-untyped-def]
    card = card_of(MEASURED[model][0])
    assert card is not None
    return card


Judged = dict[str, list[tuple[float, ...]]]
"""By method: errors of the logarithms of power, energy and time, and whether intervals held."""


def judge(
    rows: Rows, test: Chosen, known: CardPower, train: Sequence[tuple[Rows, Chosen]]
) -> Judged:
    """The rows that are held out, by our formula and by baselines."""
    judged: Judged = defaultdict(list)
    own = [(r, t) for r, t in train if r.card == rows.card and t.any()]
    mean_w = float(np.mean(np.concatenate([r.labels.power_w[t] for r, t in own or train])))
    share = float(
        np.median(
            np.concatenate([(r.labels.power_w / r.labels.limit_w)[t] for r, t in own or train])
        )
    )
    if not own:
        mean_w = share * known.limit_w
    factors = _time_factors(rows, own[0][1] if own else np.zeros(len(test), dtype=bool))
    for setting in np.unique(rows.settings[test]):
        for network in np.unique(rows.networks[test & (rows.settings == setting)]):
            mine = np.flatnonzero(test & (rows.settings == setting) & (rows.networks == network))
            first, labels = int(mine[0]), rows.labels
            measured = float(labels.usual_ms[first])
            guess = float(np.exp(rows.prior.log_values([rows.workloads[first]])[0]))
            guess *= factors.get(network, 1.0)
            wide = 1.15 if network in factors else UNTIMED
            times = {
                "measured": (measured, measured / 1.01, measured * 1.01),
                "simulated": (guess, guess / wide, guess * wide),
            }
            for which, time_ms in times.items():
                step = StepPower(
                    rows.workloads[first], rows.prior, MEASURED[rows.card][0], known, time_ms
                )
                for i in mine.tolist():
                    true_ms = labels.time_ms[i]
                    true_ms = measured if np.isnan(true_ms) else true_ms
                    truth = {
                        "power_w": labels.power_w[i],
                        "energy_j": labels.power_w[i] * true_ms / 1e3,
                        "step_time_ms": true_ms,
                    }
                    under = step.under(float(labels.limit_w[i]))
                    judged[f"ours, time {which}"].append(
                        (
                            *(np.log(truth[n] / under[n][0]) for n in truth),
                            *(float(under[n][1] <= truth[n] <= under[n][2]) for n in truth),
                        )
                    )
                    limit = labels.limit_w[i]
                    for name, power_w in (("mean power", mean_w), ("limit x share", share * limit)):
                        errors = [
                            labels.power_w[i] / power_w,
                            truth["energy_j"] / power_w / time_ms[0] * 1e3,
                        ]
                        errors.append(true_ms / time_ms[0])
                        judged[f"{name}, time {which}"].append((*np.log(errors), *[np.nan] * 3))
    return judged


def _time_factors(rows: Rows, train: Chosen) -> dict[str, float]:
    """By network: how much longer its steps of known time take than is simulated."""
    factors = {}
    for network in np.unique(rows.networks[train]):
        mine = train & (rows.networks == network) & (rows.labels.limit_w == rows.labels.usual_w)
        if mine.any():
            workloads = [rows.workloads[i] for i in np.flatnonzero(mine).tolist()]
            simulated = rows.prior.log_values(workloads)
            factors[str(network)] = float(
                np.exp(np.median(np.log(rows.labels.usual_ms[mine]) - simulated))
            )
    return factors


def held_out(all_rows: Sequence[Rows], split: str) -> list[list[Chosen]]:
    """For each fold, which rows of each card are held out."""
    keys: list[npt.NDArray[np.str_]] = []
    for rows in all_rows:
        limits = rows.labels.limit_w.astype(np.str_)
        key = {
            "batch sizes": np.char.add(rows.networks, rows.settings),
            "limits": limits,
            "networks": rows.networks,
            "cards": np.full(len(limits), rows.card),
        }[split]
        keys.append(key)
    if split == "limits":
        values = sorted(
            {
                k
                for rows, key in zip(all_rows, keys, strict=True)
                if rows.card != "h100"
                for k in key
            }
        )
        folds = [{value} for value in values]
    elif split == "networks":
        zeus_networks = {n for n, _ in NETWORKS}
        others = sorted(set(np.concatenate(keys).tolist()) - zeus_networks)
        order = np.random.default_rng(0).permutation(len(others))
        folds = [{n} for n in sorted(zeus_networks)]
        folds += [{others[i] for i in order[f::FOLDS]} for f in range(FOLDS)]
    else:
        values = sorted(set(np.concatenate(keys).tolist()))
        order = np.random.default_rng(0).permutation(len(values))
        count = len(values) if split == "cards" else FOLDS
        folds = [{values[i] for i in order[f::count]} for f in range(count)]
    return [[np.isin(key, sorted(fold)) for key in keys] for fold in folds]


def run(
    all_rows: Sequence[Rows], split: str, noise: Mapping[str, float]
) -> dict[tuple[str, str], Judged]:
    """Errors of a split by card and network (the H100's together)."""
    result: dict[tuple[str, str], Judged] = defaultdict(lambda: defaultdict(list))
    for tests in held_out(all_rows, split):
        fitted = fit([r.labels.at(~t) for r, t in zip(all_rows, tests, strict=True) if (~t).any()])
        train = [(r, ~t) for r, t in zip(all_rows, tests, strict=True)]
        for rows, test in zip(all_rows, tests, strict=True):
            if split == "limits" and rows.card == "h100":
                continue
            known = card_power(rows, fitted, noise)
            names = ["all"] if rows.card == "h100" else np.unique(rows.networks[test]).tolist()
            for name in names:
                mine = test & ((rows.networks == name) | (name == "all"))
                if mine.any():
                    for method, errors in judge(rows, mine, known, train).items():
                        result[rows.card, name][method] += errors
    return result


def card_power(rows: Rows, fitted: Fitted, noise: Mapping[str, float]) -> CardPower:
    normal = fitted.cards.get(rows.card, fitted.unknown)
    of_card = noise.get(rows.card if rows.card in fitted.cards else UNKNOWN, 0.1)
    limit = float(rows.labels.usual_w.max())
    return CardPower(rows.labels.sheet, normal, of_card, limit, rows.card)


def show(split: str, result: Mapping[tuple[str, str], Judged]) -> None:
    print(f"\n{split} held out: MAPE of power / energy / time, % (share within the 90 % interval)")
    for (card, network), judged in sorted(result.items()):
        for method, errors in judged.items():
            values = np.array(errors)
            mape = 100 * np.abs(np.expm1(-values[:, :3])).mean(0)
            held = 100 * values[:, 3:].mean(0)
            inside = "" if np.isnan(held[0]) else " ({:.0f} {:.0f} {:.0f})".format(*held)
            means = " / ".join(f"{m:.1f}" for m in mape)
            print(f"{card:5} {network:18} {len(values):4} {method:32} {means}{inside}")


def noise_of(result: Mapping[tuple[str, str], Judged]) -> dict[str, float]:
    """Deviation of power on networks held out where the time is known, by card; of unknown cards
    the largest, since their constants are drawn widely besides."""
    errors: dict[str, list[float]] = defaultdict(list)
    for (card, _), judged in result.items():
        errors[card] += [row[0] for row in judged["ours, time measured"]]
    noise = {
        card: max(LEAST_NOISE, 1.48 * float(np.median(np.abs(values))))
        for card, values in errors.items()
    }
    return {**noise, UNKNOWN: max(noise.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with the published labels")
    parser.add_argument("--traces", type=Path, required=True, help="where kernels are kept")
    parser.add_argument("--write", action="store_true", help="what is known, into the package")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.traces.mkdir(parents=True, exist_ok=True)
    all_rows = [
        *zeus(options.data / "nodes" / "zeus_train_power.csv", options.traces),
        h100(options.traces),
    ]
    networks = run(all_rows, "networks", {})
    noise = noise_of(networks)
    if options.write:
        fitted = fit([rows.labels for rows in all_rows])
        known = {**fitted.cards, UNKNOWN: fitted.unknown}
        write({name: (normal, noise[name]) for name, normal in known.items()})
        sys.stdout.write(f"noise {noise}\n")
        return
    show("networks", run(all_rows, "networks", noise))
    for split in ("batch sizes", "limits", "cards"):
        show(split, run(all_rows, split, noise))


if __name__ == "__main__":
    main()
