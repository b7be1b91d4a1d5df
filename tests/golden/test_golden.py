"""Behavior that a refactoring must not change; see golden.py for how to record it again."""

import golden
import pytest

TOLERANCE = 1e-6


def _assert_same(rows, recorded):
    assert [(r["model"], r.get("device"), r.get("error")) for r in rows] == [
        (r["model"], r.get("device"), r.get("error")) for r in recorded
    ]
    for row, expected in zip(rows, recorded, strict=True):
        for metric in golden.METRICS if "error" not in row else ():
            assert row[metric] == pytest.approx(expected[metric], rel=TOLERANCE), (
                row["model"],
                row["device"],
                metric,
            )


def test_predictions_of_a_few_models_are_as_recorded():
    recorded = golden.read("predictions.json")
    names = list(dict.fromkeys(row["model"] for row in recorded))
    models = [*names[: golden.ARCHITECTURES : 50], *names[golden.ARCHITECTURES :: 15]]
    _assert_same(golden.predictions(models), [r for r in recorded if r["model"] in models])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_predictions_are_as_recorded():
    recorded = golden.read("predictions.json")
    models = list(dict.fromkeys(row["model"] for row in recorded))
    _assert_same(golden.predictions(models), recorded)


def test_a_rehearsed_campaign_has_the_recorded_events():
    assert golden.campaign_events() == golden.read("campaign_events.json")


def test_the_label_export_is_as_recorded():
    assert golden.label_export() == golden.read("label_export.json")


def test_the_json_of_commands_has_the_recorded_keys():
    assert golden.json_shapes() == golden.read("json_shapes.json")
