"""The page in a real browser: every view on a real store, by mouse and by keyboard."""

import inspect
import json
import re
import urllib.error
import urllib.parse
import urllib.request

import page_samples as samples
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx_export import export_onnx
from playwright.sync_api import expect, sync_playwright

from trappm.cluster.campaign.process import ownership
from trappm.store import Home, LabelFilter, Store

TOKEN = "0123456789abcdef-token"  # noqa: S105
WAIT_MS = 30_000


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A campaign that runs."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAPPM_HOME", str(folder))
        home, campaign = samples.build_home(folder)
        with Store.open(home.database_url) as store, ownership(store, campaign):
            yield home, campaign


@pytest.fixture(scope="module")
def server(home):
    with samples.served() as address:
        yield address


@pytest.fixture(scope="module")
def browser():
    program = samples.chromium()
    if program is None:
        pytest.skip("no Chromium here; apt-get install chromium, or name one in CHROMIUM")
    # A chart is drawn once its box has a width, after its card is there: its parts are waited for.
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """A fresh tab; afterwards nothing was told on the console, and no other host was asked."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    console, elsewhere = [], []
    page.on("console", lambda m: console.append(m.text) if m.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: console.append(str(error)))
    page.on("request", lambda r: elsewhere.append(r.url) if not _is_own(r.url, server) else None)
    page.expected = []
    yield page
    context.close()
    assert elsewhere == []
    assert [t for t in console if not any(e in t for e in page.expected)] == []


def _is_own(url, server):
    return url.startswith((server, f"blob:{server}"))


def show(page, server, place):
    page.goto("about:blank")  # a new part after # alone would not load the page again
    page.goto(f"{server}/#/{place}")
    page.locator("h1").first.wait_for()
    page.locator(".waiting").first.wait_for(state="detached")


def fetched(address):
    """Status and bytes of an answer, whatever it is."""
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:  # noqa: S310  (our own server)
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def response(address):
    status, data = fetched(address)
    return status, json.loads(data)


@pytest.fixture
def busy(tmp_path, monkeypatch):
    """A finished campaign with an unmeasured configuration, in a data folder of its own."""
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    with Store.open(Home.open().database_url) as store:
        return samples.build_busy_campaign(store)


def test_a_finished_campaign_reports_what_could_not_be_measured(page, server, busy):
    show(page, server, f"campaigns/{busy}")
    result = page.locator("section.card", has=page.get_by_role("heading", name="Result"))
    text = result.inner_text()
    assert "Finished. 7 of 8 configurations were measured." in text
    assert f"trappm campaign resume {busy} --retry-failed" in text


def test_running_campaign_is_updated_live(page, server, home):
    folder, campaign = home
    show(page, server, f"campaigns/{campaign}")
    main = page.locator("main")
    for words in ("running", "6 of 8", "target 10 %", "worker-1 has joined", "Canary"):
        main.get_by_text(words).first.wait_for()
    main.locator("figure svg[role=img]").nth(1).wait_for()
    main.locator("figure summary").first.click()
    assert "22.5\N{NO-BREAK SPACE}%" in main.locator("figure table").first.inner_text()
    with Store.open(folder.database_url) as store:
        store.campaigns.log_event(campaign, "canary", {"message": "it drifts"})
    main.get_by_text("it drifts").wait_for()  # without loading the page again
    main.locator("figure table").first.wait_for()  # what was opened stays


def test_labels_are_filtered_sorted_and_opened_by_keyboard(page, server):
    show(page, server, "labels")
    assert "6 labels" in page.locator("main").inner_text()
    page.get_by_label("Family").select_option("vit")
    page.get_by_text("2 labels", exact=True).wait_for()
    page.get_by_role("button", name="Step time, ms").click()
    page.get_by_role("button", name="Step time, ms ↑").click()
    page.wait_for_selector("th[aria-sort=descending]")
    assert "sort=-step_time_ms" in page.url
    page.get_by_role("link", name=re.compile("^Label ")).first.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("Raw step times").first.wait_for()
    expect(dialog.locator("[aria-label=dot] circle")).to_have_count(4)
    assert "no meter" in dialog.inner_text()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    page.wait_for_url(lambda url: "label=" not in url)
    assert "family=vit" in page.url


def test_labels_are_downloaded_as_filtered(page, server):
    show(page, server, "labels?family=resnet")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    lines = download.value.path().read_text().splitlines()
    assert lines[0].startswith("id,architecture,family")
    assert {line.split(",")[2] for line in lines[1:]} == {"resnet"}


def test_form_reports_and_focuses_invalid_field(page, server):
    show(page, server, "predict")
    page.locator("[name=model]").fill("resnet18")
    page.locator("[name=batch_size]").fill("many")
    page.keyboard.press("Enter")
    assert "whole number" in page.locator(".problem").inner_text()
    assert page.evaluate("document.activeElement.name") == "batch_size"


def test_a_prediction_compares_devices_with_intervals(page, server):
    show(page, server, "predict")
    page.locator("[name=model]").fill("test_resnet")
    page.locator("[name=batch_size]").fill("8")
    page.get_by_text("Training run and settings").click()
    page.locator("[name=input_size]").fill("64")
    page.get_by_label("Devices").fill("rtx3090")
    page.keyboard.press("Enter")
    page.locator("[name=epochs]").fill("2")
    page.locator("[name=samples]").fill("1000")
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector(".interval")
    text = page.locator(".result").inner_text()
    for words in ("a100-40gb", "rtx3090", "batch 8", "Largest batch", "250 steps"):
        assert words in text
    expect(page.locator(".interval").nth(1)).to_be_attached()
    assert "model=test_resnet" in page.url
    page.locator("[name=accumulation]").fill("4")
    page.get_by_role("button", name="Predict").click()
    page.wait_for_selector("text=batch 8, 4 passes")
    assert "64 steps" in page.locator(".result").inner_text()


def test_memory_breakdown_is_drawn_and_listed(page, server):
    page.set_viewport_size({"width": 400, "height": 800})
    show(page, server, "predict?model=test_resnet&batch_size=8&input_size=64")
    memory = page.locator("section.card", has_text="Memory breakdown")
    memory.locator(".treemap").wait_for()
    assert "timm/models/resnet.py:" in memory.inner_text()
    assert "a100-40gb fits: " in memory.locator(".stack svg").get_attribute("aria-label")
    expect(memory.locator(".treemap [aria-label=rect] rect").nth(4)).to_be_attached()
    for summary in memory.locator("figure summary").all():
        summary.press("Enter")
    # Each figure's own table: it comes with an event after the key, and this waits for it.
    assert "CUDA context" in memory.locator("figure").first.locator("table").inner_text()
    assert "layer1.0" in memory.locator("figure").last.locator("table").inner_text()


@pytest.mark.extension("onnx")
def test_uploaded_file_is_predicted(page, server, tmp_path):
    file = tmp_path / "small.onnx"
    export_onnx("test_resnet", 64, file)
    show(page, server, "predict")
    page.locator("#file").set_input_files(str(file))
    assert "small.onnx" in page.locator(".file-name").inner_text()
    page.get_by_role("button", name="Predict").click()
    page.get_by_role("heading", name="Training step of small.onnx, batch 64").wait_for()


def test_empty_data_folder_shows_commands(page, server, tmp_path, monkeypatch):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    for view in ("campaigns", "labels"):
        show(page, server, view)
        assert page.locator(".empty .command").first.inner_text().startswith("trappm ")


def test_page_prompts_for_the_token(browser, home):
    with samples.served(token=TOKEN) as address:
        assert response(f"{address}/api/campaigns")[0] == 401
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{address}/#/campaigns")
        for given in ("a wrong one, surely", TOKEN):
            page.get_by_label("token").fill(given)
            page.keyboard.press("Enter")
        page.get_by_role("link", name="seen").wait_for()
        context.close()


WORDS = st.one_of(
    st.sampled_from(["*", "[", "%", "-1", "1e9", "-step_time_ms", "999999999w", str(2**63)]),
    st.text(max_size=30),
)
ASKED = st.sampled_from(
    [*inspect.signature(LabelFilter).parameters, "sort", "columns", "page", "size"]
)
PLACES = st.one_of(
    st.sampled_from(["labels", "labels/download/csv"]),
    st.tuples(st.sampled_from(["labels/", "campaigns/", "snapshots/"]), WORDS).map("".join),
)


@given(place=PLACES, values=st.dictionaries(ASKED, WORDS, max_size=3))
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_request_is_answered_or_rejected(server, place, values):
    values = {name: value.encode(errors="replace") for name, value in values.items()}
    path = urllib.parse.quote(place.encode(errors="replace"))
    status, data = fetched(f"{server}/api/{path}?{urllib.parse.urlencode(values)}")
    assert status == 200 or (400 <= status < 500 and json.loads(data)["detail"])


def test_the_policy_allows_nothing_from_other_hosts(server):
    with urllib.request.urlopen(server, timeout=10) as answer:  # noqa: S310
        policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
