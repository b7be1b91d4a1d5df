"""The application without a network: its answers, its limits, and whom it does not answer."""

import asyncio
import inspect
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_samples import QUESTION, Asker, other_snapshot

import trappm
from trappm.extensions.web import answerer
from trappm.extensions.web.gate import ServingSettings
from trappm.extensions.web.running import address_of, hosts_for, token_for
from trappm.learner.snapshots.registry import Registry
from trappm.prediction.answer import answer_questions
from trappm.prediction.selection import DEFAULT_DEVICE
from trappm.profiler.errors import InputError

TOKEN = "0123456789abcdef0123"  # noqa: S105
ELSEWHERE = "0.0.0.0"  # noqa: S104
FEW = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))


FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.onnx"\r\n\r\njunk\r\n'
FORM = {"content_type": "multipart/form-data; boundary=x"}


@pytest.fixture(autouse=True, scope="module")
def home(module_home):
    """Return a data folder with cached profiles of the model, so that no trace is needed."""
    for phase in ("train", "infer"):
        trappm.compare("test_resnet", input_size=64, phase=phase)
    return module_home


def plain(prediction):
    return json.loads(json.dumps(prediction.to_dict()))


@pytest.mark.extension("power_limits")
@FEW
@given(
    st.fixed_dictionaries(
        {"batch_size": st.sampled_from([1, 7, 32])},
        optional={
            "devices": st.sampled_from(["all", ["a100"], ["rtx3090", "a100"]]),
            "precision": st.sampled_from(["fp32", "amp-fp16"]),
            "memory_format": st.just("channels-last"),
            "optimizer": st.sampled_from(["sgd", "adam"]),
            "accumulation": st.sampled_from([1, 4]),
            "carbon_g_per_kwh": st.just(300.0),
            "power_limit_w": st.just(250.0),
            "snapshot": st.just("default"),
        },
    ),
    st.booleans(),
    st.booleans(),
)
def test_responses_equal_predict(server, question, of_a_list, whole_run):
    question = question | ({"epochs": 2, "samples": 1000} if whole_run else {})
    question |= {"model": ["test_resnet"] if of_a_list else "test_resnet", "input_size": 64}
    response = server.post("/v1/predict", question)
    asked = {name: value for name, value in question.items() if name not in ("model", "devices")}
    if "devices" in question:
        predictions = trappm.compare("test_resnet", question["devices"], **asked)
    else:
        predictions = [trappm.predict("test_resnet", **asked)]
    assert response.status == 200, response.body
    several = of_a_list or "devices" in question
    assert response.json == ([plain(x) for x in predictions] if several else plain(predictions[0]))


def test_identical_concurrent_requests_share_one_computation(server, monkeypatch):
    questions = [{**QUESTION, "batch_size": batch} for batch in range(100, 110)]
    asked = []

    def counted(asks):
        asked.extend(asks)
        return answer_questions(asks)

    async def all_at_once():
        bodies = [json.dumps(question).encode() for question in questions]
        return await asyncio.gather(
            *(server.ask("POST", "/v1/predict", [body]) for body in (*bodies, *bodies))
        )

    monkeypatch.setattr(answerer, "answer_questions", counted)
    responses = server.run(all_at_once())
    assert {response.status for response in responses} == {200}
    assert len(asked) == len(questions)
    again = server.post("/v1/predict", questions[:3]).json
    assert again == [response.json for response in responses[:3]]
    assert len(asked) == len(questions)


def test_the_default_device_is_marked_after_the_same_one_was_named(server):
    question = {"model": "test_resnet", "input_size": 64, "batch_size": 77}
    questions = [question | {"device": DEFAULT_DEVICE}, question]
    answers = [server.post("/v1/predict", each).json for each in questions]
    assert [answer["device_is_default"] for answer in answers] == [False, True]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
FIELDS = [*QUESTION, "devices", "phase", "precision", "epochs", "samples", "snapshot", "x"]


@settings(FEW, max_examples=60)
@given(
    st.sampled_from(["/v1/predict", "/v1/compare"]),
    JSON.map(lambda x: json.dumps(x).encode())
    | st.binary(max_size=60)
    | st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1).map(
        lambda x: json.dumps({**QUESTION, "model": "a/b", **x}).encode()
    ),
    st.sampled_from(["application/json", "multipart/form-data; boundary=x", "multipart/form-data"]),
)
def test_invalid_bodies_give_problem_details(server, path, body, kind):
    response = server.post(path, body, content_type=kind)
    assert 400 <= response.status < 500
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json["status"] == response.status
    assert response.json["detail"]


