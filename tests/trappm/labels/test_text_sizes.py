"""Tables of labels say what a size counts: tokens of text, pixels of images."""

from __future__ import annotations

import pandas as pd
import pytest

from trappm.terminal.label_tables import print_labels


@pytest.mark.parametrize(
    ("architectures", "header"),
    [
        (["resnet18", "vit_tiny_patch16_224"], "input size device"),
        (["hf:gpt2-tiny", "hf:t5-tiny,lora=4"], "tokens device"),
        (["hf:vit-tiny", "resnet18"], "px device"),
        (["hf:gpt2-tiny", "resnet18"], "tokens px device"),
    ],
)
def test_a_column_is_named_by_what_it_counts(capsys, monkeypatch, architectures, header):
    monkeypatch.setenv("COLUMNS", "160")
    frame = pd.DataFrame(
        [
            {"id": i, "architecture": name, "batch_size": 2, "input_size": 64, "device": "cpu-2t",
             "step_time_ms": 1.5, "optimizer": "adamw"}
            for i, name in enumerate(architectures)
        ]
    )  # fmt: skip
    print_labels(frame)
    shown = " ".join(capsys.readouterr().out.split())
    assert header in shown
    assert shown.count(" 64 ") == len(architectures)
