"""Power, energy and time of steps under power limits, judged on labels held out.

    PYTHONPATH=. python research/priors/power.py ../shared/data --traces FOLDER [--write]

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
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from research.priors.power_fit import Fitted, fit
from research.priors.power_labels import NETWORKS, Rows, h100, zeus
from trappm.learner.estimator import Targets
from trappm.learner.heads.metric_head import Ours
from trappm.learner.physics.power.known_power import MEASURED, UNKNOWN, CardPower, write
from trappm.learner.physics.power.power_prior import PowerPrior
from trappm.learner.physics.power.step_power import UNTIMED, StepPower
from trappm.learner.physics.step_time_prior import StepTimePrior

Chosen = npt.NDArray[np.bool_]

FOLDS = 5
LEAST_NOISE = 0.03


Judged = dict[str, list[tuple[float, ...]]]
"""By method: errors of the logarithms of power, energy and time, and whether intervals held."""


def judge(
    rows: Rows, test: Chosen, known: CardPower, train: Sequence[tuple[Rows, Chosen]]
) -> Judged:
    """The rows that are held out, by our formula and by baselines.

    Those are of the same network's labels, where some are left and it is the only one.
    """
    judged: Judged = defaultdict(list)
    own = [(r, t) for r, t in train if r.card == rows.card and t.any()]
    names = np.unique(rows.networks[test])
    same = [(r, t & (r.networks == names[0])) for r, t in own if len(names) == 1]
    taken = [(r, t) for r, t in same if t.any()] or own or train
    watts = np.concatenate([r.labels.power_w[t] for r, t in taken])
    share = float(np.median(watts / np.concatenate([r.labels.limit_w[t] for r, t in taken])))
    mean_w = float(np.mean(watts)) if own else share * known.limit_w
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


def judge_head(rows: Rows, seeds: int = 3) -> None:
    """Power as a campaign's head learns it, with step times of the same labels."""
    names, labels, errors, held = np.unique(rows.networks), rows.labels, [], []
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        out = np.isin(rows.networks, generator.permutation(names)[: 3 * len(names) // 10])
        known = [rows.workloads[i] for i in np.flatnonzero(~out).tolist()]
        times = StepTimePrior(rows.prior.spec).refit(known, np.log(labels.usual_ms[~out]))
        targets = Targets(
            labels.power_w[~out], np.full(len(known), np.nan), rows.networks[~out].tolist()
        )
        head = Ours(PowerPrior.with_times(times)).fit(known, targets, generator)
        got = head.predict([rows.workloads[i] for i in np.flatnonzero(out).tolist()])
        errors.append(np.log(got.median / labels.power_w[out]))
        held.append((got.low <= labels.power_w[out]) & (labels.power_w[out] <= got.high))
    of_all = np.abs(np.expm1(np.concatenate(errors)))
    print(
        f"\n{rows.card}: power by a head of its own, 30 % of the architectures held out: "
        f"{100 * of_all.mean():.1f} / {100 * np.median(of_all):.1f} "
        f"({100 * np.concatenate(held).mean():.0f})"
    )


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
    judge_head(all_rows[-1])


if __name__ == "__main__":
    main()