STEP = {"model": "test_resnet", "input_size": 64, "batch_size": 4, "devices": ["v100"]}


@pytest.mark.parametrize(
    ("path", "change", "status", "words"),
    [
        ("predict", {"devices": ["tpu"]}, 404, "tpu"),
        ("predict", {"batch_size": "4"}, 400, "batch_size: must be a valid integer ('4')"),
        ("predict", {"batchsize": 4}, 400, "batchsize: unknown field; did you mean 'batch_size'?"),
        ("predict", {"device": "a100"}, 400, "not both"),
        ("predict", {"model": "/etc/passwd"}, 400, "upload"),
        ("predict", {"model": "secret.onnx"}, 400, "upload"),
        ("predict", {"snapshot": "../../etc"}, 404, "alias"),
        ("predict", {"breakdown_depth": 21}, 400, "breakdown_depth"),
        ("predict", {"model": "test_vit", "input_size": 7}, 422, "divisible by patch size"),
        ("roofline", {"devices": ["a100"] * 5}, 400, "devices"),
        ("roofline", {"model": "../net"}, 400, "not a timm name"),
        ("roofline", {"model": "os.path:join@1"}, 400, "which this server never does"),
        ("scale", {"model": "my_models.vision:Mixer"}, 400, "which this server never does"),
        ("predict", {"model": ["test_vit", "os.path:join"]}, 400, "which this server never does"),
        ("roofline", {"snapshot": "../../etc"}, 404, "etc"),
        ("scale", {"gpus": [0]}, 400, "gpus"),
        ("scale", {"model": "resnet9000"}, 404, "resnet9000"),
    ],
)
def test_invalid_fields_are_named_in_the_error(server, path, change, status, words):
    response = server.post(f"/v1/{path}", STEP | change)
    detail = response.json["detail"]
    assert (response.status, words in detail, "\n" in detail) == (status, True, False), detail
    assert response.headers["content-type"] == "application/problem+json"


def test_json_is_read_with_the_content_type_that_curl_sends(server):
    kind = "application/x-www-form-urlencoded"
    assert server.post("/v1/predict", QUESTION, content_type=kind).status == 200
    assert server.post("/v1/predict", FILE + b"--x--", **FORM).status == 400


def test_token_protects_all_routes_except_health(home):
    with Asker(token=TOKEN) as asker:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
            for path in ("/v1/devices", "/v1/snapshot", "/metrics", "/openapi.json", "/api/x"):
                response = asker.get(path, **headers)
                assert response.status == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert TOKEN not in response.body.decode()
        assert asker.get("/healthz").status == asker.get("/readyz").status == 200
        right = {"authorization": f"Bearer {TOKEN}"}
        assert asker.get("/v1/devices", **right).status == 200
        assert TOKEN not in repr(asker.app.state.settings)


def test_public_address_requires_a_token(monkeypatch, tmp_path):
    monkeypatch.delenv("TRAPPM_TOKEN", raising=False)
    assert token_for("127.0.0.1", None) is None
    with pytest.raises(InputError, match="TRAPPM_TOKEN"):
        token_for(ELSEWHERE, None)
    monkeypatch.setenv("TRAPPM_TOKEN", "short")
    with pytest.raises(InputError, match="at least 16") as refused:
        token_for(ELSEWHERE, None)
    assert "'short'" not in str(refused.value)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert token_for(ELSEWHERE, tmp_path / "token") == TOKEN
    with pytest.raises(InputError, match="cannot be read"):
        token_for("::1", tmp_path / "nothing")
    assert address_of("::1", 80) == "http://[::1]:80"


OTHERS = (
    ({}, 200),
    ({"origin": "http://127.0.0.1:8000"}, 200),
    ({"host": "[::1]:8000"}, 200),
    ({"host": "rebound.example"}, 400),
    ({"origin": "http://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "https://127.0.0.1:8000"}, 403),
    ({"origin": "http://[::1"}, 403),
    # A browser sends no Origin with a plain GET, of a script or an image.
    ({"sec_fetch_site": "cross-site"}, 403),
    ({"sec_fetch_site": "same-site"}, 403),
    ({"sec_fetch_site": "same-origin"}, 200),
    ({"sec_fetch_site": "none"}, 200),  # typed by hand
)


def test_other_hosts_origins_and_sites_are_rejected(home):
    with Asker(hosts=hosts_for("127.0.0.1", None)) as asker:
        for headers, status in OTHERS:
            assert asker.get("/v1/devices", **headers).status == status, headers
        assert asker.get("/", sec_fetch_site="cross-site").status == 200  # a link to the page


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v1/compare", {}, 405),
        ("GET", "/v1/nothing", {}, 404),
        ("POST", "/v1/predict", {"content_length": "2", "transfer_encoding": "chunked"}, 400),
        ("GET", "/healthz", {"content_length": "0", "transfer_encoding": "chunked"}, 400),
    ],
)
def test_methods_and_framing_are_checked(server, method, path, headers, status):
    response = server.run(server.ask(method, path, [b"{}"], headers))
    assert response.status == status
    assert ("allow" in response.headers) == (status == 405)
    assert response.headers.get("connection") == ("close" if status == 400 else None)


