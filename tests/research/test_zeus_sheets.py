"""Power and energy under limits, as Zeus published them: what of the sheet becomes a label."""

from __future__ import annotations

import pytest

import trappm
from research.importers import import_sheet, zeus
from trappm.profiler.errors import InputError
from trappm.profiler.records.step_scope import StepScope
from trappm.store import Home, Store

SHEET = """device,dataset,network,timm_name,batch_size,optimizer,power_limit_w,avg_power_w,\
step_ms_derived,step_energy_j_derived,source_path
V100,imagenet,resnet50,resnet50,64,adadelta,100,98.6,334.3,32.95,v100.csv
V100,imagenet,resnet50,resnet50,64,adadelta,250,222.9,187.5,41.80,v100.csv
V100,imagenet,resnet50,resnet50,64,adadelta,250,222.9,187.5,41.80,v100.csv
RTX 6000,cifar100,shufflenetv2,,64,adam,250,89.1,38.0,3.4,rtx6000.csv
V100,squad,resnet50,resnet50,64,adadelta,250,222.9,,,v100.csv
V100,imagenet,resnet50,resnet50,64,lion,250,222.9,187.5,41.80,v100.csv
"""


def sheet(tmp_path, content=SHEET):
    path = tmp_path / "zeus.csv"
    path.write_text(content)
    return path


def test_a_limit_is_of_the_stack_so_labels_of_several_limits_stand_beside_each_other(
    tmp_path, store
):
    path = sheet(tmp_path)
    verdicts = zeus.verdicts(path)
    low, high = (v.measurement for v in verdicts if v.measurement is not None)
    assert [v.kind for v in verdicts] == ["imported"] * 2 + ["rejected"] * 4
    assert (low.device, low.power_w, low.energy_j, low.step_time_ms) == ("v100", 98.6, 32.95, 334.3)
    assert low.environment["device_power_limit_w"] == 100
    assert StepScope.of(low.environment).loads_data
    assert low.configuration == high.configuration
    assert {"power_w", "energy_j"}.isdisjoint(low.missing)
    report = import_sheet(store, path, "zeus")
    assert (report.new, import_sheet(store, path, "zeus").new) == (2, 0)
    assert sorted(label.power_w for label in store.labels.matching()) == [98.6, 222.9]


def test_a_label_under_a_limit_is_nobodys_cost(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    with Store.open(Home.open().database_url) as store:
        import_sheet(store, sheet(tmp_path), "zeus")
    settings = {"device": "v100", "batch_size": 64, "optimizer": "adam"}
    assert trappm.predict("resnet50", **settings, labels=True).measured is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SHEET.replace("98.6", "-1"), "line 2: avg_power_w is '-1'"),
        (SHEET.replace(",100,98.6", ",,98.6"), "line 2: power_limit_w is ''"),
        (SHEET.replace("avg_power_w", "watts"), "lacks the columns avg_power_w"),
    ],
)
def test_a_sheet_that_cannot_be_read_is_refused_with_the_line(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        zeus.verdicts(sheet(tmp_path, content))


def test_scopes_of_before_are_written_as_they_were():
    """They are part of what attempts are named by: another text would import every row again."""
    assert StepScope(updates=False).to_dict() == {
        "updates": False, "copied_bytes": 0, "waits_for_host": True,
    }  # fmt: skip
    assert StepScope.of({"step_scope": StepScope(loads_data=True).to_dict()}).loads_data
