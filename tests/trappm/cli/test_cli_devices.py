"""`trappm devices`, as a user meets it."""


def test_devices_are_shown_with_their_evidence(printed, as_json, refusal):
    out = printed("devices", "v100", "cpu-2t")
    assert out.startswith("v100-16gb\n  training: step time from its labels")
    assert "\ncpu-2t\n" in out
    facts = as_json("devices", "v100")
    assert [row["device"] for row in facts] == ["v100-16gb"]
    assert "unknown device 'v9000'" in refusal("devices v9000")
