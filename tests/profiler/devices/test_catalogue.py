"""One catalogue of cards: known by all their names, consistent in itself, never guessed."""

import pytest
from nvml_stub import GIB, Board, install

from trappm.profiler.devices import open_device
from trappm.profiler.devices.catalogue import (
    RankKey,
    card_capacity_mib,
    card_keys,
    card_name,
    card_of,
    cards,
    device_capacity_mib,
    known_spec,
    most_similar,
    possible_runs,
    rank_key,
    ray_labels,
    read_name,
)
from trappm.profiler.errors import DeviceError
from trappm.profiler.host import procfs
from trappm.profiler.records import Execution, Precision

CORES = {(6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}
"""For fp32 in a multiprocessor; 128 in all later ones."""


def known(name, memory_mib=None):
    card = card_of(name, memory_mib)
    assert card is not None, name
    return card


@pytest.mark.parametrize(
    ("name", "key", "form", "memory_gb", "bandwidth_gbs"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100", "sxm4", 40, 1555),
        ("NVIDIA A100-SXM4-80GB", "a100", "sxm4", 80, 2039),
        ("NVIDIA A100 80GB PCIe", "a100", "pcie", 80, 1935),
        ("Tesla V100-PCIE-32GB", "v100", "pcie", 32, 900),
        ("NVIDIA H100 NVL", "h100", "nvl", 94, 3938),
        ("NVIDIA GH200 144G HBM3e", "gh200", None, 144, 4900),
        ("GeForce-RTX-3090", "rtx-3090", None, 24, 936),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx-4070-ti-super", None, 16, 672),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada", None, 48, 960),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-blackwell-server", None,
         96, 1597),
        ("simulated:v100-32gb", "v100", "sxm2", 32, 900),
    ],
)  # fmt: skip
def test_gpus_are_found_by_all_their_names(name, key, form, memory_gb, bandwidth_gbs):
    card = known(name)
    assert read_name(name).key == key
    assert (card.name.form, card.memory_gb, card.bandwidth_gbs) == (form, memory_gb, bandwidth_gbs)


def test_memory_size_distinguishes_gpus_of_one_name():
    assert known("NVIDIA GeForce RTX 3080", 10_240).bandwidth_gbs == 760
    assert known("NVIDIA GeForce RTX 3080", 12_288).bandwidth_gbs == 912
    assert known("NVIDIA A100", 81_251).memory_gb == 80
    assert known("Tesla V100", 32_510).memory_gb == 32
    assert card_of("NVIDIA A100", 65_000) is None


def facts(name, memory_mib=None):
    """Of an environment, those that tell a card, among others."""
    return {"torch": "2.13.0", "device_name": name, "device_memory_mib": memory_mib}


