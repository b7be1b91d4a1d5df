"""What follows from a prediction, and the snapshot that ships with the package."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx_export import export_onnx

import trappm
from trappm.cli import run
from trappm.learner.paper.presets import LAPTOP
from trappm.learner.snapshots.manifest import read_whole
from trappm.learner.snapshots.snapshot import load_snapshot, save_snapshot
from trappm.prediction.comparison import verdicts
from trappm.prediction.costs import Price, prices_of, run_of
from trappm.prediction.device_names import device_key
from trappm.prediction.models import subjects
from trappm.prediction.question import PLAIN, Question
from trappm.prediction.snapshot_choice import SHIPPED
from trappm.profiler.devices.catalogue import USABLE_SHARE
from trappm.profiler.errors import InputError
from trappm.profiler.records import METRICS, Optimizer, Phase
from trappm.profiler.text import number_text

ROOT = Path(__file__).parents[3]
KEYS = ("a100-40gb", "rtx3090", "rtx4090", "cpu-2t")


@pytest.fixture(scope="module")
def answer(home):
    return trappm.predict("test_resnet", batch_size=64, device="a100")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "model.onnx"
    export_onnx("test_resnet", 160, path)
    return path


def test_cpu_predictions_use_labels_of_other_hosts():
    answer = trappm.predict("test_resnet", device="cpu-2t", batch_size=8, snapshot="default")
    low, high = answer.intervals["step_time_ms"]
    assert high > 3 * low  # hosts differ by that much
    low, high = answer.intervals["memory_mib"]
    assert high < 2 * low
    remark = "the step time and memory of cpu-2t; they come from labels of other machines' cores"
    assert any(remark in line for line in answer.remarks)
    under = trappm.compare("test_resnet", snapshot="default", power_limit_w=250)
    assert {"h100", "v100-16gb"} <= {a.device for a in under} <= set(KEYS) | {"h100", "v100-16gb"}
    assert not any(a.device.startswith("cpu") for a in under)  # cores have no limit to set


def test_the_shipped_snapshot_is_complete_and_documented():
    manifest, contents = read_whole(SHIPPED)
    assert sum(map(len, contents.values())) < 20_000_000
    gpus = {"a100-40gb", "h100", "rtx3090", "rtx4090", "v100-16gb"}
    assert gpus | {"cpu-1t", "cpu-2t"} == set(manifest.heads)
    assert set(manifest.heads["rtx3090"]) == {"train", "infer"}
    assert all(source.file and source.source for source in manifest.sources)
    assert "held out" in manifest.split
    assert manifest.errors_by_phase("a100-40gb")["train"]["memory_mib"].mape < 4
    assert manifest.errors_by_phase("rtx3090")["infer"]["step_time_ms"].count > 200
    assert {path.suffix for path in SHIPPED.iterdir()} == {".json", ".safetensors"}
    assert re.fullmatch("[0-9a-f]{12}", manifest.versions["commit"])  # of a clean tree


def test_the_shipped_snapshot_answers_with_sources(answer):
    assert answer.device == "a100-40gb"
    assert answer.snapshot == read_whole(SHIPPED)[0].id
    low, high = answer.intervals["memory_mib"]
    assert 1000 < low < answer.memory_mib < high < 10_000
    assert any("on the step time of A100 40 GB; it" in remark for remark in answer.remarks)
    assert "this card's limit of" in answer.power_source
    assert answer.out_of_memory < 0.01
    assert answer.precision == "fp32"
    every = (*METRICS, "energy_j", "samples_per_s", "out_of_memory", "largest_batch")
    assert all((getattr(answer, name) is None) == (name in answer.missing) for name in every)


def test_the_headline_has_medians_and_intervals(answer):
    known = replace(
        answer, memory_mib=8192.0, capacity_mib=40_960.0, step_time_ms=205.2,
        intervals={"memory_mib": (7884.8, 8806.4), "step_time_ms": (183.4, 239.2)},
    )  # fmt: skip
    text = (
        "Fits A100 40 GB: 8.0 GiB (7.7 to 8.6) of 40.0. "
        "A step takes 205 ms (183 to 239) in fp32 at batch 64."
    )
    assert str(known) == text
    assert (known.fits, known.verdict) == (True, "fits")
    small = replace(known, capacity_mib=9000.0)
    begin = "May not fit A100 40 GB: 8.0 GiB (7.7 to 8.6) of 8.8, 8.3 usable. A"
    assert str(small).startswith(begin)
    assert (small.fits, small.verdict) == (False, "may not fit")
    smaller = replace(known, capacity_mib=8000.0)
    assert str(smaller).startswith("Does not fit A100 40 GB: ")
    assert " would take 205 ms" in str(smaller)
    alone = replace(known, memory_mib=None)
    assert str(alone) == "A step on A100 40 GB takes 205 ms (183 to 239) in fp32 at batch 64."
    neither = replace(alone, step_time_ms=None)
    assert str(neither) == "Nothing is known about this step on A100 40 GB."
    assert str(replace(known, device_is_default=True)).startswith("Fits A100 40 GB (default): ")
    assert str(replace(known, sequence_length=512)).endswith("at batch 64 and 512 tokens.")
    run = trappm.predict("test_resnet", batch_size=64, device="a100", epochs=2, samples=10**6).run
    offer = replace(run.offers[0], usd=74.66)
    priced, dearer = (replace(known, run=replace(run, offers=(offer,) * n)) for n in (1, 2))
    assert str(priced).endswith(") and cost 74.7 USD, without data loading.")
    assert str(dearer).endswith(") and cost from 74.7 USD, without data loading.")
    unpriced = replace(known, run=replace(run, offers=()))
    assert re.search(r" 2 epochs take [\d.]+ h \([\d.]+ to [\d.]+\), without data", str(unpriced))


def test_the_largest_batch_fits_and_the_next_does_not(answer):
    limit = USABLE_SHARE * answer.capacity_mib
    for more, fits in ((0, True), (1, False)):
        size = answer.largest_batch + more
        again = trappm.predict("test_resnet", batch_size=size, device="a100")
        assert (again.intervals["memory_mib"][1] <= limit) == fits


@pytest.mark.parametrize(
    ("cards", "capacity_mib", "has_part"),
    [({}, 40_536, True), ({"a100": "a100 sxm4 40gb"}, 40_536, True),
     ({"a100": "a100 sxm4 80gb"}, 81_251, False)],
)  # fmt: skip
def test_the_measured_gpu_decides_what_fits(tmp_path, answer, cards, capacity_mib, has_part):
    snapshot = save_snapshot(
        tmp_path, heads={"a100": load_snapshot(SHIPPED).heads["a100-40gb"]}, source_device="a100",
        preset=LAPTOP, labels=[], fields={"cards": cards} if cards else {},
    )  # fmt: skip
    options = {"batch_size": 64, "snapshot": snapshot.folder}
    prediction = trappm.predict("test_resnet", device="a100", **options)
    assert prediction.memory_mib == answer.memory_mib
    assert prediction.capacity_mib == capacity_mib
    larger = prediction.largest_batch / answer.largest_batch
    assert larger == pytest.approx(1 if has_part else 2, rel=0.1)
    assert (prediction.mig_profile is not None) == has_part
    assert ("40 GB" in prediction.missing.get("mig_profile", "")) != has_part


def test_samples_of_a_parallel_step_count_all_ranks(tmp_path):
    cpus = load_snapshot(SHIPPED).heads["cpu-1t"]
    single, double = (
        trappm.predict(
            "test_resnet", batch_size=8, device=device, epochs=1, samples=1600,
            snapshot=save_snapshot(
                tmp_path, heads={device: cpus}, source_device=device,
                preset=LAPTOP, labels=[], fields={},
            ).folder,
        )
        for device in ("cpu-1t", "cpu-2x1t")
    )  # fmt: skip
    assert double.step_time_ms == single.step_time_ms
    assert double.samples_per_s == 2 * single.samples_per_s
    assert (single.run.steps, double.run.steps) == (200, 100)


@pytest.mark.parametrize(
    ("device", "instead"), [("a100x4-fsdp", "'a100'"), ("cpu-2x1t", "'cpu-1t'")]
)
def test_unlabelled_ranks_are_not_treated_as_one_device(capsys, device, instead):
    assert run(["predict", "test_resnet", "--device", device]) == 2
    assert capsys.readouterr().err.rstrip().endswith(f"measure it, or predict {instead}")


def test_phases_are_predicted_separately_with_the_settings_of_their_labels():
    train, infer = (
        trappm.predict("test_resnet", batch_size=64, device="RTX 3090", phase=phase)
        for phase in ("train", "infer")
    )
    assert train.step_time_ms > 1.5 * infer.step_time_ms > 0
    assert (train.precision, train.optimizer) == ("amp-fp16", "momentum")
    assert train.samples_per_s == pytest.approx(64_000 / train.step_time_ms)
    assert any(
        "the memory of RTX 3090 24 GB; it comes from the simulated step" in remark
        for remark in train.remarks
    )
    other = trappm.predict("test_resnet", batch_size=64, device="rtx3090", precision="fp32")
    assert (
        "No label of this device has these settings (fp32, contiguous, momentum); most have: "
        "amp-fp16, contiguous, momentum."
    ) in other.remarks


@pytest.mark.parametrize(
    ("device", "key", "basis"),
    [
        ("NVIDIA T4", "t4", "T4 16 GB; it comes from kernels of this card and other cards' labels"),
        ("rtx4090", "rtx4090", "RTX 4090 24 GB; it comes from few published steps of this card"),
        ("RTX 2060", "rtx-2060", "; it comes from this card's data sheet"),
        ("v100-32gb", "v100-32gb", "step time of V100 32 GB; it comes from labels of v100-16gb"),
        (
            "A100-SXM4-80GB",
            "a100-sxm4-80gb",
            "memory of A100 80 GB; it comes from labels of a100-40gb",
        ),
    ],
)
def test_unlabelled_gpus_are_predicted_with_their_basis(device, key, basis):
    prediction = trappm.predict("test_resnet", batch_size=64, device=device)
    assert prediction.device == key
    assert {"step_time_ms", "memory_mib", "power_w", "energy_j"} <= set(prediction.intervals)
    assert any(basis in remark for remark in prediction.remarks), prediction.remarks
    assert prediction.largest_batch > 0
    if key == "v100-32gb":
        known = trappm.predict("test_resnet", batch_size=64, device="v100-16gb")
        assert prediction.step_time_ms == known.step_time_ms
        assert prediction.largest_batch > known.largest_batch
    if key == "t4":
        low, high = prediction.intervals["step_time_ms"]
        assert low < 0.7 * prediction.step_time_ms
        assert high > 1.4 * prediction.step_time_ms


def test_mig_slices_and_other_forms_are_separate_devices():
    def ask(device):
        return trappm.predict("test_resnet", batch_size=256, device=device)

    whole, form, part = map(ask, ("h100", "h100-pcie", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"))
    assert ask("NVIDIA H100 80GB HBM3") == whole
    assert len({whole.device, form.device, part.device}) == 3
    assert part.step_time_ms > 2 * whole.step_time_ms
    assert part.capacity_mib < whole.capacity_mib / 4
    assert not any("labels of h100" in remark for remark in part.remarks)
    assert any(re.search("memory.* from labels of h100", remark) for remark in form.remarks)
    assert not any(re.search("step time.* from labels of h100", remark) for remark in form.remarks)


@pytest.mark.parametrize("device", ["v100", "RTX 2080 Ti"])
def test_bf16_is_refused_on_gpus_without_it(device, capsys):
    for precision in ("amp-bf16", "bf16"):
        with pytest.raises(InputError, match=r"no bf16 hardware .* use amp-fp16"):
            trappm.predict("test_resnet", device=device, precision=precision)
    for command in ("predict", "compare"):
        assert run([command, "test_resnet", "--device", device, "--precision", "bf16"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "use amp-fp16" in line
    assert trappm.predict("test_resnet", device=device, precision="amp-fp16").fits


def test_devices_without_bf16_are_left_out_with_a_reason(capsys):
    asked = {"batch_size": 8, "precision": "amp-bf16"}
    able, unable = trappm.compare("test_resnet", ["a100", "v100"], **asked)
    assert able.step_time_ms > 0
    assert tuple(unable) == (None, None, None)
    assert "no bf16 hardware" in unable.missing["step_time_ms"]
    command = ["compare", "test_resnet", "--batch-size", "8", "--precision", "amp-bf16"]
    devices = ["--device", "a100", "--device", "v100"]
    assert run([*command, *devices]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Left out: v100-16gb (V100 16 GB has no bf16" in shown
    for named in (devices, []):  # without names: all
        assert run([*command, *named, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        predicted = {p["device"] for p in report["predictions"]}
        assert "a100-40gb" in predicted
        assert "v100-16gb" not in predicted
        assert [row["device"] for row in report["left_out"]] == ["v100-16gb"]


def test_all_devices_can_be_combined_with_names():
    every = trappm.compare("test_resnet", ["all", "t4"], batch_size=8)
    assert [p.device for p in every[:-1]] == [
        p.device for p in trappm.compare("test_resnet", batch_size=8)
    ]
    assert every[-1].device == "t4"


def test_a_snapshot_without_a_phase_hides_no_other():
    (shipped,) = Question(snapshot="default").snapshots
    train = {"h100": {Phase.TRAIN: shipped.heads["h100"][Phase.TRAIN]}}
    latest = replace(shipped, heads=train, others=None)
    answering = [
        Question(phase=phase, snapshots=[latest, shipped]).snapshot_for("h100") for phase in Phase
    ]
    assert {id(s) for s in answering} == {id(latest), id(shipped)}
    assert Question(phase="train", snapshots=[latest, shipped]).snapshot_for("h100") is latest


def test_compare_starts_with_the_cheapest_model(capsys):
    models = ["test_resnet", "test_vit"]
    command = ["compare", *models, "--batch-size", "32", "--phase", "infer", "--epochs", "1",
               "--samples", "10000"]  # fmt: skip
    predictions = trappm.compare(models, phase="infer", batch_size=32, epochs=1, samples=10_000)
    assert run(command) == 0
    lines = capsys.readouterr().out.splitlines()
    cheapest = min((p for p in predictions if p.run.offers), key=lambda p: p.run.offers[0].usd)
    cost = f"{number_text(cheapest.run.offers[0].usd)} USD for 1 epoch"
    assert lines[1] == f"Cheapest: {cheapest.model} on {cheapest.device}, {cost}."
    assert not any("No price" in line for line in lines)
    assert run([*command, "--json"]) == 0
    of_all = json.loads(capsys.readouterr().out)["best_of_all"]
    assert of_all["cheapest"] == {"model": cheapest.model, "device": cheapest.device}
    fastest = max(predictions, key=lambda p: p.samples_per_s)
    assert of_all["fastest"] == {"model": fastest.model, "device": fastest.device}
    assert run([*command, "--device", "t4"]) == 0  # of one device nothing is said by model
    first, *others = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Fastest: test_\w+ on t4, [\d,.]+ samples/s\.", first)
    assert any(line.startswith("No price is known for t4; add one to") for line in others)


def test_missing_prices_and_adamw_are_explained(capsys):
    command = ["predict", "test_resnet", "--device", "t4", "--epochs", "1", "--samples", "1000"]
    assert run([*command, "--optimizer", "AdamW", "--explain"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "No price is known for t4; add one to prices.yaml in TRAPPM_HOME." in shown
    assert "AdamW is treated as Adam" in shown
    assert "Settings: train, fp32, contiguous, adamw" in shown


def test_compare_finds_the_fastest_and_cheapest_device(capsys):
    options = {"phase": "infer", "batch_size": 32, "epochs": 1, "samples": 10_000}
    predictions = trappm.compare(["test_resnet", "test_vit"], **options)
    assert [(p.model, p.device) for p in predictions] == [
        (model, device)
        for model in ("test_resnet", "test_vit")
        for device in ("h100", "rtx3090", "rtx4090", "v100-16gb")
    ]
    best = verdicts(predictions)["test_vit"]
    assert best["fastest"] == min(predictions[4:], key=lambda p: p.step_time_ms).device
    assert best["cheapest"] == min(predictions[4:], key=lambda p: p.run.offers[0].usd).device
    full = [replace(p, capacity_mib=1.0) if p.device == best["fastest"] else p for p in predictions]
    others = verdicts(full)["test_vit"]
    assert best["fastest"] not in (others["fastest"], others["cheapest"])
    assert (
        verdicts([replace(p, capacity_mib=1.0) for p in predictions])["test_vit"]["cheapest"]
        is None
    )
    assert set(verdicts(predictions[4:5])["test_vit"].values()) == {None}  # compared with nothing
    command = ["compare", "test_resnet", "test_vit", "--batch-size", "32", "--phase", "infer",
               "--epochs", "1", "--samples", "10000"]  # fmt: skip
    assert run([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["predictions"] == json.loads(json.dumps([p.to_dict() for p in predictions]))
    assert run(command) == 0
    assert "fastest: " in capsys.readouterr().out


def test_cached_answers_need_no_heavy_imports(file, answer):
    """A new process answers from what is kept: nothing dear is imported."""
    program = (
        "import sys\n"
        "for name in ('torch', 'timm', 'onnx', 'torchvision', 'ray', 'sqlalchemy'):\n"
        "    sys.modules[name] = None\n"
        "import trappm\n"
        "print(*(trappm.predict(m, batch_size=64, device='a100').memory_mib for m in sys.argv[1:]))"
    )
    trappm.predict(file, batch_size=64, device="a100")
    arguments = [sys.executable, "-c", program, "test_resnet", str(file)]
    done = subprocess.run(arguments, cwd=ROOT, check=True, capture_output=True, text=True)
    assert float(done.stdout.split()[0]) == answer.memory_mib


def test_damaged_profiles_are_replaced(home, file):
    before = trappm.predict(file, device="a100").memory_mib
    for path in (home / "profiles").iterdir():
        path.write_bytes(path.read_bytes()[:40])
    subjects._file.cache_clear()
    assert trappm.predict(file, device="a100").memory_mib == before


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("a100", "a100-40gb"),
        ("A100-SXM4-40GB", "a100-40gb"),
        ("GPU:A100-SXM4-40GB:1", "a100-40gb"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("rtx-4090", "rtx4090"),
        ("cpu-2t", "cpu-2t"),
    ],
)
def test_devices_have_many_names(name, key):
    assert device_key(name, KEYS) == key


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("h100", KEYS, "no model of device 'h100'; choose one with --device: a100-40gb"),
        ("A100-SXM4-80GB", KEYS, "no model of device"),
        ("a100", ("a100-40gb", "a100-80gb"), "may be a100-40gb or a100-80gb"),
        ("GPU:A100:8", KEYS, "is 8 GPUs"),
        ("", KEYS, "unknown device ''"),
        ("gpu", KEYS, "name one, such as a100"),
        ("cuda:0", KEYS, "device 'cuda:0' does not say which model it is"),
        ("cuda", KEYS, "trappm devices"),
        ("mi300x", KEYS, "TraPPM covers NVIDIA cards"),
    ],
)
def test_unknown_devices_are_refused_with_advice(name, keys, reason):
    with pytest.raises(InputError, match=reason):
        device_key(name, keys)


@given(
    epochs=st.integers(1, 100),
    samples=st.integers(1, 10**7),
    batch=st.integers(1, 4096),
    ms=st.floats(0.1, 1e4),
)
def test_costs_of_a_run_add_up(epochs, samples, batch, ms):
    price = Price(cloud="x", device="a100", usd_per_hour=2.0, noted=date(2026, 1, 1), source="here")
    whole_run = run_of(
        epochs=epochs,
        samples=samples,
        batch_size=batch,
        step_time_ms=(ms, ms / 2, ms * 2),
        energy_j=100.0,
        carbon_g_per_kwh=500.0,
        prices=(replace(price, cloud="y", usd_per_hour=3.0), price),
    )
    assert (whole_run.steps // epochs - 1) * batch < samples <= whole_run.steps // epochs * batch
    assert whole_run.hours == pytest.approx(whole_run.steps * ms / 3.6e6)
    assert whole_run.low_hours <= whole_run.hours <= whole_run.high_hours
    assert [offer.cloud for offer in whole_run.offers] == ["x", "y"]
    assert whole_run.offers[0].usd == pytest.approx(2 * whole_run.hours)
    assert whole_run.energy_kwh == pytest.approx(whole_run.steps * 100 / 3.6e6)
    assert whole_run.co2_kg == pytest.approx(whole_run.energy_kwh / 2)


def test_labelled_gpus_have_prices_with_sources():
    for device in ("a100-40gb", "h100", "rtx3090", "rtx4090", "v100-16gb"):
        assert prices_of(device)
        assert all(price.source and price.noted for price in prices_of(device))


def test_own_prices_replace_the_shipped_ones(home):
    assert [p.cloud for p in prices_of("rtx3090")] == ["runpod"]
    own = home / "prices.yaml"
    entry = "{cloud: desk, device: rtx3090, usd_per_hour: 0.05, noted: 2026-11-01, source: bill}"
    own.write_text(f"prices: [{entry}]")
    try:
        assert [p.cloud for p in prices_of("rtx3090")] == ["desk"]
        assert prices_of("a100-40gb") == ()
        for text, reason in (
            (f"prices: [{entry.replace('0.05', 'cheap')}]", "usd_per_hour is 'cheap'"),
            ("prices: [{cloud: desk}]", "'device'"),
            ("prices: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
            ("nothing", "no list of prices"),
        ):
            own.write_text(text)
            with pytest.raises(InputError, match=reason):
                prices_of("rtx3090")
    finally:
        own.unlink()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"phase": "sleep"}, "phase is 'sleep'; it must be one of train, infer"),
        ({"precision": "fp8"}, "precision is 'fp8'"),
        ({"precision": "fp16"}, "did you mean amp-fp16"),
        ({"precision": "AMP"}, "did you mean amp-fp16"),
        ({"device": 3}, "device is 3; give its name"),
        ({"device": ""}, "unknown device ''"),
        ({"snapshot": 3}, "snapshot is 3"),
        ({"epochs": 3}, "needs both epochs and samples"),
        ({"epochs": -3, "samples": 10}, "epochs is -3; it must be"),
        ({"epochs": 1, "samples": "10"}, "samples is '10'"),
        ({"carbon_g_per_kwh": float("nan")}, "carbon intensity is nan"),
        ({"batch_size": 0}, "batch size is 0"),
        ({"batch_size": True}, "batch size is True"),
        ({"snapshot": "nope"}, "no snapshot 'nope' in .*; default is the one"),
    ],
)
def test_invalid_options_are_refused(options, reason):
    with pytest.raises(trappm.TrappmError, match=reason):
        trappm.predict("test_resnet", **options)


@pytest.mark.parametrize(
    ("models", "devices", "reason"),
    [([], "a100", "list of models is empty"), ("test_resnet", [], "list of devices is empty")],
)
def test_empty_lists_are_refused(models, devices, reason):
    with pytest.raises(InputError, match=reason):
        trappm.compare(models, devices)


@pytest.mark.parametrize(
    ("labelled", "optimizer", "answered"),
    [
        (["adamw"], "adamw", "adamw"),
        (["adamw", "sgd"], "adam", "adamw"),
        (["sgd", "adam"], "adamw", "adam"),
        (["adam", "adamw"], "adamw", "adamw"),
        (["sgd"], "adamw", "adam"),
        (["adam"], "sgd", "sgd"),
    ],
)
def test_adam_and_adamw_share_labels(labelled, optimizer, answered):
    rows = tuple(PLAIN._replace(optimizer=Optimizer(name)) for name in labelled)
    trained = SimpleNamespace(settings=rows)
    assert Question(optimizer=optimizer).settings(trained).optimizer == answered
