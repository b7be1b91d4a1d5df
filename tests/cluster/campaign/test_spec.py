"""Campaign files: valid ones, and the errors of faulty ones."""

import math
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from trappm.cluster.file_reference import SECTIONS, json_schema, page
from trappm.cluster.pool_file import load_pool_file
from trappm.cluster.spec import load_preset, load_spec, parse_spec, presets
from trappm.profiler.errors import InputError
from trappm.profiler.models.families import FAMILIES, family_of
from trappm.profiler.models.known_names import model_of
from trappm.profiler.models.pool import build_pool

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


def small() -> dict:
    group = {"architectures": ["resnet10t"], "batch_sizes": [1, 2], "input_sizes": [64]}
    return {
        "name": "small",
        "devices": {"source": "cpu-2t", "target": "cpu-1t"},
        "evaluation": {"source": 2, "target": 2},
        "initial": {"source": 4, "target": 2},
        "rounds": {"count": 1, "source": 2, "target": 1},
        "pool": {"groups": [group]},
    }


def parse(data: dict):
    return parse_spec(yaml.safe_dump(data), origin="my.yaml")


def test_a_registry_is_a_location_that_other_hosts_can_reach():
    assert parse(small()).registry is None
    assert parse(small() | {"registry": "s3://bucket/path"}).registry == "s3://bucket/path"
    with pytest.raises(InputError, match="registry: 'shared' is not an absolute folder") as error:
        parse(small() | {"registry": "shared"})
    assert "\n" not in str(error.value)
    with pytest.raises(InputError) as error:
        parse(small() | {"registry": "sftp://me:secret@host/path"})
    assert "secret" not in f"{error.value}"


@pytest.mark.parametrize("name", presets())
def test_a_preset_survives_the_round_trip_through_the_store(name):
    spec = load_preset(name)
    assert type(spec).model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("campaign_*.yaml")), ids=lambda p: p.name)
def test_an_example_is_a_campaign_and_names_a_pool_of_the_examples(path):
    spec = load_spec(path)
    assert spec.pool in {load_pool_file(pool).name for pool in EXAMPLES.glob("pool_*.yaml")}


def test_pages_and_examples_measure_gpus_as_the_preset_does():
    preset = load_preset("gpu")
    (tutorial,) = re.findall(
        r"```yaml\n(name: gpus.*?)```", (ROOT / "docs/launch_a_campaign.md").read_text(), re.S
    )
    example = (EXAMPLES / "campaign_named_pool.yaml").read_text()
    for text in (tutorial, example):
        spec = parse_spec(text, origin="page")
        assert spec.model_dump(include=HOW) == preset.model_dump(include=HOW)
        assert spec.remarks == []
    for page_of_it in ("README.md", "docs/cluster.md", "docs/launch_a_campaign.md"):
        assert "cluster/presets/gpu.yaml" in (ROOT / page_of_it).read_text()


HOW = {"protocol", "power_share", "learner", "strategy", "canary"}
"""Parts of a campaign file that say how GPUs are measured and learned."""


@pytest.mark.parametrize(
    ("source", "count"), [("a100", 2), ("cpu-4t", 0), ("simulated:a100", 0), ("a100x2", 2)]
)
def test_what_suits_cpus_only_is_remarked_on_gpus(source, count):
    laptop = load_preset("laptop")
    devices = laptop.devices.model_copy(update={"source": source})
    remarks = laptop.model_copy(update={"devices": devices}).remarks
    assert len(remarks) == count
    assert all(source in remark for remark in remarks)


