"""Rooflines and steps on several GPUs over HTTP: those of the commands, and refusals in words."""

import json

import pytest

from trappm import cli

STEP = {"model": "test_resnet", "input_size": 64, "batch_size": 4}
WORDS = "test_resnet --input-size 64 --batch-size 4"

pytestmark = pytest.mark.usefixtures("home")


@pytest.mark.parametrize(
    ("path", "asked", "command"),
    [
        ("roofline", {"devices": ["v100", "a100"]}, f"roofline v100 a100 --model {WORDS}"),
        (
            "scale",
            {"devices": ["v100"], "gpus": [1, 4], "strategies": ["ddp"]},
            f"scale {WORDS} --device v100 --gpus 1,4 --strategy ddp",
        ),
    ],
)
def test_the_response_equals_the_json_of_the_command(server, capsys, path, asked, command):
    response = server.post(f"/v1/{path}", {**STEP, **asked})
    assert response.status == 200, response.body
    assert cli.run([*command.split(), "--json"]) == 0
    assert response.json == json.loads(capsys.readouterr().out)


def test_ceilings_do_not_need_a_model(server):
    (row,) = server.post("/v1/roofline", {"devices": ["a100"]}).json
    assert row["step"] is None
    assert {roof["of"] for roof in row["roofs"]} == {"fp32", "tf32", "fp16", "bf16", "memory"}


@pytest.mark.parametrize(
    ("path", "change", "status", "words"),
    [
        ("roofline", {"devices": ["v9000"]}, 400, "--device v9000"),
        ("roofline", {"devices": ["a100"] * 5}, 400, "devices"),
        ("roofline", {"model": "../net"}, 400, "not a timm name"),
        ("roofline", {"phase": "sleep"}, 400, "sleep"),
        ("roofline", {"snapshot": "../../etc"}, 404, "etc"),
        ("scale", {"gpus": [0]}, 400, "gpus"),
        ("scale", {"strategies": ["zero9"]}, 400, "zero9"),
        ("scale", {"devices": ["v9000"]}, 404, "v9000"),
        ("scale", {"model": "resnet9000"}, 404, "resnet9000"),
        ("scale", {"batch_size": 0}, 400, "batch_size"),
        ("scale", {"phase": "infer"}, 400, "phase"),
    ],
)
def test_invalid_values_give_problem_details(server, path, change, status, words):
    response = server.post(f"/v1/{path}", {"devices": ["v100"], **STEP, **change})
    assert response.status == status, response.body
    assert words in response.body.decode()


def test_devices_lists_catalogue_gpus_and_devices_with_heads(server):
    listed = server.get("/v1/devices").json
    assert {"t4-16gb", "l4-24gb", "a100-40gb"} <= set(listed["catalogue"])
    assert set(listed["devices"]) - set(listed["catalogue"]) == {"cpu-1t", "cpu-2t"}