def test_body_size_is_limited_with_or_without_content_length(home):
    with Asker(max_body_bytes=1000, max_upload_bytes=1000) as asker:
        for chunks, headers in (
            ([b" " * 600, b" " * 600], {}), ([b"{}"], {"content-length": "1001"}),
        ):  # fmt: skip
            assert asker.run(asker.ask("POST", "/v1/predict", chunks, headers)).status == 413
        large = FILE.replace(b"junk", b"a" * 1001) + b"--x--\r\n"
        assert asker.post("/v1/predict/upload", large, **FORM).status == 413
    with Asker(max_body_bytes=1000, max_upload_bytes=10_000) as asker:
        assert asker.post("/v1/predict", b" " * 1001, **FORM).status == 413


def test_request_time_and_concurrency_are_limited(home, monkeypatch):
    async def never(*_):
        await asyncio.Event().wait()

    with Asker(max_requests=1, timeout_s=0.3) as asker:
        monkeypatch.setattr(asker.app.state.answerer, "predict", never)
        body = json.dumps(QUESTION).encode()

        async def two():
            slow = asyncio.create_task(asker.ask("POST", "/v1/predict", [body]))
            await asyncio.sleep(0.05)
            second = await asker.ask("GET", "/v1/devices", [b""])
            third = await asker.ask("POST", "/v1/predict", [body])
            health = await asker.ask("GET", "/readyz", [b""])
            return await slow, second, third, health, await asker.ask("GET", "/v1/devices", [b""])

        slow, second, third, health, later = asker.run(two())
        assert (slow.status, second.status, health.status, later.status) == (504, 503, 200, 200)
        assert third.status == 503
        assert second.headers["retry-after"] == "1"


def test_new_snapshot_is_activated_without_failed_requests(home):
    registry = Registry(home / "snapshots")
    first, second = (other_snapshot(home / "snapshots", name) for name in ("one", "two"))
    registry.set_alias("latest", first, "published")
    with Asker() as asker:
        assert asker.get("/readyz").json["snapshots"][0] == first

        async def asking(start):
            bodies = [json.dumps({**QUESTION, "batch_size": start + x}).encode() for x in range(20)]
            return [await asker.ask("POST", "/v1/predict", [body]) for body in bodies]

        async def moving():
            before = asyncio.create_task(asking(300))
            await asyncio.sleep(0.02)
            registry.set_alias("latest", second, "published")
            reloaded = await asker.ask("POST", "/v1/reload", [b""])
            return await before, reloaded, await asking(300)

        before, reloaded, after = asker.run(moving())
        assert {response.status for response in (*before, *after)} == {200}
        assert {response.json["snapshot"] for response in before} <= {first, second}
        assert reloaded.json["changed"]
        assert {response.json["snapshot"] for response in after} == {second}

        damaged = other_snapshot(home / "snapshots", "three")
        registry.set_alias("latest", damaged, "published")
        next((home / "snapshots" / damaged).glob("heads-*")).write_bytes(b"")
        reloaded = asker.post("/v1/reload", b"")
        assert (reloaded.status, str(home) in reloaded.body.decode()) == (404, False)
        assert str(home) not in asker.get("/api/snapshots").body.decode()
        assert asker.post("/v1/predict", QUESTION).json["snapshot"] == second
    registry.set_alias("latest", second, "by hand")


def test_the_schema_describes_the_questions(server):
    schema = server.get("/openapi.json").json
    assert {"/v1/predict", "/v1/compare", "/v1/snapshot", "/metrics"} <= set(schema["paths"])
    upload = schema["paths"]["/v1/predict/upload"]["post"]["requestBody"]["content"]
    assert set(upload) == {"multipart/form-data"}
    fields = set(schema["components"]["schemas"]["PredictionRequest"]["properties"])
    arguments = set(inspect.signature(trappm.predict).parameters)
    of_python = {
        "example_input", "targets", "loss", "labels", "sequence_length", "trace_seconds",
    }  # fmt: skip
    assert fields == arguments - of_python | {"devices", "breakdown_depth"}
    assert ServingSettings().token is None