def test_pools_can_be_named_and_stop_rules_and_protocols_described():
    stop = {
        "target_mape": {"step_time_ms": 10, "memory_mib": 5}, "labels": 400, "gpu_hours": 12.5,
        "price_per_gpu_hour": 2.5, "ends_at": "2026-11-22T08:00:00+00:00",
    }  # fmt: skip
    own = {"name": "mine", "power_window_s": 4}
    spec = parse(small() | {"pool": "paper", "stop": stop, "protocol": own})
    assert spec.pool == "paper"
    assert spec.stop.target_mape == {"step_time_ms": 10, "memory_mib": 5}
    assert spec.protocol.power_window_s == 4
    assert type(spec).model_validate(spec.model_dump(mode="json")) == spec
    assert parse(small() | {"protocol": {"name": "mine"}}).protocol.power_window_s == 2
    assert parse(small()).stop is None
    assert parse(small()).budget("cpu-2t") == 2 + 4 + 2
    assert parse(small()).budget("cpu-1t") == 2 + 2 + 1


def test_the_power_share_names_a_protocol_unless_it_is_the_default():
    """Stored labels have the name, and campaigns adopt those of the same name."""
    own = {"name": "mine", "min_steps": 7}
    assert parse({**small(), "protocol": own}).measuring_protocol.name == "mine-62f3b08d"
    third = parse({**small(), "protocol": {**own, "power_share": 0.33}}).measuring_protocol
    assert third.name not in ("mine", "mine-62f3b08d")
    assert parse({**small(), "protocol": own, "power_share": 0.33}).measuring_protocol == third
    share = parse({**small(), "protocol": "adaptive", "power_share": 1 / 3}).measuring_protocol
    assert (share.name[:9], share.power_share) == ("adaptive-", 1 / 3)
    assert parse({**small(), "power_share": 1.0}).measuring_protocol.name == "quick"


def test_the_laptop_pool_covers_all_families():
    pool = build_pool(load_preset("laptop").pool)
    assert {family_of(c.architecture) for c in pool} == set(FAMILIES)
    assert len({c.architecture for c in pool}) >= 40
    assert len(pool) >= 200
    assert len({c.batch_size for c in pool}) >= 3
    assert len({c.input_size for c in pool}) >= 2


@pytest.mark.extension("transformers")
def test_the_transformers_pool_covers_all_options_and_several_models_per_family():
    pytest.importorskip("transformers")
    spec = load_preset("transformers")
    pool = build_pool(spec.pool)
    names = {model_of(c.architecture) for c in pool}
    kinds = Counter(family_of(name) for name in names)
    # A family's only model is never held out.
    assert min(kinds[kind] for kind in ("gpt2", "llama", "bert", "t5", "vit")) >= 3
    options = {option.partition("=")[0] for c in pool for option in c.architecture.split(",")[1:]}
    assert options == {"lora", "frozen", "checkpointing", "eager", "vocabulary"}
    assert {str(c.optimizer) for c in pool} == {"adamw"}
    assert len({c.input_size for c in pool}) >= 4
    assert len({c.batch_size for c in pool}) >= 4
    assert len(pool) > 4 * spec.total


