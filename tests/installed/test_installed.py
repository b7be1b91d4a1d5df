"""An installation with few extras does what these are for, and names the extra for the rest.

Without any it predicts; with `campaign`, and what a server of one process needs, it does all but
evaluate. What the other extras bring is hidden from programs and children. `test_installed_wheel`
runs a campaign with the extra `campaign` alone.
"""

import json
import re
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest
from absent_packages import PROJECT, environment_without, of_extras_only

EXTRAS = PROJECT["optional-dependencies"]
ONE_SERVER = [line for line in EXTRAS["serve"] if not line.startswith("ray[serve]")]
ABSENT = of_extras_only(*EXTRAS["campaign"], *ONE_SERVER)
LIGHT = of_extras_only()
pytestmark = pytest.mark.timeout(1200)

COMMANDS = """
import json, sys
from trappm.cli import run
print(json.dumps([run(line.split()) for line in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Runs Python as an installation with these extras, from a folder of its own."""
    return started_without(ABSENT, tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """The same without any extra."""
    return started_without(LIGHT, tmp_path_factory.mktemp("light"))


def started_without(absent, folder):
    environment = environment_without(absent, folder) | {"TRAPPM_HOME": str(folder / "home")}

    def start(*arguments, **changes):
        return subprocess.Popen(
            [sys.executable, *arguments], env=environment | changes, cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


def trappm(*arguments):
    return ["-c", "from trappm.cli import main; main()", *arguments]


@contextmanager
def listening(process):
    """Where a server listens, once it does."""
    try:
        line = process.stdout.readline()
        yield re.search(r"http://[\d.]+:\d+", line)[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_it_serves_predictions_and_its_page(installed):
    question = {"model": "test_resnet", "batch_size": 4, "device": "a100"}
    served = installed(*trappm("serve", "--port", "0"), PYTHONUNBUFFERED="1")
    with listening(served) as address:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(  # noqa: S310
            f"{address}/v1/predict", json.dumps(question).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
            assert json.load(answer)["step_time_ms"] > 0
        for path, part in (("/", "<html"), ("/api/campaigns", "[]")):
            with urllib.request.urlopen(f"{address}{path}", timeout=300) as answer:  # noqa: S310
                assert part in answer.read().decode()


def test_commands_name_the_extra_that_they_need(installed):
    url = "postgresql+psycopg://user:secret@127.0.0.1:1/labels"
    lines = (
        "roofline test_resnet --device a100 --png p.png",
        "campaign launch --preset transformers",
    )
    for asked, variables, extras in (
        (lines, {}, ["evaluate", "transformers"]),
        (["labels query"], {"TRAPPM_DATABASE": url}, ["postgresql"]),
    ):
        process = installed("-c", COMMANDS, json.dumps(asked), **variables)
        out, err = process.communicate(timeout=1000)
        assert json.loads(out.splitlines()[-1]) == [2] * len(asked), err
        assert re.findall(r"'trappm\[(\w+)\]'$", err, re.MULTILINE) == extras
        assert "secret" not in err


PREDICTING = (
    "predict test_resnet --batch-size 4 --device a100",
    "compare test_resnet --device a100 --device v100",
    "predict test_resnet --device a100 --breakdown",
    "roofline test_resnet --device a100",
    "devices a100",
    "snapshot show default",
)
NEEDS_CAMPAIGN = (
    "campaign launch --preset laptop",
    "labels query",
    "predict test_resnet --device cpu-2t --labels",
    "store upgrade --check",
)


def test_without_extras_predictions_work(light):
    assert {"ray", "sqlalchemy", "torch_geometric", "fastapi", "pandas"} <= LIGHT
    assert not {"torch", "timm", "onnx", "pydantic", "rich"} & LIGHT
    process = light("-c", COMMANDS, json.dumps(PREDICTING))
    out, err = process.communicate(timeout=1000)
    assert json.loads(out.splitlines()[-1]) == [0] * len(PREDICTING), err
    assert "Fits A100 40 GB" in out


def test_without_extras_other_commands_name_the_extra(light):
    needs = dict.fromkeys(NEEDS_CAMPAIGN, "campaign") | {
        "serve --port 0": "serve",
    }
    process = light("-c", COMMANDS, json.dumps([*needs]))
    out, err = process.communicate(timeout=1000)
    assert json.loads(out.splitlines()[-1]) == [2] * len(needs), err
    lines = err.splitlines()
    assert [re.search(r"'trappm\[(\w+)\]'$", line)[1] for line in lines] == [*needs.values()]
