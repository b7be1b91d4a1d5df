"""Behavior that a refactoring must not change; see golden.py for how to record it again."""

from importlib.util import find_spec

import golden
import pytest
import whole_answers
import whole_learning
import whole_steps
from plain_values import assert_equal

SAMPLE = {"convnext_atto_rms", "test_vit2", "vgg13_bn", "hf:gpt2-tiny"}
"""The fast test repeats these predictions, of models that are traced quickly; the slow test all."""


def test_a_rehearsed_campaign_leaves_the_recorded_rows():
    assert_equal(golden.campaign_rows(), golden.read("campaign_rows.json"), 0)


def test_the_label_export_is_as_recorded():
    assert golden.label_export() == golden.read("label_export.json")


@pytest.mark.extension("power_limits")
def test_the_json_of_commands_has_the_recorded_keys():
    assert golden.json_shapes() == golden.read("json_shapes.json")


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))


@pytest.mark.extension("power_limits")
@pytest.mark.extension("transformers")
def test_whole_answers_are_as_recorded(data_folder):
    assert_equal(whole_answers.answers(), golden.read("answers.json"), 1e-6)
    assert_equal(whole_answers.comparisons(), golden.read("comparisons.json"), 1e-6)


def test_simulated_measurements_are_as_recorded(data_folder):
    assert_equal(whole_answers.simulated(), golden.read("simulated.json"), 1e-9)


def test_traced_steps_are_as_recorded():
    assert_equal(whole_steps.steps(), golden.read("steps.json"), 0)


def test_learners_make_of_labels_what_is_recorded():
    """But for rounding, which is another on each kind of CPU."""
    assert_equal(whole_learning.learned(), golden.read("learned.json"), 1e-3)


@pytest.mark.extension("power_limits")
def test_a_sample_of_predictions_is_as_recorded():
    recorded = [answer for answer in golden.read("predictions.json") if answer["model"] in SAMPLE]
    assert len(recorded) == len(SAMPLE)
    assert_as_recorded(recorded)


@pytest.mark.extension("power_limits")
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_predictions_are_as_recorded():
    assert_as_recorded(golden.read("predictions.json"))


def assert_as_recorded(recorded):
    if find_spec("trappm.extensions.transformers") is None:
        recorded = [answer for answer in recorded if not answer["model"].startswith("hf:")]
    predicted = golden.predictions([answer["model"] for answer in recorded])
    for then, now in zip(recorded, predicted, strict=True):
        assert now.keys() == then.keys(), then["model"]
        assert now.get("error") == then.get("error")
        for device in now.keys() & {*golden.DEVICE_KEYS}:
            expected = [None if x is None else pytest.approx(x, rel=1e-6) for x in then[device]]
            assert now[device] == expected, (then["model"], device)
