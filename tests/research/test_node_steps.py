"""Steps of V100, A100 and other cards: what of a sheet becomes a label, and what is timed."""

import pytest

from research.evaluation.label_files import read_labels
from research.importers import import_sheet, node_steps
from trappm.profiler.errors import InputError
from trappm.profiler.records.step_scope import KEY, WHOLE_STEP, StepScope

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


def labels_of(verdicts):
    return [v.measurement for v in verdicts if v.measurement is not None]


def read(tmp_path, content):
    path = tmp_path / "sheet.csv"
    path.write_text(content)
    return path, node_steps.verdicts(path)


def test_pycls_is_a_step_without_update(tmp_path, store):
    path, verdicts = read(tmp_path, PYCLS)
    train, infer = labels_of(verdicts)
    assert [v.kind for v in verdicts] == ["label", "label", *["rejected"] * 3]
    assert (train.device, train.step_time_ms, train.configuration.batch_size) == (
        "v100-16gb", 106.6, 32,
    )  # fmt: skip
    assert (train.configuration.phase, infer.configuration.phase) == ("train", "infer")
    assert StepScope.of(train.environment) == StepScope(updates=False)
    report = import_sheet(store, path, "pycls")
    assert (report.new, import_sheet(store, path, "pycls").new) == (2, 0)
    assert {label.provenance for label in store.labels.matching()} == {"imported"}


def test_pytorch_gpu_benchmark_times_the_copy_of_images_in_later_scripts(tmp_path):
    _, verdicts = read(tmp_path, PGB)
    a100, first, second = labels_of(verdicts)
    assert StepScope.of(a100.environment).copied_bytes == 3 * 4 * 224**2
    assert StepScope.of(first.environment).copied_bytes == 0
    # Two cards of one kind are two runs, not a second row for the same.
    assert (first.device, second.device) == ("titan-v", "titan-v")
    assert first.attempt_key != second.attempt_key
    reasons = [v.reason for v in verdicts if v.kind == "rejected"]
    assert ["fp16" in reasons[0], "several GPUs" in reasons[1]] == [True, True]
    assert ["doubtful" in reasons[2], "not told" in reasons[3]] == [True, True]


def test_deep_learning_examples_time_whole_steps(tmp_path):
    path, verdicts = read(tmp_path, DLE)
    amp, fp32 = labels_of(verdicts)
    assert (amp.configuration.precision, amp.configuration.memory_format) == (
        "amp-fp16", "channels-last",
    )  # fmt: skip
    assert (fp32.configuration.precision, fp32.device) == ("fp32", "v100-16gb")
    assert StepScope.of(amp.environment) == WHOLE_STEP
    assert [m.attempt_key for m in read_labels(path)] == [amp.attempt_key, fp32.attempt_key]


@pytest.mark.parametrize(
    ("content", "source", "message"),
    [
        (PYCLS, "deep-learning-examples", "not a sheet of deep-learning-examples"),
        ("a,b\n1,2\n", None, "not a sheet of pycls or"),
        (PYCLS.replace("106.6", "-1"), None, "line 2: step_ms is '-1'"),
        (PYCLS.replace(",32,", ",3.5,"), None, "line 2: per_gpu_batch is 3.5"),
    ],
)
def test_unreadable_sheets_are_rejected_with_line_number(tmp_path, content, source, message):
    path = tmp_path / "sheet.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        node_steps.verdicts(path, source)


@pytest.mark.parametrize("given", ["all", {"updates": 3}, {"naps": True}, {"copied_bytes": -1}])
def test_unknown_scope_is_rejected(given):
    with pytest.raises(InputError, match=KEY):
        StepScope.of({KEY: given})
