"""`trappm devices` and `trappm measure`, as a user meets them."""

from trappm.profiler.devices import local_devices


def test_devices_are_shown_with_their_evidence(printed, as_json, refusal):
    out = printed("devices", "v100", "cpu-2t")
    assert out.startswith("v100-16gb\n  training: step time from its labels")
    assert "\ncpu-2t\n" in out
    facts = as_json("devices", "v100")
    assert [row["device"] for row in facts] == ["v100-16gb"]
    assert "unknown device 'v9000'" in refusal("devices v9000")


def test_devices_of_this_machine_are_listed(printed):
    lines = printed("measure", "--devices").splitlines()
    assert [line.split()[0] for line in lines] == local_devices()
    assert all("GiB" in line for line in lines if line.startswith("cpu-"))


def test_measuring_needs_a_model(refusal):
    assert "campaign launch measures lists" in refusal("measure", "--device", "cpu-1t")
