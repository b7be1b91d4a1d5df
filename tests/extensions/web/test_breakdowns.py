"""Memory breakdowns, rooflines and steps on several GPUs over HTTP, and refusals in words."""

import asyncio
import json

import pytest
from serving_samples import Asker

import trappm

QUESTION = {
    "model": "test_resnet", "input_size": 64, "batch_size": 4, "devices": ["a100", "v100"],
    "breakdown_depth": 2,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("home")


def traces(asker, outcome="done"):
    name = f'trappm_traces_total{{outcome="{outcome}"}} '
    lines = asker.get("/metrics").body.decode().splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_equal_steps_are_traced_once_and_cached(server):
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
    asked = {name: QUESTION[name] for name in ("input_size", "batch_size")}
    expected = trappm.predict("test_resnet", device="a100", phase="infer", **asked)
    values = json.loads(json.dumps(expected.to_dict(breakdown_depth=1)))
    assert first.json[0]["memory_breakdown"] == values["memory_breakdown"]
    trained = server.post("/v1/predict", QUESTION | {"optimizer": "adamw"}).json[0]
    assert trained["memory_breakdown"]["parts_mib"]["optimizer_state"] > 0


def test_breakdown_has_the_limits_of_a_trace():
    with Asker(trace_memory_mib=1, timeout_s=60) as asker:
        response = asker.post("/v1/predict", QUESTION | {"model": "resnet50"})
        # Native code without memory may also wait for ever; then the time limit ends it.
        assert response.status in (422, 504), response.body
        assert traces(asker) == 0
        # By where memory ends: in torch's allocator, in Python's, or where the process is watched.
        reasons = (
            "memory", "more than 1 MiB", "cannot be read", "without setting an exception",
            "exceeded 60 s",
        )  # fmt: skip
        assert any(words in response.json["detail"] for words in reasons), response.body


STEP = {"model": "test_resnet", "input_size": 64, "batch_size": 4}
WORDS = "test_resnet --input-size 64 --batch-size 4"


@pytest.mark.parametrize(
    ("path", "asked", "words"),
    [
        (
            "roofline",
            {"devices": ["v100", "a100"]},
            f"roofline {WORDS} --device v100 --device a100",
        ),
        (
            "scale",
            {"devices": ["v100"], "gpus": [1, 4], "strategies": ["ddp"]},
            f"scale {WORDS} --device v100 --gpus 1,4 --strategy ddp",
        ),
    ],
)
def test_the_response_equals_the_json_of_the_command(server, as_json, path, asked, words):
    response = server.post(f"/v1/{path}", {**STEP, **asked})
    assert response.status == 200, response.body
    assert response.json == as_json(words)
