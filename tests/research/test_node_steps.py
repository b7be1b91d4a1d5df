"""Importers of published sheets: what of a sheet becomes a label, and what is timed."""

import pytest
from store_samples import contents

from research.evaluation.label_files import read_labels
from research.importers import gpumemnet, import_sheet, node_steps
from trappm.profiler.errors import InputError
from trappm.profiler.records.step_scope import WHOLE_STEP, StepScope
from trappm.store import LabelFilter

PYCLS = """timm_name,device,phase,precision,n_gpus,per_gpu_batch,img_size,step_ms,source_path
resnet50,V100-16GB,train_fwd_bwd,fp32,8,32,224,106.6,x.json
resnet50,V100-16GB,infer,fp32,8,25,224,22.3,x.json
resnet50,V100-16GB,infer,fp32,8,25,224,22.3,x.json
,V100-16GB,infer,fp32,8,25,224,90.1,x.json
no_such_net,V100-16GB,infer,fp32,8,25,224,90.1,x.json
"""
PGB = """device,n_gpus,phase,precision,timm_name,per_gpu_batch,img_size,median_ms,script,\
h2d_copy_timed,run_tag,torch,date,suspect,source_path
A100-SXM4-40GB,1,train,fp32,resnet50,12.0,224,35.96,v2,1.0,,20.10,2021-01-03,,a.csv
A100-SXM4-40GB,1,train,fp16,resnet50,12.0,224,30.1,v2,1.0,,20.10,2021-01-03,,a.csv
A100-SXM4-40GB,4,train,fp32,resnet50,12.0,224,99.0,v2,1.0,,20.10,2021-01-03,,a.csv
TITAN V,1,infer,fp32,resnet50,12.0,224,14.28,v1,0.0,card 1,1.0,2018-10-02,,b.csv
TITAN V,1,infer,fp32,resnet50,12.0,224,14.29,v1,0.0,card 2,1.0,2018-10-02,,b.csv
TITAN V,1,infer,fp32,resnet18,12.0,224,99.0,v1,0.0,card 2,1.0,2018-10-02,spread,b.csv
TITAN V,1,infer,fp32,resnet18,,224,99.0,v1,0.0,card 2,1.0,2018-10-02,,b.csv
"""
DLE = """timm_name,device,system,phase,precision,memory_format,n_gpus,per_gpu_micro_batch,img_size,\
micro_step_ms_derived,suspect,container,source_path
resnet50,A100-80GB,,train,amp,channels_last,1,256.0,224.0,100.8,,NGC pytorch 21.03,README.md
resnet50,V100-16GB,DGX-1,train,fp32,contiguous,1,112.0,224.0,304.6,,NGC pytorch 21.03,README.md
"""


def labels_of(rows):
    return [v.measurement for v in rows if v.measurement is not None]


def read(tmp_path, content):
    path = tmp_path / "sheet.csv"
    path.write_text(content)
    return path, node_steps.parse_rows(path)


def test_pycls_is_a_step_without_update(tmp_path, store):
    path, rows = read(tmp_path, PYCLS)
    train, infer = labels_of(rows)
    assert [v.kind for v in rows] == ["label", "label", *["rejected"] * 3]
    expected = "v100-16gb", 106.6, 32
    assert (train.device, train.step_time_ms, train.configuration.batch_size) == expected
    assert (train.configuration.phase, infer.configuration.phase) == ("train", "infer")
    assert StepScope.of(train.environment) == StepScope(updates=False)
    report = import_sheet(store, path, "pycls")
    assert (report.new, import_sheet(store, path, "pycls").new) == (2, 0)
    assert {label.provenance for label in store.labels.find()} == {"imported"}


def test_pytorch_gpu_benchmark_times_the_copy_of_images_in_later_scripts(tmp_path):
    _, rows = read(tmp_path, PGB)
    a100, first, second = labels_of(rows)
    assert StepScope.of(a100.environment).copied_bytes == 3 * 4 * 224**2
    assert StepScope.of(first.environment).copied_bytes == 0
    # Two cards of one kind are two runs, not a second row for the same.
    assert (first.device, second.device) == ("titan-v", "titan-v")
    assert first.attempt_key != second.attempt_key
    reasons = [v.reason for v in rows if v.kind == "rejected"]
    assert ["fp16" in reasons[0], "several GPUs" in reasons[1]] == [True, True]
    assert ["doubtful" in reasons[2], "not told" in reasons[3]] == [True, True]


def test_deep_learning_examples_time_whole_steps(tmp_path):
    path, rows = read(tmp_path, DLE)
    amp, fp32 = labels_of(rows)
    settings = amp.configuration.precision, amp.configuration.memory_format
    assert settings == ("amp-fp16", "channels-last")
    assert (fp32.configuration.precision, fp32.device) == ("fp32", "v100-16gb")
    assert StepScope.of(amp.environment) == WHOLE_STEP
    assert [m.attempt_key for m in read_labels(path)] == [amp.attempt_key, fp32.attempt_key]


# Sheets of memory and timm's, small ones of our own with the real ones' faults.


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
        for x in store.labels.find()
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
    (label,) = store.labels.find()
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
        ("timm", "sheet.csv", TIMM, "settings are missing"),
        ("timm", "train-amp-nchw-rtx4090.csv", TIMM, "has no versions"),
    ],
)
def test_invalid_sheet_is_rejected_completely(store, tmp_path, source, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        import_sheet(store, path, source)
    assert store.labels.find() == []
