"""Unknown files are looked at in a process that can be ended: by Python and the command line."""

import itertools
import json
import os
import subprocess
import sys

import psutil
import pytest
from hostile_files import amplified as amplified_files
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


@pytest.fixture(scope="module")
def amplified(tmp_path_factory):
    """Twenty megabytes of empty records, which protobuf unpacks to six gigabytes."""
    path = tmp_path_factory.mktemp("files") / "amplified.onnx"
    files = amplified_files()
    path.write_bytes(next(content for name, content in files if name == "empty value infos"))
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


SECRETS = ("PGPASSWORD", "TRAPPM_DATABASE", "TRAPPM_TOKEN", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture(scope="module")
def process():
    """One that is started where the environment has secrets."""
    process = TracingProcess(timeout_s=60, memory_mib=1024)
    with pytest.MonkeyPatch.context() as patch:
        for name in SECRETS:
            patch.setenv(name, "secret")
        process.start()
    yield process
    process.stop()


def test_tracing_processes_have_no_secrets_and_an_empty_folder(process):
    alive = (c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE)
    tracing = [child for child in alive if "trappm-tracing-" in child.cwd()]
    server = max(tracing, key=lambda child: child.create_time())  # not of another test
    assert "secret" not in server.environ().values()
    assert "PATH" in server.environ()
    assert os.listdir(server.cwd()) == []


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
def test_files_that_take_too_long_are_refused(process, sound, tmp_path, monkeypatch):
    names = ["x", *(f"t{i}" for i in range(11_000)), "y"]
    nodes = [helper.make_node("Relu", [a], [b]) for a, b in itertools.pairwise(names)]
    image, result = (helper.make_tensor_value_info(n, TensorProto.FLOAT, SHAPE) for n in "xy")
    model = helper.make_model(helper.make_graph(nodes, "g", [image], [result]))
    (tmp_path / "long.onnx").write_bytes(model.SerializeToString())
    with monkeypatch.context() as patch:
        patch.setattr(process, "_timeout_s", 0.3)
        with pytest.raises(TracingTimeoutError, match=r"long\.onnx took more than 0\.3 s"):
            traced_by(process, tmp_path / "long.onnx")
    assert traced_by(process, sound).allocations is not None


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