BIRD = {"architecture": "resnet10t", "batch_size": 1, "input_size": 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sead": 3}, "sead: unknown key; did you mean 'seed'"),
        ({"characterise": False}, "characterise: unknown key"),
        ({"name": ""}, "name"),
        ({"name": "../up"}, "name"),
        ({"rounds": {"count": -1, "source": 2}}, "rounds.count: must be greater than or equal"),
        ({"rounds": {"source": 2}}, "rounds.count: is missing"),
        ({"evaluation": {"source": 2, "tarket": 2}}, "did you mean 'target'"),
        ({"devices": {"source": "cpu-2t", "target": "cpu-2t"}}, "source and target are the same"),
        ({"learner": "paper", "strategy": "uncertainty"}, "take learner: paper-ensemble"),
        ({"learner_device": "cpu-2t"}, "learner_device: cpu-2t is not a GPU"),
        ({"learner_device": "simulated:a100"}, "take gpu for any"),
        ({"devices": {"source": "cpu-2t"}}, "names no target"),
        ({"initial": {"source": 1, "target": 2}}, "4 or more"),
        ({"protocol": "quik"}, "quik"),
        ({"protocol": {"name": "quick", "max_steps": 60}}, "rename yours"),
        ({"protocol": {"name": "mine", "max_step": 60}}, "did you mean 'max_steps'"),
        ({"protocol": {"name": "mine", "min_steps": 60}}, "60 to 50 steps"),
        ({"protocol": {"name": "mine", "power_window_s": -1}}, "power_window_s of -1"),
        ({"protocol": {"name": "mine", "power_window_s": 300}}, "from 0 to 60"),
        ({"protocol": {"name": "mine", "power_share": 1.5}}, "from 0 to 1"),
        ({"learner": "labtop"}, "labtop"),
        ({"strategy": "randon"}, "randon"),
        ({"strategy": "facility"}, "'facility' is not offered; write strategy: ours"),
        ({"strategy": "ours-per-second"}, "write strategy: ours and cost: true"),
        ({"strategy": "random", "cost": True}, "cost: true needs strategy: ours, not random"),
        ({"pool": {"groups": []}}, "no groups"),
        ({"pool": {"groups": [{"architecture": ["a"]}]}}, "pool.groups.0.architecture: unknown"),
        ({"pool": {"name": "paper", "groups": []}}, "groups, not both"),
        ({"pool": {"name": "paper"}}, "pool: NAME"),
        ({"pool": 5}, "pool"),
        ({"stop": {"target": 5}}, "unknown key; did you mean 'target"),
        ({"stop": {"target_mape": {"memory": 5}}}, "no metric 'memory'"),
        ({"stop": {"labels": "many"}}, "stop.labels"),
        ({"stop": {"money": 5}}, "stop.money: unknown key"),
        ({"canary": {"every_measurments": 3}}, "canary.every_measurments: unknown key; did you"),
        ({"canary": {"configuration": BIRD | {"batchsize": 3}}}, "did you mean 'batch_size'"),
        ({"canary": {"every_s": 0}}, "every_s of the canary is 0"),
        ({"canary": {"every_s": math.inf}}, "every_s"),
        ({"canary": {"stop_relative": 0.01}}, "the first must be above 0 and not above the second"),
        ({"canary": True}, "canary"),
        ({"pool": {"groups": [{"architectures": ["a"], "batch_sizes": [0], "input_sizes": [1]}]}},
         "batch_sizes"),
    ],
)  # fmt: skip
def test_a_faulty_file_is_reported_with_its_name_and_fault(change, message):
    with pytest.raises(InputError, match=f"my.yaml.*{re.escape(message)}"):
        parse(small() | change)


def test_an_error_of_yaml_names_the_place_in_the_file_alone():
    with pytest.raises(
        InputError, match=r"my\.yaml is not valid YAML: .* at line 1, column 5"
    ) as error:
        parse_spec("a: [", origin="my.yaml")
    assert "string>" not in str(error.value)


@pytest.mark.parametrize("text", ["", "- a", "a: [", "!!python/object/apply:os.system ['true']"])
def test_what_is_not_a_mapping_in_yaml_is_refused(text, tmp_path):
    with pytest.raises(InputError):
        parse_spec(text, origin="my.yaml")
    with pytest.raises(InputError, match="cannot read"):
        load_spec(tmp_path / "none.yaml")
    with pytest.raises(InputError, match="laptop"):
        load_preset("desktop")


def test_the_reference_page_is_current_and_has_every_key():
    assert (ROOT / "docs/reference/campaign_file.md").read_text() == page()
    assert {f"`{key}`" for key in small()} <= set(page().replace("|", " ").split())
    assert len(SECTIONS) + 1 == page().count("\n## ")


def test_the_schema_for_editors_accepts_a_preset_and_refuses_an_unknown_key():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(small() | {"canary": False}, json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(small() | {"sead": 3}, json_schema())
    sizes = ("evaluation", "initial", "rounds")
    without = {name: value for name, value in small().items() if name not in sizes}
    jsonschema.validate(without | {"strategy": "all"}, json_schema())
    with pytest.raises(jsonschema.ValidationError, match="evaluation"):
        jsonschema.validate(without, json_schema())
