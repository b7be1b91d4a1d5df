"""Estimates over HTTP: those of the command, made in a process of their own, and remembered."""

import asyncio
import json

import pytest
from serving_samples import Asker

import trappm
from trappm import cli
from trappm.extensions.web import answerer
from trappm.prediction.estimate import EstimateRequest
from trappm.prediction.models.tracing import Deadline, TracingProcess

QUESTION = {"model": "test_resnet", "input_size": 64, "batch_size": 4, "devices": ["a100", "v100"]}


pytestmark = pytest.mark.usefixtures("home")


def traces(asker, outcome="done"):
    name = f'trappm_traces_total{{outcome="{outcome}"}} '
    lines = asker.get("/metrics").body.decode().splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_the_answer_is_that_of_trappm_estimate(server):
    question = QUESTION | {
        "optimizer": "adamw", "precision": "amp-fp16", "memory_format": "channels-last", "depth": 2
    }  # fmt: skip
    response = server.post("/v1/estimate", question)
    devices, depth = question.pop("devices"), question.pop("depth")
    expected = trappm.estimate(question.pop("model"), **question).to_dict(devices, depth)
    assert response.status == 200, response.body
    assert response.json == json.loads(json.dumps(expected))
    assert all(x["line"].startswith("timm/") == bool(x["module"]) for x in response.json["largest"])
    on_cards = response.json["devices"]
    assert on_cards["a100"]["parts_mib"]["optimizer_state"] > 0
    assert on_cards["v100"]["largest_batch"] < on_cards["a100"]["largest_batch"]


def test_the_process_that_traces_finds_the_snapshots_of_this_home(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    here = str(tmp_path / "snapshots")
    assert cli.run(["snapshot", "push", "default", "--registry", here, "--alias", "stable"]) == 0
    request = EstimateRequest(
        model="test_resnet", batch_size=4, input_size=64, phase="train", precision="fp32",
        memory_format="contiguous", optimizer="sgd", devices=["a100"], depth=1, snapshot="stable",
    )  # fmt: skip
    process = TracingProcess()
    answer = json.loads(request.answered_by(process, Deadline(120)))
    process.stop()
    expected = trappm.predict("test_resnet", batch_size=4, input_size=64, device="a100")
    assert answer["devices"]["a100"]["memory_mib"] == pytest.approx(expected.memory_mib)


def test_equal_questions_are_traced_once_and_remembered(server, monkeypatch):
    before = traces(server)
    questions = [QUESTION | {"phase": "infer"}, QUESTION | {"phase": "infer", "depth": 1}]

    async def crowd():
        bodies = [json.dumps(question).encode() for question in questions]
        return await asyncio.gather(
            *(server.ask("POST", "/v1/estimate", [body]) for body in bodies)
        )

    first, second = server.run(crowd())
    assert first.status == 200
    assert first.json == second.json == server.post("/v1/estimate", questions[0]).json
    assert traces(server) == before + 1
    monkeypatch.setattr(answerer, "MAX_ESTIMATES", 1)
    for batch_size in (5, 6, 5):  # the first is forgotten for the second
        server.post("/v1/estimate", QUESTION | {"batch_size": batch_size})
    assert traces(server) == before + 4


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "model.onnx"}, 400, "call trappm.estimate in Python"),
        ({"model": "../models/net"}, 400, "call trappm.estimate in Python"),
        ({"model": ""}, 400, "model"),
        ({"devices": ["tpu"]}, 400, "unknown device 'tpu'"),
        ({"devices": ["v100"], "precision": "bf16"}, 400, "use amp-fp16"),
        ({"devices": []}, 400, "devices"),
        ({"devices": "a100"}, 400, "devices"),
        ({"phase": "sleep"}, 400, "sleep"),
        ({"precision": "fp8"}, 400, "fp8"),
        ({"memory_format": "sparse"}, 400, "sparse"),
        ({"optimizer": "lion"}, 400, "lion"),
        ({"batch_size": 0}, 400, "batch_size"),
        ({"depth": 21}, 400, "depth"),
        ({"colour": 1}, 400, "colour"),
    ],
)
def test_what_can_be_seen_to_be_wrong_is_refused_before_a_trace(server, change, status, words):
    before = traces(server, "failed")
    response = server.post("/v1/estimate", QUESTION | change)
    assert (response.status, words in response.json["detail"]) == (status, True), response.body
    assert "\n" not in response.json["detail"]
    assert traces(server, "failed") == before


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "test_resnett"}, 404, "test_resnet"),
        ({"model": "test_vit", "input_size": 7}, 422, "divisible by patch size"),
    ],
)
def test_what_cannot_be_traced_is_told_in_a_line(server, change, status, words):
    response = server.post("/v1/estimate", QUESTION | change)
    assert (response.status, words in response.json["detail"]) == (status, True), response.body
    assert "\n" not in response.json["detail"]
    assert response.headers["content-type"] == "application/problem+json"


def test_an_estimate_has_the_limits_of_a_trace():
    with Asker(trace_memory_mib=1) as asker:
        response = asker.post("/v1/estimate", QUESTION)
        assert response.status == 422, response.body
        # By where memory ends: in torch's allocator, or where the process is looked at.
        assert any(words in response.json["detail"] for words in ("memory", "more than 1 MiB"))
    with Asker(max_waiting=0) as asker:
        questions = [json.dumps(QUESTION | {"batch_size": size}).encode() for size in (6, 7)]

        async def both():
            asked = (asker.ask("POST", "/v1/estimate", [question]) for question in questions)
            return sorted(response.status for response in await asyncio.gather(*asked))

        assert asker.run(both()) == [200, 503]
    with Asker(timeout_s=0.05) as asker:
        assert asker.post("/v1/estimate", QUESTION).status == 504
        assert traces(asker) == 0


def test_the_schema_describes_estimates(server):
    schema = server.get("/openapi.json").json
    body = schema["paths"]["/v1/estimate"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"]["$ref"].endswith("/EstimateQuestion")
    fields = schema["components"]["schemas"]["EstimateQuestion"]["properties"]
    assert set(fields) == {
        "model", "batch_size", "input_size", "phase", "precision", "memory_format", "optimizer",
        "devices", "depth",
    }  # fmt: skip
