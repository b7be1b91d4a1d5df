"""The shipped snapshot's training: heads of steps and kernels, one device from several sheets."""

from research.snapshot import default_snapshot
from research.snapshot.shipped_sheets import SHEETS
from trappm.learner.snapshots.snapshot import load_snapshot
from trappm.prediction.selection import SHIPPED


def test_heads_of_other_sheets_are_kept_as_they_ship():
    sheet = next(sheet for sheet in SHEETS if sheet.files[0] == "rtx3090_train_step_amp_nchw.csv")
    heads, errors, sources = default_snapshot.kept_parts(SHIPPED, [sheet])
    shipped = load_snapshot(SHIPPED).manifest.to_json()
    del shipped["heads"]["rtx3090"]["train"], shipped["errors"]["rtx3090"]["train"]
    metrics = {
        device: {phase.value: [*kept.heads.metrics] for phase, kept in phases.items()}
        for device, phases in heads.items()
    }
    assert metrics == {
        device: {phase: head["metrics"] for phase, head in phases.items()}
        for device, phases in shipped["heads"].items()
    }
    assert errors == shipped["errors"]
    assert not [row for row in sources if "for" in row]  # those of other cards are written again
