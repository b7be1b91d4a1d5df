"""timm's names, read off its source: the same that it lists, before it is imported."""

import subprocess
import sys

import pytest


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_names_read_from_the_source_agree_with_timm():
    code = (
        "from trappm.profiler.models.known_names import refuse_unknown\n"
        "from trappm.profiler.errors import UnknownArchitectureError\n"
        "import importlib.util, pathlib\n"
        "def refused(name):\n"
        "    try:\n"
        "        return refuse_unknown(name)\n"
        "    except UnknownArchitectureError as error:\n"
        "        return str(error)\n"
        "names = ('resnet51', 'resnets', 'resnet50', 'resnet50.a1_in1k', 'ig_resnext101_32x8d',\n"
        "         'tf_efficientnet_b0_ns', 'resnet*')\n"
        "early = [refused(name) for name in names]\n"
        "from trappm.profiler.models import known_names, zoo\n"
        "folder = pathlib.Path(importlib.util.find_spec('timm').origin).parent / 'models'\n"
        "found = {n for p in folder.glob('*.py')\n"
        "         for n in known_names._REGISTERED.findall(p.read_text())}\n"
        "assert found == set(zoo.architectures(['*']))\n"
        "late = []\n"
        "for name in names[:2]:\n"
        "    try:\n"
        "        zoo.check(name)\n"
        "    except UnknownArchitectureError as error:\n"
        "        late.append(str(error))\n"
        "assert early == [*late, *[None] * 5], early\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "resnet51"], "did you mean 'resnet51q'"),
        (["predict", "resnet50", "--batch-size", "0"], "batch size is 0"),
        (["predict", ""], "the model's name is empty"),
        (["predict", "model"], "timm has no architecture 'model'"),
        (["predict", __file__], "is not an ONNX file"),
        pytest.param(
            ["roofline", "resnet51"],
            "did you mean 'resnet51q'",
            marks=pytest.mark.extension("roofline"),
        ),
        pytest.param(
            ["scale", "resnet51"],
            "did you mean 'resnet51q'",
            marks=pytest.mark.extension("parallel"),
        ),
        pytest.param(
            ["predict", "hf:gpt2", "--sequence-length", "100000"],
            "at most 1,024 tokens",
            marks=pytest.mark.extension("transformers"),
        ),
        (["compare", "resnet50", "--sort", "price"], "'--sort': 'price' is not one of"),
        (["snapshot", "show", "nobody"], "no snapshot 'nobody'"),
    ],
)
def test_invalid_questions_are_refused_before_heavy_imports(arguments, message):
    code = (
        "import sys\n"
        "from trappm.cli import run\n"
        f"run({arguments!r})\n"
        "assert not {'torch', 'timm', 'onnx', 'sqlalchemy', 'pandas', 'ray'} & set(sys.modules)\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert message in done.stderr + done.stdout
