"""Training steps on several GPUs over HTTP: the JSON of the command, and refusals in words."""

import json

import pytest

from trappm import cli

STEP = {"model": "test_resnet", "input_size": 64, "batch_size": 4}

pytestmark = pytest.mark.usefixtures("home")


def test_the_response_equals_the_json_of_the_command(server, capsys):
    asked = {**STEP, "devices": ["v100"], "gpus": [1, 4], "strategies": ["ddp"]}
    response = server.post("/v1/scale", asked)
    assert response.status == 200, response.body
    command = "scale test_resnet --input-size 64 --batch-size 4 --device v100 --gpus 1,4"
    assert cli.run([*command.split(), "--strategy", "ddp", "--json"]) == 0
    assert response.json == json.loads(capsys.readouterr().out)
    assert [row["gpus"] for row in response.json["predictions"]] == [1, 4]


def test_a_card_without_measurements_can_be_scaled(server):
    response = server.post("/v1/scale", {**STEP, "devices": ["t4"], "gpus": [2]})
    assert response.status == 200, response.body
    assert {row["device"] for row in response.json["predictions"]} == {"t4"}


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"gpus": [0]}, 400, "gpus"),
        ({"gpus": []}, 400, "gpus"),
        ({"strategies": ["zero9"]}, 400, "zero9"),
        ({"devices": ["v9000"]}, 404, "v9000"),
        ({"model": "resnet9000"}, 404, "resnet9000"),
        ({"model": "../net"}, 400, "no timm name"),
        ({"batch_size": 0}, 400, "batch_size"),
    ],
)
def test_invalid_values_are_refused_in_words(server, change, status, words):
    response = server.post("/v1/scale", {**STEP, "devices": ["v100"], **change})
    assert response.status == status, response.body
    assert words in response.body.decode()


def test_devices_lists_catalogue_cards_besides_those_with_heads(server):
    listed = server.get("/v1/devices").json
    assert {"t4-16gb", "l4-24gb", "a100-40gb"} <= set(listed["catalogue"])
    assert set(listed["devices"]) - set(listed["catalogue"]) == {"cpu-1t", "cpu-2t"}
