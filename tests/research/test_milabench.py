"""Importer of milabench's throughput: which rows become labels, and with which settings."""

from research.evaluation.label_files import read_labels
from research.importers import milabench

SHEET = """card,benchmark,batch_size,cpu,memory_mib,perf_items_per_s,date,source_path
H100 80GB,convnext_large-fp16,64,8.0,15089.0,656.69,2025-03-14,a.yaml
H100 80GB,convnext_large-tf32-fp16,64,8.0,15089.0,658.4,2025-03-14,a.yaml
H100 80GB,convnext_large-fp16,1,8.0,3487.0,20.64,2025-03-14,a.yaml
L40S 48GB,convnext_large-fp32,64,8.0,24549.0,80.0,2025-04-16,b.yaml
L40S 48GB,convnext_large-tf32,64,8.0,24549.0,,2025-04-16,b.yaml
H200 141GB,resnet50-noio,256,8.0,27374.0,4868.3,2025-05-06,c.yaml
H200 141GB,resnet50,256,8.0,27374.0,1000.0,2025-05-06,c.yaml
MI325X 256GB,resnet50-noio,256,8.0,27374.0,4868.3,2025-05-06,d.yaml
"""


def test_throughputs_of_steps_alone_become_labels(tmp_path):
    path = tmp_path / "sheet.csv"
    path.write_text(SHEET)
    rows = milabench.parse_rows(path)
    labels = read_labels(path)
    assert [row.measurement is not None for row in rows] == [
        *(True, False, False, True, False, True), *(False, False),
    ]  # fmt: skip
    settings = [(m.device, m.configuration.architecture, m.configuration.precision) for m in labels]
    assert settings == [
        ("h100-80gb", "convnext_large", "amp-fp16"),
        ("l40s-48gb", "convnext_large", "fp32-strict"),
        ("h200-141gb", "resnet50", "amp-fp16"),
    ]
    assert [m.step_time_ms for m in labels[1:2]] == [800.0]
    assert {m.memory_mib for m in labels} == {None}
    assert labels[2].configuration.memory_format == "channels-last"
