"""Behavior that a refactoring must not change; see golden.py for how to record it again."""

import golden


def test_a_rehearsed_campaign_has_the_recorded_events():
    assert golden.campaign_events() == golden.read("campaign_events.json")


def test_the_label_export_is_as_recorded():
    assert golden.label_export() == golden.read("label_export.json")


def test_the_json_of_commands_has_the_recorded_keys():
    assert golden.json_shapes() == golden.read("json_shapes.json")
