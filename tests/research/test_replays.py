"""`python -m research replay`: kept results, pairs, areas, and what is told of them."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from research.__main__ import main as run
from research.replay.replay import Point
from research.replay.replays import Job, Plan, Results
from research.replay.tables import (
    area,
    draw,
    half_band,
    jackknife_error,
    labels_to,
    print_summary,
    seconds_to_same_error,
    standard_error,
    summary,
)
from trappm.profiler.errors import InputError


@pytest.fixture
def plan(tmp_path):
    labels = tmp_path / "labels.csv"
    labels.write_text("made up")
    return Plan(
        labels=labels, metric="step_time_ms", strategies=("random", "ours"), seeds=range(6),
        budgets=(20, 40, 80),
    )  # fmt: skip


def campaign(factor, seed, seconds=100.0):
    """Errors that fall with the root of labels; seeds differ, strategies by a factor."""
    start = 20.0 + np.random.default_rng(seed).normal()
    return [
        Point(n, factor * start * (20 / n) ** 0.5, start / 2, seconds * n / 20, 0)
        for n in (20, 40, 80)
    ]


def filled(plan, path):
    results = Results(path, plan.identity)
    for seed in plan.seeds:
        results.add(Job(seed, "quick", "random"), campaign(1.0, seed))
        results.add(Job(seed, "quick", "ours"), campaign(0.8, seed, seconds=50.0))
    return results


def test_results_come_back_and_others_are_left_alone(plan, tmp_path):
    path = tmp_path / "results.jsonl"
    kept = filled(plan, path)
    assert Results.read(path, plan.identity).points == kept.points
    assert Results.read(path, "of other labels").points == {}
    assert Results.read(tmp_path / "none.jsonl", plan.identity).points == {}


def test_a_line_cut_off_costs_that_campaign_only(plan, tmp_path):
    path = tmp_path / "results.jsonl"
    kept = filled(plan, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    again = Results.read(path, plan.identity)
    assert len(again.points) == len(kept.points) - 1
    lost = set(kept.points) - set(again.points)
    again.add(lost.pop(), campaign(0.8, 5, seconds=50.0))
    assert Results.read(path, plan.identity).points == kept.points
    assert path.read_bytes() == whole


def test_many_may_add_to_one_file_at_once(plan, tmp_path):
    path = tmp_path / "results.jsonl"

    def add(learner):
        mine = Results(path, plan.identity)
        for seed in range(20):
            mine.add(Job(seed, learner, "ours"), campaign(1.0, seed))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, "abcd"))
    assert len(Results.read(path, plan.identity).points) == 80


def test_results_of_other_labels_budgets_or_code_are_not_continued(plan, tmp_path, monkeypatch):
    path, other = tmp_path / "results.jsonl", tmp_path / "other.csv"
    other.write_text("made up too")
    kept = filled(plan, path)
    changed = [replace(plan, labels=other), replace(plan, metric="power_w"),
               replace(plan, budgets=(20,))]  # fmt: skip
    assert len({plan.identity, *(p.identity for p in changed)}) == 4
    for name, value in (("BENCH", 1), ("__version__", "0.0.0")):
        with monkeypatch.context() as patch:
            patch.setattr(f"research.replay.replays.{name}", value)
            assert Results.read(path, plan.identity).points == {}
    assert Results.read(path, plan.identity).points == kept.points


def test_strategies_are_compared_on_the_same_seeds(plan, tmp_path):
    results = filled(plan, tmp_path / "results.jsonl")
    del results.points[Job(3, "quick", "ours")]
    rows = {row["strategy"]: row for row in summary(results, plan)}
    assert rows["ours"]["seeds"] == 5
    assert rows["random"]["seeds"] == 6
    assert rows["random"]["area_percent"] == pytest.approx(0.0)
    # Every pair differs by a fifth, however much the seeds differ.
    assert rows["ours"]["area_percent"] == pytest.approx(-20.0)
    assert rows["ours"]["area_error"] == pytest.approx(0.0, abs=1e-9)
    assert rows["ours"]["wins"] == 5
    # At the same error: 0.64 of the labels, each of half the seconds.
    assert rows["ours"]["seconds_percent"] == pytest.approx(-68.0, abs=2.0)
    assert 0.0 < rows["ours"]["seconds_error"] < 2.0


def test_wins_count_better_splits_and_another_baseline_may_be_named(plan, tmp_path, capsys):
    results = filled(plan, tmp_path / "results.jsonl")
    rows = summary(results, plan, "ours")
    by_name = {row["strategy"]: row for row in rows}
    assert by_name["random"]["area_percent"] == pytest.approx(25.0)
    print_summary(rows, plan.metric, "ours")
    assert "difference to ours" in capsys.readouterr().out
    results.points[Job(2, "quick", "ours")] = campaign(1.1, 2)
    results.points[Job(3, "quick", "ours")] = campaign(1.0, 3)  # as good is no win
    rows = summary(results, plan)
    assert [row["wins"] for row in rows] == [0, 4]
    print_summary(rows, plan.metric)
    assert "4/6" in capsys.readouterr().out


def test_errors_count_that_splits_overlap():
    """Three tenths judge in each split, so means of many splits scatter far more than 1/n."""
    values = np.array([1.0, 2.0, 4.0, 5.0])
    assert standard_error(values) == pytest.approx(values.std(ddof=1) * np.sqrt(1 / 4 + 3 / 7))
    assert standard_error(values[:1]) is None


def test_the_error_of_seconds_is_that_of_a_mean_where_splits_differ_in_seconds_only():
    splits = np.exp(np.random.default_rng(1).normal(scale=0.1, size=12))
    errors = 16.0, 8.0, 4.0
    base = [[Point(n, e, e, float(n), 0) for n, e in zip((20, 40, 80), errors, strict=True)]] * 12
    own = [[replace(p, seconds=float(p.labels * factor)) for p in base[0]] for factor in splits]
    percent = 100 * (splits - 1)
    assert seconds_to_same_error(own, base) == pytest.approx(percent.mean())
    assert jackknife_error(own, base) == pytest.approx(standard_error(percent))
    unknown = [[replace(p, seconds=None) for p in campaign] for campaign in own]
    assert jackknife_error(unknown, base) is None


def test_area_is_the_mean_over_the_logarithm():
    flat = area(np.log([20, 80, 300]), np.array([[3.0, 3.0, 3.0], [4.0, 2.0, 2.0]]))
    assert flat[0] == pytest.approx(3.0)
    assert 2.0 < flat[1] < 3.0
    assert area(np.log([20]), np.array([[3.0], [4.0]])).tolist() == [3.0, 4.0]


def test_labels_to_a_target_lie_between_budgets():
    row = {"budgets": [{"labels": n, "mape": e} for n, e in ((20, 12.0), (40, 8.0), (80, 6.0))]}
    assert labels_to(row, 15.0) == 20
    assert 20 < labels_to(row, 10.0) < 40
    assert labels_to(row, 8.0) == pytest.approx(40)
    assert labels_to(row, 1.0) is None


def test_a_single_seed_has_no_errors_and_no_band(plan, tmp_path, capsys):
    rows = summary(filled(plan, tmp_path / "results.jsonl"), replace(plan, seeds=(2,)))
    json.dumps(rows, allow_nan=False)
    assert rows[1]["area_error"] is rows[1]["seconds_error"] is None
    assert rows[1]["budgets"][0]["difference_error"] is None
    assert rows[1]["budgets"][0]["difference"] < 0
    print_summary(rows, plan.metric)
    output = capsys.readouterr().out
    assert "nan" not in output
    assert "-20.0" in output
    assert half_band(rows[1]).tolist() == [0.0, 0.0, 0.0]
    draw(rows, tmp_path / "curves.png", "made up")


def test_the_band_around_a_curve_is_wider_for_few_seeds():
    errors = [{"error": 1.0}, {"error": 2.0}]
    # Of a table of Student's t: 4 and 19 degrees of freedom, 97.5 %.
    assert half_band({"seeds": 5, "budgets": errors}) == pytest.approx([2.776, 5.553], abs=1e-3)
    assert half_band({"seeds": 20, "budgets": errors}) == pytest.approx([2.093, 4.186], abs=1e-3)


def test_a_table_and_curves_are_made(plan, tmp_path, capsys):
    rows = summary(filled(plan, tmp_path / "results.jsonl"), plan)
    print_summary(rows, plan.metric)
    output = capsys.readouterr().out
    assert "ours" in output
    assert "-20.0" in output
    assert "-68 ± 0" in output
    draw(rows, tmp_path / "curves.png", "made up")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(InputError, match="cannot be written"):
        draw(rows, tmp_path / "none" / "curves.png", "made up")
    with pytest.raises(InputError, match="cannot be written"):
        draw(rows, tmp_path, "made up")
    draw(rows, tmp_path / "curves.odd", "made up")  # an ending that matplotlib does not know
    assert (tmp_path / "curves.odd").read_bytes()[:4] == b"\x89PNG"


def test_the_command_replays_what_is_kept_without_preparing_anything(
    plan, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    command = ["replay", "--labels", str(plan.labels), "--metric", "step-time",
               "--budget", "50", "--seeds", "1",
               "--results", str(tmp_path / "r.jsonl")]  # fmt: skip
    kept = Plan(labels=plan.labels, metric=plan.metric, strategies=(), seeds=(),
                budgets=[20, 30, 50])  # fmt: skip
    results = Results(tmp_path / "r.jsonl", kept.identity)
    for strategy in ("random", "ours"):
        points = [Point(n, 5.0, 4.0, 1.0, 0) for n in (20, 30, 50)]
        results.add(Job(1337, "quick", strategy), points)
    assert run([*command, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["results"]) == 2
    assert run([*command, "--strategy", "rndom"]) == 2
    assert "did you mean" in capsys.readouterr().err
    assert run([*command, "--baseline", "ours", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["baseline"] == "ours"
    assert run([*command, "--strategy", "ours"]) == 2
    assert "baseline 'random' is not replayed" in capsys.readouterr().err


def test_files_that_are_not_there_are_told_before_anything_is_run(plan, tmp_path, capsys):
    command = ["replay", "--labels", str(plan.labels), "--metric", "step-time"]
    assert run([*command, "--usable", str(tmp_path / "none.csv")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert run([*command, "--results", str(tmp_path / "none" / "r.jsonl")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_told_before_anything_is_run(
    plan, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "bmdal_reg", None)
    monkeypatch.setattr("research.replay.replays.Benches", None)
    command = ["replay", "--labels", str(plan.labels), "--metric", "step-time",
               "--results", str(tmp_path / "r.jsonl")]  # fmt: skip
    for strategies in ("random,bmdal-lcmd", "all"):
        assert run([*command, "--strategy", strategies]) == 2
        assert "pip install bmdal-reg" in capsys.readouterr().err
    assert not (tmp_path / "r.jsonl").exists()