@pytest.mark.parametrize(
    ("device", "environments", "card"),
    [
        ("a100", [facts("NVIDIA A100-SXM4-80GB", 81_920.0)], "a100 sxm4 80gb"),
        ("rtx3080", [facts("NVIDIA GeForce RTX 3080", 12_288)], "rtx-3080 12gb"),
        ("simulated:a100-80gb", [facts("a100 sxm4 80gb (simulated)")], "a100 sxm4 80gb"),
        ("a100-mig-1g.10gb", [facts("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9856.0)],
         "a100 sxm4 80gb mig 1g.10gb"),
        ("a100", [facts(None), facts("NVIDIA A100-SXM4-80GB")], "a100 sxm4 80gb"),
        ("a100", [facts("NVIDIA A100-SXM4-40GB"), facts("NVIDIA A100-SXM4-80GB")], "a100"),
        ("a100", [facts("NVIDIA A100-SXM4-80GB", 65_536.0)], "a100"),
        ("cpu-2t", [{"device_name": "AMD EPYC 7763", "memory_allowed_mib": 8e3}], "cpu-2t"),
    ],
)  # fmt: skip
def test_the_environment_of_a_measurement_identifies_the_gpu(device, environments, card):
    assert card_name(device, environments) == card
    if card != device:
        assert str(known(card).name) == card, "its name means it alone"


@pytest.mark.parametrize(
    "name",
    ["", "a1000", "NVIDIA A100-SXM-64GB", "cpu-2t", "NVIDIA GeForce RTX 4090 Laptop GPU",
     "h100-mig-9g.99gb", "rtx-pro-6000"],
)  # fmt: skip
def test_unlisted_names_match_no_gpu(name):
    assert card_of(name) is None


def test_figures_of_every_gpu_are_consistent():
    for card in cards():
        check_figures(card)


def check_figures(card):
    clock_ghz = card.fp32_tflops * 1e3 / (2 * card.units * CORES.get(card.capability, 128))
    assert 1.0 < clock_ghz < 2.7
    assert (card.tf32_tflops is None) == (card.capability < (8, 0)), "TF32 came with Ampere"
    if card.tf32_tflops is not None:
        assert card.half_tflops == pytest.approx(2 * card.tf32_tflops, rel=0.02)
        assert card.tf32_tflops >= 0.98 * card.fp32_tflops
    # Half precision is twice (P100) to 32 times as fast; Pascal's GeForce cards use fp32 for it.
    least = 1.0 if card.capability == (6, 1) else 1.7
    assert least <= card.half_tflops / card.fp32_tflops <= 32
    assert 100 <= card.bandwidth_gbs <= 8000
    assert 1 <= card.cache_mib <= 128
    if card.memory_mib is not None:
        assert 0.9 * card.memory_gb < card.memory_mib / 1024 <= card.memory_gb
    assert card_of(str(card.name)) == card, "its own name means it"


def test_mig_slices_have_their_share_of_the_gpu():
    whole, part = known("a100"), known("NVIDIA A100-SXM4-40GB MIG 2g.10gb")
    assert read_name("NVIDIA A100-SXM4-40GB MIG 2g.10gb").key == "a100-mig-2g.10gb"
    assert part.units == 28
    assert part.half_tflops == pytest.approx(whole.half_tflops * 28 / 108)
    assert part.bandwidth_gbs == pytest.approx(whole.bandwidth_gbs / 4)
    assert (part.memory_gb, part.power_w) == (10, None)
    # The eighth of 80 GB rather than the quarter of 40, unless the name says so.
    assert known("a100-mig-1g.10gb").bandwidth_gbs == pytest.approx(2039 / 8)
    assert known("a100-40gb-mig-1g.10gb").bandwidth_gbs == pytest.approx(1555 / 4)


def test_devices_open_by_any_of_their_names(monkeypatch):
    install(
        monkeypatch,
        Board("GPU-a", "NVIDIA A100-SXM4-40GB"),
        Board("GPU-b", "NVIDIA A100-SXM4-80GB", total=80 * GIB),
        Board("GPU-c", "NVIDIA GeForce RTX 3090", total=24 * GIB),
    )
    for key, uuid in (("a100", "GPU-a"), ("A100-SXM4-80GB", "GPU-b"), ("rtx3090", "GPU-c")):
        assert open_device(key).environment()["device_uuid"] == uuid
    for other in ("a100-64gb", "rtx-3090-ti", "v100"):
        with pytest.raises(DeviceError, match="no GPU here"):
            open_device(other)


@pytest.mark.parametrize(
    ("device", "mib"),
    [
        ("a100", 40_536.0),
        ("a100-80gb-mig-2g.20gb", 20 * 1024.0),
        ("simulated:v100", 16_160.0),
        ("cpu-2t", None),
    ],
)
def test_memory_of_a_device_is_known_by_its_name(device, mib):
    assert card_capacity_mib(device) == mib
    assert device_capacity_mib(device) == (mib or procfs.allowed_memory_mib())
    assert device_capacity_mib("gaudi2") is device_capacity_mib("replay:labels.jsonl") is None


def test_ray_labels_of_a_gpu_are_its_names():
    assert ray_labels("a100") == ("A100",)
    assert ray_labels("rtx-3090") == ("RTX-3090", "GeForce-RTX-3090")
    assert "GeForce-RTX-4070-Ti-SUPER" in ray_labels("rtx-4070-ti-super")
    assert "A100" in ray_labels("a100-80gb")
    assert "A100" not in ray_labels("a100x")


@pytest.mark.parametrize(
    ("device", "compiled"),
    [
        ("a100", set(Precision)),
        ("v100", {Precision.FP32, Precision.TF32, Precision.FP32_STRICT}),
        ("cpu-2x1t", set()),
        ("a100x4", set()),
        ("simulated:a100", set()),
    ],
)
def test_compiled_steps_are_planned_where_they_can_be_measured(device, compiled):
    runs = possible_runs(device)
    assert {precision for precision, how in runs if how is Execution.COMPILE} == compiled
    assert (Precision.FP32, Execution.EAGER) in runs


@pytest.mark.parametrize(
    ("device", "similar"),
    [
        ("h200", "h100"),
        ("a30", "a100"),
        ("t4", "rtx-2080-ti"),
        ("gaudi2", None),
    ],
)
def test_most_similar_has_the_same_memory_and_share_of_tensor_arithmetic(device, similar):
    known = ("a100", "h100", "l40s", "rtx-2080-ti", "rtx-3090", "rtx-4090", "v100")
    assert most_similar(device, known) == similar
    assert most_similar("b200", ("rtx-4090", "unknown")) is None  # of another memory


@pytest.mark.parametrize(
    ("device", "key"),
    [
        ("cpu-2x1t", RankKey("cpu-1t", 2)),
        ("a100x4", RankKey("a100", 4)),
        ("a100-80gbx8-fsdp", RankKey("a100-80gb", 8, "fsdp")),
        ("rtx3090x2", RankKey("rtx3090", 2)),
        *[(name, RankKey(name)) for name in (
            "rtx-3090", "a100x", "a100-sxm4-40gb", "cuda:0", "cpu-1x1t", "replay:runsx2",
        )],
    ],
)  # fmt: skip
def test_ranks_of_a_key(device, key):
    assert rank_key(device) == key


OWN = "model,memory_gb,half_tflops,fp32_tflops,bandwidth_gbs,cache_mib,units,capability\n"


def test_own_cards_are_known_by_their_data_sheets(tmp_path, monkeypatch, refused):
    monkeypatch.setenv("TRAPPM_HOME", str(tmp_path))
    file = tmp_path / "cards.csv"
    file.write_text(f"{OWN}MyCard,24,150,40,900,40,90,8.9\n")
    assert card_capacity_mib("NVIDIA MyCard 24GB") == 24 * 1024
    assert "mycard" in card_keys()
    assert known_spec("mycard").tf32_tflops is None
    for row, words in (
        ("mycard,24,150,40,-1,40,90,8.9", "bandwidth_gbs is -1, not a positive number"),
        ("rtx-4090,24,150,40,900,40,90,8.9", "rtx-4090 24gb, which is in the catalogue"),
    ):
        file.write_text(f"{OWN}{row}\n")
        with refused(words):
            card_keys()
    file.write_text(f"\ufeff{OWN}MyCard,24,150,40,900,40,90,8.9\n")  # as spreadsheets write it
    assert "mycard" in card_keys()
    file.unlink()
    assert known_spec("mycard") is None
