"""The tools, asked by the client of the protocol's own package."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from mcp import Client
from store_samples import configuration, measurement

from trappm.extensions.mcp.server import make_server
from trappm.label_store import MAX_PAGE
from trappm.store import Home, Store

MODEL = {"model": "test_resnet", "batch_size": 4, "input_size": 64}
OPTIONS = "test_resnet --batch-size 4 --input-size 64"
RUN = {"epochs": 90, "samples": 1_281_167}
PAGE = Path(__file__).parents[3] / "docs/assistants.md"
COMMAND = """#!{python}
import os, sys
sys.path[:0] = {path!r}
os.environ["TRAPPM_HOME"] = {home!r}
from trappm.cli import main
main()
"""
NOISY = """
from trappm.extensions.mcp import server, tools
quiet = tools.predict
tools.predict = lambda *names, **settings: print("noise") or quiet(*names, **settings)
server.serve()
"""


@pytest.fixture(scope="module", autouse=True)
def home(module_home):
    return module_home


@pytest.fixture
def call():
    """Call a tool; the client checks the result against the schema of the tool."""

    def call(tool, **arguments):
        async def ask():
            async with Client(make_server()) as client:
                return await client.call_tool(tool, arguments)

        return anyio.run(ask)

    return call


@pytest.fixture
def values(call):
    def values(tool, **arguments):
        result = call(tool, **arguments)
        assert not result.is_error, result.content
        assert json.loads(result.content[0].text) == result.structured_content
        return result.structured_content

    return values


def test_predict_is_the_json_of_the_command(values, as_json):
    predicted = values("predict", **MODEL, **RUN, device="v100", breakdown_depth=2)
    options = "--device v100 --epochs 90 --samples 1281167 --breakdown --depth 2"
    assert predicted == as_json(f"predict {OPTIONS} {options}")


def test_compare_is_the_json_of_the_command(values, as_json):
    devices = {"devices": ["a100", "v100"]}
    command = f"compare {OPTIONS} --device a100 --device v100"
    assert values("compare", **MODEL, **devices) == as_json(command)


@pytest.mark.extension("advice")
def test_advise_is_the_json_of_the_command(values, as_json):
    """Of a step that fits, so that no change is tried."""
    assert values("advise", **MODEL, device="v100") == as_json(f"advise {OPTIONS} --device v100")


def test_labels_are_those_of_the_query(values, as_json):
    steps = [measurement(configuration(batch_size, "resnet18")) for batch_size in (1, 2, 4)]
    with Store.open(Home.open().database_url) as store:
        store.measurements.record_many(steps)
    wanted = values("labels", architecture="resnet*", sort="-batch_size", limit=2)
    command = "labels query --architecture resnet* --sort -batch_size --limit 2"
    assert wanted == {"rows": as_json(command), "has_more": True}


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("predict", {"model": "no_such_model"}, "timm has no architecture"),
        ("predict", {"model": "models/a.onnx"}, "reads no files by path"),
        ("predict", {"model": "shop.vision:tagger"}, "names a module to import"),
        ("predict", {**MODEL, "snapshot": "/tmp"}, "is not an id or alias"),
        ("predict", {**MODEL, "batchsize": 4}, "did you mean 'batch_size'?"),
        ("predict", {**MODEL, "batch_size": 1 << 40}, "batch_size: must be less than"),
        ("compare", {**MODEL, "model": ["resnet18"] * 65}, "model: "),
        ("labels", {"limit": MAX_PAGE + 1}, "limit: must be less than or equal to"),
        ("labels", {"where": "a" * 5000}, "at most 1000"),
        ("predikt", MODEL, "did you mean 'predict'?"),
    ],
)
def test_errors_are_one_line(call, tool, arguments, words):
    result = call(tool, **arguments)
    assert result.is_error
    [content] = result.content
    assert words in content.text
    assert "\n" not in content.text


def test_nothing_but_the_protocol_is_on_standard_output():
    process = subprocess.Popen(
        [sys.executable, "-c", NOISY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    hello = {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    }
    call = {"name": "predict", "arguments": MODEL}
    for message in (
        {"id": 1, "method": "initialize", "params": hello},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/call", "params": call},
    ):
        process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    process.stdin.flush()
    answers = [json.loads(process.stdout.readline()) for _ in range(2)]
    rest, errors = process.communicate(timeout=60)
    assert [answer["id"] for answer in answers] == [1, 2]
    assert answers[1]["result"]["structuredContent"]["model"] == "test_resnet"
    assert rest == ""
    assert "noise" in errors
    assert process.returncode == 0


def test_the_example_of_the_page_runs(home, tmp_path, monkeypatch, capsys):
    code, shown = re.search(
        r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE.read_text(), re.DOTALL
    ).groups()
    command = tmp_path / "trappm"
    command.write_text(COMMAND.format(python=sys.executable, path=sys.path, home=str(home)))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    exec(code, {})  # noqa: S102
    assert capsys.readouterr().out.split() == shown.split()
