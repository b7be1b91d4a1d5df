"""Unknown files are looked at in a process that can be ended: by Python and the command line."""

import itertools
import json
import os
import subprocess
import sys

import psutil
import pytest
from onnx import TensorProto, helper
from onnx_export import export_onnx

import trappm
from trappm.prediction.models import (
    OutsideTracer,
    TracingProcess,
    TracingTimeoutError,
    file_tracer,
)
from trappm.profiler.errors import ModelFileError
from trappm.profiler.memory.simulation import memory_of
from trappm.profiler.records import Phase
from trappm.profiler.traced_step import TraceSettings

SHAPE = ["n", 3, 8, 8]


def varint(number):
    data = b""
    while number > 127:
        data += bytes([number & 127 | 128])
        number >>= 7
    return data + bytes([number])


@pytest.fixture(scope="module")
def amplified(tmp_path_factory):
    """Twenty megabytes of empty records, which protobuf unpacks to six gigabytes."""
    image, result = (helper.make_tensor_value_info(n, TensorProto.FLOAT, SHAPE) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [image], [result])
    model = helper.make_model(graph)
    data = graph.SerializeToString() + b"\x6a\x00" * 10_000_000
    model.ClearField("graph")
    path = tmp_path_factory.mktemp("files") / "amplified.onnx"
    path.write_bytes(model.SerializeToString() + b"\x3a" + varint(len(data)) + data)
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "sound.onnx"
    export_onnx("test_resnet", 64, path)
    return path


def training_step(tracer):
    return tracer.trace(TraceSettings(), Phase.TRAIN, None, False)


def traced_by(process, path):
    return training_step(OutsideTracer(process, file_tracer(str(path), None), path.name))


@pytest.fixture(scope="module")
def process():
    process = TracingProcess(timeout_s=60, memory_mib=1024)
    yield process
    process.stop()


@pytest.mark.extension("onnx")
def test_a_tracing_process_gives_the_same_step(process, sound):
    there, here = traced_by(process, sound), training_step(file_tracer(str(sound), None))
    assert there.to_bytes() == here.to_bytes()
    assert there.graph.content_hash == here.graph.content_hash
    assert memory_of(there, 4) == memory_of(here, 4)


@pytest.mark.extension("onnx")
def test_files_that_exhaust_memory_are_refused(process, amplified, sound):
    with pytest.raises(ModelFileError, match=r"amplified\.onnx.* needs more than 1,08\d MiB"):
        traced_by(process, amplified)
    assert traced_by(process, sound).allocations is not None


@pytest.mark.extension("onnx")
def test_files_that_take_too_long_are_refused(sound, tmp_path):
    names = ["x", *(f"t{i}" for i in range(11_000)), "y"]
    nodes = [helper.make_node("Relu", [a], [b]) for a, b in itertools.pairwise(names)]
    image, result = (helper.make_tensor_value_info(n, TensorProto.FLOAT, SHAPE) for n in "xy")
    model = helper.make_model(helper.make_graph(nodes, "g", [image], [result]))
    (tmp_path / "long.onnx").write_bytes(model.SerializeToString())
    impatient = TracingProcess(timeout_s=0.3)
    with pytest.raises(TracingTimeoutError, match=r"long\.onnx took more than 0\.3 s"):
        traced_by(impatient, tmp_path / "long.onnx")
    impatient._timeout_s = 60
    assert traced_by(impatient, sound).allocations is not None
    impatient.stop()


SECRETS = (
    "PGPASSWORD",
    "TRAPPM_DATABASE",
    "TRAPPM_TOKEN",
    "RAY_AUTH_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
)


def test_tracing_processes_have_no_secrets_and_an_empty_folder(monkeypatch):
    before = {child.pid for child in psutil.Process().children()}
    for name in SECRETS:
        monkeypatch.setenv(name, "secret")
    own = TracingProcess()
    own.start()
    (server,) = (
        child
        for child in psutil.Process().children()
        if child.pid not in before
        and child.status() != psutil.STATUS_ZOMBIE  # of an earlier test
        and "trappm-tracing-" in child.cwd()
    )
    assert "secret" not in server.environ().values()
    assert "PATH" in server.environ()
    assert os.listdir(server.cwd()) == []
    own.stop()


def test_tracing_processes_have_resource_limits():
    code = (
        "import resource as r; from trappm.prediction import models as t; "
        "t.confine(memory_bytes=1 << 30, cpu_s=7); "
        "print([r.getrlimit(k)[0] for k in (r.RLIMIT_CPU, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE, "
        "r.RLIMIT_CORE, r.RLIMIT_AS)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *limits, memory_bytes = json.loads(done.stdout)
    assert limits == [7, 1 << 20, 64, 0]
    assert 1 << 30 < memory_bytes < 1 << 34


@pytest.mark.extension("onnx")
def test_predict_refuses_files_that_exhaust_memory(amplified):
    with pytest.raises(ModelFileError, match="needs more than"):
        trappm.predict(amplified)
