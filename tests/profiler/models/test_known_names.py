"""timm's names, read off its source: the same that it lists, before it is imported."""

import subprocess
import sys

import pytest

from trappm.profiler.errors import UnknownArchitectureError
from trappm.profiler.models import known_names, zoo

NAMES = (
    "resnet51", "resnets", "resnet50", "resnet50.a1_in1k", "ig_resnext101_32x8d",
    "tf_efficientnet_b0_ns", "resnet*",
)  # fmt: skip


def refusal(check, name):
    try:
        check(name)
    except UnknownArchitectureError as error:
        return str(error)
    return None


def test_names_read_from_the_source_agree_with_timm(monkeypatch):
    assert known_names.registered_names() == set(zoo.architectures(["*"]))
    late = [refusal(zoo.check, name) for name in NAMES[:2]]
    monkeypatch.delitem(sys.modules, "timm")
    early = [refusal(known_names.refuse_unknown, name) for name in NAMES]
    assert early == [*late, *[None] * 5]


QUESTIONS = [
    (["predict", "resnet51"], "did you mean 'resnet51q'"),
    (["predict", "resnet50", "--batch-size", "0"], "batch size is 0"),
    (["predict", __file__], "is not an ONNX file"),
    (["snapshot", "show", "nobody"], "no snapshot 'nobody'"),
]


@pytest.mark.extension("transformers")
def test_invalid_questions_are_refused_before_heavy_imports():
    too_long = ["predict", "hf:gpt2", "--sequence-length", "100000"]
    questions = [*QUESTIONS, (too_long, "at most 1,024 tokens")]
    code = (
        "import sys\n"
        "from trappm.cli import run\n"
        f"for words, _ in {questions!r}: run(words)\n"
        "assert not {'torch', 'timm', 'onnx', 'sqlalchemy', 'pandas', 'ray'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line, (_, message) in zip(done.stderr.splitlines(), questions, strict=True):
        assert message in line
