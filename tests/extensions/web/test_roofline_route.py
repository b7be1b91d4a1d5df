"""Rooflines over HTTP: those of the command; a model that nobody has asked about is traced once."""

import json

import pytest

from trappm import cli

STEP = {"model": "test_resnet", "input_size": 64, "batch_size": 4}


pytestmark = pytest.mark.usefixtures("home")


def test_the_answer_is_that_of_the_command(server, capsys):
    response = server.post("/v1/roofline", {"devices": ["v100", "a100"], **STEP})
    assert response.status == 200, response.body
    command = "roofline v100 a100 --model test_resnet --input-size 64 --batch-size 4 --json"
    assert cli.run(command.split()) == 0
    assert response.json == json.loads(capsys.readouterr().out)
    assert [row["device"] for row in response.json] == ["v100", "a100"]


def test_ceilings_alone_need_no_model(server):
    (row,) = server.post("/v1/roofline", {"devices": ["a100"]}).json
    assert row["step"] is None
    assert {roof["of"] for roof in row["roofs"]} == {"fp32", "tf32", "fp16", "bf16", "memory"}


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"devices": ["v9000"]}, 400, "--device v9000"),
        ({"devices": []}, 400, "devices"),
        ({"devices": ["a100"] * 5}, 400, "devices"),
        ({"model": "resnet9000"}, 404, "resnet9000"),
        ({"model": "../net"}, 400, "no timm name"),
        ({"batch_size": 0}, 400, "batch_size"),
        ({"phase": "sleep"}, 400, "sleep"),
        ({"snapshot": "../../etc"}, 404, "etc"),
    ],
)
def test_what_cannot_be_is_refused_in_words(server, change, status, words):
    response = server.post("/v1/roofline", {"devices": ["v100"], **STEP, **change})
    assert response.status == status, response.body
    assert words in response.body.decode()
