"""The shipped snapshot's training: heads of steps and kernels, one device from several sheets."""

from dataclasses import replace

import numpy as np
import pytest

from research.snapshot import default_snapshot
from research.snapshot.shipped_sheets import SHEETS, LabelSheet
from trappm.learner.snapshots.snapshot import load_snapshot
from trappm.prediction.selection import SHIPPED
from trappm.profiler.records import Phase

ARCHITECTURES = ("resnet18", "resnet26", "resnet34", "vgg11")
PGB = "device,n_gpus,phase,precision,timm_name,per_gpu_batch,img_size,median_ms,script,\
h2d_copy_timed,run_tag,torch,date,suspect,source_path\n"
NEUSIGHT = "op,device,latency_ms,b,m,n,k,h,c_in,c_out,kernel_size,in_size,stride,padding,rep\n"


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder of two sheets: steps of one A100 among others, and its kernels."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    folder = tmp_path / "data" / "nodes"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    rows = [
        f"{device},1,{phase},fp32,{name},12.0,224,{random.uniform(5, 40):.2f},v2,1.0,,20.10,,,a.csv"
        for device in ("A100-SXM4-40GB", "TITAN V")
        for phase in ("train", "infer")
        for name in ARCHITECTURES
    ]
    (folder / "pgb_torchvision_step.csv").write_text(PGB + "\n".join(rows))
    kernels = [
        f"relu,A100-PCIE-40GB,{0.03 + b / 1e4},{b},,,,1024,,,,,,,0" for b in (64, 512, 4096, 16384)
    ] + ["relu,V100-PCIE-32GB,0.05,64,,,,1024,,,,,,,0"]
    (folder / "kernels.csv").write_text(NEUSIGHT + "\n".join(kernels))
    monkeypatch.setattr(default_snapshot, "KERNELS_FILE", "nodes/kernels.csv")
    return tmp_path / "data"


@pytest.mark.slow  # a minute of fits
def test_a_device_has_one_set_of_heads_of_steps_and_kernels(data, tmp_path):
    a100 = LabelSheet(
        ("nodes/pgb_torchvision_step.csv",),
        "a100-40gb",
        (Phase.TRAIN, Phase.INFER),
        "step_time_ms",
        keys=("a100-sxm4-40gb",),
        kernels="a100-pcie-40gb",
    )
    part = default_snapshot.train(a100, data, processes=1)
    assert {m.device for m in part.measurements} == {"a100-sxm4-40gb"}
    assert (len(part.measurements), len(part.kernels.workloads)) == (8, 4)
    memory = replace(a100, metric="power_w", phases=(Phase.TRAIN,))
    other = replace(part, sheet=memory)
    info = default_snapshot.publish([part, other], tmp_path / "registry")
    snapshot = load_snapshot(info.folder)
    heads = snapshot.heads["a100-40gb"]
    assert set(heads[Phase.TRAIN].heads.metrics) == {"step_time_ms", "power_w"}
    assert set(heads[Phase.INFER].heads.metrics) == {"step_time_ms"}
    sources = snapshot.manifest.to_json()["sources"]
    named = {(s["source"], s.get("licence"), s["labels"]) for s in sources}
    assert ("pytorch-gpu-benchmark", "MIT", 4) in named
    assert any("NeuSight" in source and licence == "MIT" for source, licence, _ in named)


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
