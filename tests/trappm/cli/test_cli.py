"""The command line as a user meets it: help, bad input, one line of error, exit status."""

from __future__ import annotations

import pytest
import yaml


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "home"


def _small_campaign(tmp_path, **changes):
    data = {
        "name": "small",
        "devices": {"source": "cpu-2t"},
        "evaluation": {"source": 2},
        "initial": {"source": 4},
        "rounds": {"count": 0, "source": 0},
        "pool": {
            "groups": [
                {"architectures": ["resnet10t", "resnet18"], "batch_sizes": [1, 2, 4, 8],
                 "input_sizes": [64]}
            ]
        },
    } | changes  # fmt: skip
    path = tmp_path / "campaign.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["predict", "resnet188"], "did you mean"),
        (["predict", "resnet18", "--batch-size", "99999999999999999999"], "1,000,000"),
        (["predict", "resnet18", "--snapshot", "v3"], "no snapshot 'v3'"),
        (["predict", "none.onnx"], "none.onnx"),
        (["snapshot", "pull", "v3", "--to", "x"], "no snapshot 'v3'"),
        (["campaign", "launch"], "--preset laptop"),
        (["campaign", "status", "--follow", "--json"], "--follow and --json"),
        (["campaign", "report", "--device", "a100"], "--choices"),
        (["campaign", "resume", "--outcome", "timeout"], "--retry-failed"),
        (["predict", "resnet18", "--batch-size", "16,x"], "must be a number, or up to 64 numbers"),
        (["predict", "resnet18", "--batch-size", "1,2", "--breakdown"], "needs one batch size"),
        (["measure", "--device", "cpu-1t"], "campaign launch measures lists"),
        (["lables"], "lables"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_reported_in_one_line_with_status_2(refusal, arguments, reason):
    assert reason in refusal(*arguments)


def test_an_unusable_data_folder_is_reported_only_where_it_is_needed(
    refusal, printed, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path / "file" / "home"))
    assert "TRAPPM_HOME" in refusal("campaign resume")
    printed("predict test_resnet")


def test_validate_lists_every_fault_and_starts_nothing(command, tmp_path):
    faulty = {"sead": 1, "rounds": {"count": "many", "source": 2}}
    status, _, err = command("campaign validate", _small_campaign(tmp_path, **faulty))
    assert status == 2
    keys = sorted(line.split(": ")[1] for line in err.splitlines())
    assert keys == ["rounds.count", "sead"]
    wrong = {"devices": {"source": "a100"}, "initial": {"source": 99}}
    status, _, err = command("campaign validate", _small_campaign(tmp_path, **wrong))
    assert (status, len(err.splitlines())) == (2, 2)


def test_several_batch_sizes_and_precisions_give_each_answer(printed, as_json, refusal):
    question = "predict resnet18 --device rtx3090 --batch-size"
    assert printed(question, "8,64,8192").startswith("Fastest that fits: batch 64, ")
    answers = as_json(question, "8,64,8192")
    assert [answer["batch_size"] for answer in answers] == [8, 64, 8192]
    assert [answer["fits"] for answer in answers] == [True, True, False]
    question = "predict hf:gpt2-tiny --device a100 --batch-size 8,64 --precision"
    answers = as_json(question, "fp32,bf16")
    settings = [(answer["precision"], answer["batch_size"]) for answer in answers]
    assert settings == [("fp32", 8), ("fp32", 64), ("bf16", 8), ("bf16", 64)]
    assert "'int3'" in refusal(question, "fp32,int3")
