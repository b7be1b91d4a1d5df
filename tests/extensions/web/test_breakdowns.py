"""Memory breakdowns over HTTP: traced in a process of their own, and cached."""

import asyncio
import json

import pytest
from serving_samples import Asker

import trappm
from trappm.extensions.web import answerer

QUESTION = {
    "model": "test_resnet", "input_size": 64, "batch_size": 4, "devices": ["a100", "v100"],
    "breakdown_depth": 2,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("home")


def traces(asker, outcome="done"):
    name = f'trappm_traces_total{{outcome="{outcome}"}} '
    lines = asker.get("/metrics").body.decode().splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_breakdown_equals_trappm_predict(server):
    question = QUESTION | {
        "optimizer": "adamw", "precision": "amp-fp16", "memory_format": "channels-last",
    }  # fmt: skip
    response = server.post("/v1/predict", question)
    assert response.status == 200, response.body
    asked = {name: value for name, value in question.items() if name != "breakdown_depth"}
    expected = trappm.compare(asked.pop("model"), asked.pop("devices"), **asked)
    for answer, prediction in zip(response.json, expected, strict=True):
        values = json.loads(json.dumps(prediction.to_dict(breakdown_depth=2)))
        assert answer["memory_breakdown"] == values["memory_breakdown"]
        largest = answer["memory_breakdown"]["largest"]
        assert all(x["line"].startswith("timm/") == bool(x["module"]) for x in largest)
        assert answer["memory_breakdown"]["parts_mib"]["optimizer_state"] > 0


def test_equal_steps_are_traced_once_and_cached(server, monkeypatch):
    before = traces(server)
    questions = [QUESTION | {"phase": "infer", "breakdown_depth": depth} for depth in (1, 2)]

    async def crowd():
        bodies = [json.dumps(question).encode() for question in questions]
        return await asyncio.gather(*(server.ask("POST", "/v1/predict", [body]) for body in bodies))

    first, second = server.run(crowd())
    assert first.status == second.status == 200
    traced = traces(server)
    assert server.post("/v1/predict", questions[0]).json == first.json
    assert before < traced == traces(server)
    monkeypatch.setattr(answerer, "MAX_STEPS", 1)
    of_one = QUESTION | {"devices": ["a100"]}
    server.post("/v1/predict", of_one | {"batch_size": 5})
    known = traces(server)
    for batch_size in (6, 5):  # the first is forgotten for the second
        server.post("/v1/predict", of_one | {"batch_size": batch_size})
    assert traces(server) == known + 2


def test_device_without_bf16_has_a_reason_and_no_values(server):
    response = server.post("/v1/predict", QUESTION | {"precision": "amp-bf16"})
    assert response.status == 200, response.body
    able, unable = response.json
    assert able["memory_breakdown"]["parts_mib"]
    assert unable["memory_mib"] is None
    assert "no bf16 hardware" in unable["missing"]["memory_mib"]
    asked = {name: value for name, value in QUESTION.items() if name != "breakdown_depth"}
    compared = server.post("/v1/compare", asked | {"precision": "amp-bf16"}).json
    assert [p["device"] for p in compared["predictions"]] == ["a100-40gb"]
    assert [row["device"] for row in compared["left_out"]] == ["v100-16gb"]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"devices": ["v100"], "precision": "bf16"}, 400, "use amp-fp16"),
        ({"breakdown_depth": 21}, 400, "breakdown_depth"),
        ({"breakdown_depth": 0}, 400, "breakdown_depth"),
        ({"model": "test_vit", "input_size": 7}, 422, "divisible by patch size"),
    ],
)
def test_invalid_breakdown_gives_one_line(server, change, status, words):
    response = server.post("/v1/predict", QUESTION | change)
    assert (response.status, words in response.json["detail"]) == (status, True), response.body
    assert "\n" not in response.json["detail"]
    assert response.headers["content-type"] == "application/problem+json"


def test_breakdown_has_the_limits_of_a_trace():
    with Asker(trace_memory_mib=1) as asker:
        response = asker.post("/v1/predict", QUESTION | {"model": "resnet50"})
        assert response.status == 422, response.body
        # By where memory ends: in torch's allocator, in Python's, or where the process is watched.
        reasons = ("memory", "more than 1 MiB", "cannot be read", "without setting an exception")
        assert any(words in response.json["detail"] for words in reasons), response.body
    with Asker(timeout_s=0.05) as asker:
        assert asker.post("/v1/predict", QUESTION).status == 504
        assert traces(asker) == 0
