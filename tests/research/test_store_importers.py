"""The importers of published sheets, on small sheets of our own with the real ones' faults."""

import pytest
from store_samples import contents

from research.importers import gpumemnet, import_sheet
from trappm.profiler.errors import InputError
from trappm.store import LabelFilter

CAPACITY = gpumemnet.CAPACITY_MIB

SHEET = """architecture,batch_size,max_gpu_memory_mib,faketensor_mib
resnet18,16,3300,1000
resnet18,8,9000,600
resnet18,32,4200,1900
vgg11,8,24000,18000
vgg11,16,39900,35000
vgg11,32,3100,68000
vgg11,64,3110,1500
vgg13,8,2400,1905
vgg13,16,2410,3480
no_such_net,8,3000,500
resnet18,8,9001,600
resnet18,32,1800,1900
"""
EXPECTED = {
    ("resnet18", 8): ("ok", 9000, None),  # a spike
    ("resnet18", 16): ("ok", 3300, None),
    ("resnet18", 32): ("ok", 4200, None),  # not the run that died
    ("vgg11", 8): ("ok", 24000, None),
    ("vgg11", 16): ("oom", None, CAPACITY),
    ("vgg11", 32): ("oom", None, CAPACITY),
    ("vgg11", 64): ("oom", None, CAPACITY),  # it ended where batch 32 had
    ("vgg13", 8): ("error", None, None),  # nothing says that memory ran out
    ("vgg13", 16): ("error", None, None),
}


def test_memory_sheet_faults_are_handled(store, database_url, tmp_path):
    path = tmp_path / "sheet.csv"
    path.write_text(SHEET)
    report = import_sheet(store, path, "gpumemnet")
    assert report.counts == {"label": 4, "censored": 3, "failed": 2, "rejected": 3}
    assert (report.rows, report.new) == (12, 9)
    attempts = {
        (m.configuration.architecture, m.configuration.batch_size): m
        for m in store.measurements.each(LabelFilter(outcome="any"))
    }
    bounds = {
        (x.configuration.architecture, x.configuration.batch_size): x.memory_above_mib
        for x in store.labels.matching()
    }
    assert {at: (m.outcome, m.memory_mib, bounds.get(at)) for at, m in attempts.items()} == EXPECTED
    assert "spike" in attempts["resnet18", 8].message
    assert {(m.provenance, m.device) for m in attempts.values()} == {("imported", "a100-40gb")}
    before = contents(database_url)
    again = import_sheet(store, path, "gpumemnet")
    assert (again.new, again.counts) == (0, report.counts)
    assert contents(database_url) == before


TIMM = """model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count
resnet18,2000.0,128.0,256,224,11.69
resnet18.a1_in1k,2000.0,128.0,256,224,11.69
no_such_net,2000.0,128.0,256,224,11.69
resnet34,2000.0,0.5,256,224,21.8
"""


def test_timm_sheet_gets_its_stack_from_the_file_name(store, tmp_path):
    path = tmp_path / "benchmark-train-amp-nhwc-pt110-cu113-rtx3090.csv"
    path.write_text(TIMM)
    report = import_sheet(store, path, "timm")
    assert report.counts == {"label": 1, "rejected": 3}
    (label,) = store.labels.matching()
    assert (label.device, label.step_time_ms, label.provenance) == ("rtx3090", 128.0, "imported")
    what = label.configuration
    assert (what.precision, what.memory_format, what.optimizer, what.phase) == (
        "amp-fp16", "channels-last", "momentum", "train",
    )  # fmt: skip
    environment = store.measurements.get(label.measurement_id).environment
    assert (environment["torch"], environment["cuda"]) == ("1.10", "11.3")
    assert import_sheet(store, path, "timm").new == 0


@pytest.mark.parametrize(
    ("source", "name", "content", "message"),
    [
        ("gpumemnet", "sheet.csv", "architecture\nresnet18\n", "lacks the columns batch_size"),
        ("gpumemnet", "sheet.csv", SHEET + "vgg16,8,nan,3\n", f"line {SHEET.count(chr(10)) + 1}: "),
        ("gpumemnet", "sheet.csv", SHEET + "vgg16,8,-5,3\n", "max_gpu_memory_mib is '-5'"),
        ("gpumemnet", "sheet.csv", SHEET + "vgg16,8.5,5,3\n", "a whole number"),
        ("gpumemnet", "sheet.csv", SHEET + "vgg16,8\n", "max_gpu_memory_mib is ''"),
        ("timm", "sheet.csv", TIMM, "settings are missing"),
        ("timm", "train-amp-nchw-rtx4090.csv", TIMM, "has no versions"),
        ("nobody", "sheet.csv", SHEET, "gpumemnet, timm"),
    ],
)
def test_invalid_sheet_is_rejected_completely(store, tmp_path, source, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        import_sheet(store, path, source)
    assert store.labels.matching() == []
