"""What follows from a prediction, and the snapshot that ships with the package."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx_export import export_onnx
from plain_values import assert_equal
from snapshot_samples import imported_label, shipped_heads, snapshot_of

import trappm
from trappm.learner.snapshots.manifest import read_whole
from trappm.prediction.comparison import verdicts
from trappm.prediction.cost import Price, prices_of, run_of
from trappm.prediction.question import Question
from trappm.prediction.selection import SHIPPED, Selection, device_key
from trappm.profiler.errors import InputError
from trappm.profiler.records import METRICS, Optimizer, Phase, StepSettings

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


@pytest.mark.extension("power_limits")
def test_cpu_predictions_use_labels_of_other_hosts():
    answer = trappm.predict("test_resnet", device="cpu-2t", batch_size=8, snapshot="default")
    low, high = answer.intervals["step_time_ms"]
    assert high > 3 * low  # hosts differ by that much
    low, high = answer.intervals["memory_mib"]
    assert high < 2 * low
    remark = "the step time and memory of cpu-2t; they come from labels of other machines' cores"
    assert any(remark in line for line in answer.remarks)


def test_the_shipped_snapshot_is_complete_and_documented():
    manifest, contents = read_whole(SHIPPED)
    assert sum(map(len, contents.values())) < 20_000_000
    gpus = {"a100-40gb", "h100", "rtx3090", "rtx4090", "v100-16gb"}
    assert gpus | {"cpu-1t", "cpu-2t"} == set(manifest.heads)
    assert set(manifest.heads["rtx3090"]) == {"train", "infer"}
    assert all(source.file and source.source for source in manifest.sources)
    assert manifest.errors["a100-40gb"]["train"]["memory_mib"].mape < 4
    assert re.fullmatch("[0-9a-f]{12}", manifest.versions["commit"])  # of a clean tree


@pytest.mark.extension("power_limits")
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


STEP = "205 ms (183 to 239) at 160 px, batch 64, sgd, fp32, eager"
HEADLINES = (
    ({}, rf"Fits A100 40 GB: 8.0 GiB \(7.7 to 8.6\) of 40.0. A step takes {re.escape(STEP)}."),
    ({"capacity_mib": 9000.0}, r"May not fit A100 40 GB: 8.0 GiB .* of 8.8, 8.3 usable. A.*"),
    ({"capacity_mib": 8000.0}, "Does not fit A100 40 GB: .* would take 205 ms.*"),
    ({"execution": "compile", "accumulation": 4}, ".* batch 64, 4 passes, sgd, fp32, compiled."),
)


def test_the_headline_has_medians_and_intervals(answer):
    known = replace(
        answer, memory_mib=8192.0, capacity_mib=40_960.0, step_time_ms=205.2,
        intervals={"memory_mib": (7884.8, 8806.4), "step_time_ms": (183.4, 239.2)},
    )  # fmt: skip
    for changes, text in HEADLINES:
        assert re.fullmatch(text, str(replace(known, **changes)))
    small = replace(known, capacity_mib=9000.0)
    assert [(p.fits, p.verdict) for p in (known, small)] == [(True, "fits"), (False, "may not fit")]


@pytest.mark.parametrize(
    ("cards", "capacity_mib", "has_part"),
    [({}, 40_536, True), ({"a100": "a100 sxm4 40gb"}, 40_536, True),
     ({"a100": "a100 sxm4 80gb"}, 81_251, False)],
)  # fmt: skip
def test_the_measured_gpu_decides_what_fits(tmp_path, answer, cards, capacity_mib, has_part):
    fields = {"cards": cards} if cards else {}
    heads, labels = {"a100": shipped_heads("a100-40gb")}, [imported_label("a100")]
    snapshot = snapshot_of(tmp_path, heads, labels=labels, **fields)
    prediction = trappm.predict("test_resnet", device="a100", batch_size=64, snapshot=snapshot)
    assert prediction.memory_mib == answer.memory_mib
    assert prediction.capacity_mib == capacity_mib
    larger = prediction.largest_batch / answer.largest_batch
    assert larger == pytest.approx(1 if has_part else 2, rel=0.1)
    assert (prediction.mig_profile is not None) == has_part
    assert ("40 GB" in prediction.missing.get("mig_profile", "")) != has_part


def test_samples_of_a_parallel_step_count_all_ranks(tmp_path):
    single, double = (
        trappm.predict(
            "test_resnet", batch_size=8, device=device, epochs=1, samples=1600,
            snapshot=snapshot_of(tmp_path, {device: shipped_heads("cpu-1t")}),
        )
        for device in ("cpu-1t", "cpu-2x1t")
    )  # fmt: skip
    assert double.step_time_ms == single.step_time_ms
    assert double.samples_per_s == 2 * single.samples_per_s
    assert (single.run.steps, double.run.steps) == (200, 100)


def test_unlabelled_ranks_are_not_treated_as_one_device(refusal):
    error = refusal("predict test_resnet --device a100x4-fsdp")
    assert error.endswith("measure it, or predict 'a100'")


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


@pytest.mark.extension("power_limits")
@pytest.mark.parametrize(
    ("device", "key", "basis"),
    [
        ("NVIDIA T4", "t4", "T4 16 GB; it comes from kernels of this card and other cards' labels"),
        ("rtx4090", "rtx4090", "RTX 4090 24 GB; it comes from few published steps of this card"),
        ("RTX 2060", "rtx-2060", "; it comes from this card's data sheet"),
        ("v100-32gb", "v100-32gb", "step time of V100 32 GB; it comes from labels of v100-16gb"),
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


def test_devices_without_bf16_are_left_out_with_a_reason(as_json, refusal):
    assert "use amp-fp16" in refusal("predict test_resnet --device v100 --precision bf16")
    asked = {"batch_size": 8, "precision": "amp-bf16"}
    able, unable = trappm.compare("test_resnet", ["a100", "v100"], **asked)
    assert able.step_time_ms > 0
    assert tuple(unable) == (None, None, None)
    assert "no bf16 hardware" in unable.missing["step_time_ms"]
    report = as_json("compare test_resnet --batch-size 8 --precision amp-bf16")  # on all devices
    assert [row["device"] for row in report["left_out"]] == ["v100-16gb", "rtx4090"]


def test_a_snapshot_without_a_phase_hides_no_other():
    (shipped,) = Selection(Question(snapshot="default")).snapshots
    train = {"h100": {Phase.TRAIN: shipped.heads["h100"][Phase.TRAIN]}}
    latest = replace(shipped, heads=train, others=None)
    answering = [
        Selection(Question(phase=phase), [latest, shipped]).snapshot_for("h100") for phase in Phase
    ]
    assert {id(s) for s in answering} == {id(latest), id(shipped)}
    assert Selection(Question(phase="train"), [latest, shipped]).snapshot_for("h100") is latest


@pytest.mark.parametrize("asked", [{}, {"optimizer": "adam", "accumulation": 2}])
def test_models_that_are_asked_together_get_the_answers_of_each_alone(asked):
    models, devices = ("test_vit2", "vgg11_bn"), ("v100", "a100", "l40s", "h100", "cpu-2t")
    together = trappm.compare(models, devices, batch_size=64, **asked)
    for answer in together:
        alone = trappm.predict(answer.model, device=answer.device, batch_size=64, **asked)
        assert_equal(answer.to_dict(), alone.to_dict(), 1e-6)


def test_compare_finds_the_fastest_and_cheapest_device_and_model(as_json):
    options = {"phase": "infer", "batch_size": 32, "epochs": 1, "samples": 10_000}
    predictions = trappm.compare(["test_resnet", "test_vit"], **options)
    assert [(p.model, p.device) for p in predictions] == [
        (model, device)
        for model in ("test_resnet", "test_vit")
        for device in ("h100", "rtx3090", "rtx4090", "v100-16gb")
    ]

    def usd(prediction):
        return prediction.run.offers[0].usd

    best = verdicts(predictions)["test_vit"]
    assert best["fastest"] == min(predictions[4:], key=lambda p: p.step_time_ms).device
    assert best["cheapest"] == min(predictions[4:], key=usd).device
    full = [replace(p, capacity_mib=1.0) for p in predictions]
    kept = [f if p.device == best["fastest"] else p for f, p in zip(full, predictions, strict=True)]
    others = verdicts(kept)["test_vit"]
    assert best["fastest"] not in (others["fastest"], others["cheapest"])

    cheapest, fastest = min(predictions, key=usd), max(predictions, key=lambda p: p.samples_per_s)
    words = "compare test_resnet test_vit --batch-size 32 --phase infer --epochs 1"
    report = as_json(words, "--samples", 10_000)
    assert report["predictions"] == json.loads(json.dumps([p.to_dict() for p in predictions]))
    assert {name: tuple(pair.values()) for name, pair in report["best_of_all"].items()} == {
        "cheapest": (cheapest.model, cheapest.device),
        "fastest": (fastest.model, fastest.device),
    }


def test_comparisons_are_sorted_by_cost_or_time(as_json):
    words = "compare test_resnet --device l20 --device v100 --device h100 --sort"
    assert as_json(words, "cost")["predictions"][-1]["device"] == "l20"  # has no price
    times = [row["step_time_ms"] for row in as_json(words, "time")["predictions"]]
    assert times == sorted(times)


@pytest.mark.extension("onnx")
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


def test_mfu_is_the_published_arithmetic_of_a_model_over_the_peak():
    """He et al. (2015) count 3.8 GMAC of their ResNet-50; torchvision's and timm's has 4.09."""
    step = trappm.predict("resnet50", batch_size=64, device="rtx3090", precision="amp-fp16")
    tflop = 64 * 3 * 2 * 4.09e9 / 1e12
    peak_tflops = 71  # 16 bits with fp32 accumulation, by NVIDIA's data sheet of GA102
    assert step.mfu_percent == pytest.approx(
        100 * tflop / (step.step_time_ms / 1000) / peak_tflops, rel=0.03
    )
    low, high = step.intervals["mfu_percent"]
    assert low < step.mfu_percent < high
    assert trappm.predict("resnet18", device="cpu-2t").mfu_percent is None


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("h100", KEYS, "no model of device 'h100'; choose one with --device: a100-40gb"),
        ("a100", ("a100-40gb", "a100-80gb"), "may be a100-40gb or a100-80gb"),
        ("GPU:A100:8", KEYS, "is 8 GPUs"),
        ("cuda:0", KEYS, "device 'cuda:0' does not say which model it is"),
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


@pytest.mark.parametrize(
    ("device", "clouds"),
    [
        ("a100-40gb", "aws azure gcp lambda"),
        ("NVIDIA A100 80GB PCIe", "azure runpod"),
        ("a100-mig-1g.5gb", ""),
    ],
)
def test_prices_are_of_this_card_and_have_sources(device, clouds):
    prices = prices_of(device)
    assert sorted(price.cloud for price in prices) == clouds.split()
    assert all(price.source and price.noted for price in prices)


def test_a_given_price_replaces_the_known_ones():
    step = {"batch_size": 8, "epochs": 1, "samples": 10**6}
    known, own = (
        trappm.predict("test_resnet", device="h100", **step, **price)
        for price in ({}, {"usd_per_hour": 0.5})
    )
    assert len(known.run.offers) > 1
    [offer] = own.run.offers
    assert (offer.cloud, offer.usd_per_hour, offer.noted) == ("given", 0.5, "")
    assert offer.usd == pytest.approx(0.5 * own.run.hours)
    again = trappm.predict("test_resnet", device="h100", **step, usd_per_hour=0.25)
    assert again.run.offers[0].usd == pytest.approx(offer.usd / 2)  # and is no cached answer


def test_own_prices_replace_the_shipped_ones(home):
    assert [p.cloud for p in prices_of("rtx3090")] == ["runpod"]
    own = home / "prices.yaml"
    entry = "{cloud: desk, device: rtx3090, usd_per_hour: 0.05, noted: 2026-11-01, source: bill}"
    own.write_text(f"prices: [{entry}]")
    try:
        assert [p.cloud for p in prices_of("rtx3090")] == ["desk"]
        assert prices_of("a100-40gb") == ()
        own.write_text(f"prices: [{entry.replace('0.05', 'cheap')}]")
        with pytest.raises(InputError, match="usd_per_hour is 'cheap'"):
            prices_of("rtx3090")
    finally:
        own.unlink()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"phase": "sleep"}, "phase is 'sleep'; it must be one of train, infer"),
        ({"precision": "fp16"}, "did you mean amp-fp16"),
        ({"device": "all"}, "not a single device; compare all GPUs with: trappm compare MODEL"),
        ({"epochs": 3}, "needs both epochs and samples"),
        ({"epochs": -3, "samples": 10}, "epochs is -3; it must be"),
        ({"carbon_g_per_kwh": float("nan")}, "carbon intensity is nan"),
        ({"usd_per_hour": float("nan")}, "must be a number of USD per hour above 0, at most"),
        ({"batch_size": True}, "batch size is True"),
        ({"phase": "infer", "accumulation": 2}, "accumulation is 2, which is of training"),
        ({"execution": "reduce-overhead"}, "CUDA graphs are not covered"),
        ({"device": "v100", "precision": "amp-fp16", "execution": "compile"}, "Triton needs"),
        ({"snapshot": "nope"}, "no snapshot 'nope' in .*; default is the one"),
    ],
)
def test_invalid_options_are_refused(options, reason):
    with pytest.raises(trappm.TrappmError, match=reason):
        trappm.predict("test_resnet", **options)


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
    rows = tuple(StepSettings(optimizer=Optimizer(name)) for name in labelled)
    trained = SimpleNamespace(settings=rows)
    assert Selection(Question(optimizer=optimizer)).settings(trained).optimizer == answered


def test_settings_without_labels_are_predicted_by_published_steps_of_the_card():
    """The heads of a V100 learned from fp32 only; NVIDIA published steps in autocast."""
    (shipped,) = Selection(Question(snapshot="default")).snapshots
    others = shipped.others.heads("v100-16gb", Phase.TRAIN).heads.heads["step_time_ms"]
    own = shipped.heads["v100-16gb"][Phase.TRAIN].heads.heads["step_time_ms"]
    for precision, expected in (("amp-fp16", others), ("fp32", own)):
        selection = Selection(Question(precision=precision), [shipped])
        trained, basis = selection.trained("v100-16gb", "resnet50")
        head = trained.heads.heads["step_time_ms"]
        assert head.prior.constants is expected.prior.constants
        assert (basis is not None) == (precision == "amp-fp16")
    # A campaign answers for settings that it did not measure.
    own = replace(shipped, manifest=shipped.manifest.model_copy(update={"campaign": "mine"}))
    selection = Selection(Question(precision="amp-fp16"), [own])
    assert selection.trained("v100-16gb", "resnet50")[1] is None


@pytest.mark.parametrize(("device", "has_tf32"), [("a100", True), ("v100", False)])
def test_tf32_speeds_up_products_and_convolutions_where_the_gpu_has_it(home, device, has_tf32):
    """Convolutions use it by default, products only in `tf32`, and memory does not change."""
    precisions = ("fp32-strict", "fp32", "tf32")
    for model, faster in (("resnet18", [True, False]), ("vit_tiny_patch16_224", [False, True])):
        answers = [
            trappm.predict(model, batch_size=64, device=device, precision=precision)
            for precision in precisions
        ]
        assert [answer.precision for answer in answers] == list(precisions)
        assert len({answer.memory_mib for answer in answers}) == 1
        times_ms = [answer.step_time_ms for answer in answers]
        gains = [before / after for before, after in pairwise(times_ms)]
        assert [gain > 1.2 for gain in gains] == [has_tf32 and gain for gain in faster]
