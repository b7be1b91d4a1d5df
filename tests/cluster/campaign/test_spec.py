"""Campaign files: valid ones, and the errors of faulty ones."""

import math
import re
from pathlib import Path

import pytest
import yaml

from trappm.cluster.file_reference import SECTIONS, json_schema, page
from trappm.cluster.pool_file import load_pool_file
from trappm.cluster.spec import load_preset, load_spec, parse_spec, presets
from trappm.profiler.errors import InputError

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


BIRD = {"architecture": "resnet10t", "batch_size": 1, "input_size": 64}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sead": 3}, "sead: unknown key; did you mean 'seed'"),
        ({"name": "../up"}, "name"),
        ({"rounds": {"count": -1, "source": 2}}, "rounds.count: must be greater than or equal"),
        ({"devices": {"source": "cpu-2t", "target": "cpu-2t"}}, "source and target are the same"),
        ({"learner": "paper", "strategy": "uncertainty"}, "take learner: paper-ensemble"),
        ({"learner_device": "cpu-2t"}, "learner_device: cpu-2t is not a GPU"),
        ({"devices": {"source": "cpu-2t"}}, "names no target"),
        ({"initial": {"source": 1, "target": 2}}, "4 or more"),
        ({"protocol": "quik"}, "quik"),
        ({"protocol": {"name": "quick", "max_steps": 60}}, "rename yours"),
        ({"protocol": {"name": "mine", "min_steps": 60}}, "60 to 50 steps"),
        ({"protocol": {"name": "mine", "power_window_s": 300}}, "from 0 to 60"),
        ({"learner": "labtop"}, "labtop"),
        ({"strategy": "randon"}, "randon"),
        ({"strategy": "random", "cost": True}, "cost: true needs strategy: ours, not random"),
        ({"pool": {"groups": []}}, "no groups"),
        ({"pool": {"name": "paper", "groups": []}}, "groups, not both"),
        ({"stop": {"target_mape": {"memory": 5}}}, "no metric 'memory'"),
        ({"canary": {"configuration": BIRD | {"batchsize": 3}}}, "did you mean 'batch_size'"),
        ({"canary": {"every_s": math.inf}}, "every_s"),
        ({"canary": {"stop_relative": 0.01}}, "the first must be above 0 and not above the second"),
        ({"pool": {"groups": [{"architectures": ["a"], "batch_sizes": [0], "input_sizes": [1]}]}},
         "batch_sizes"),
    ],
)  # fmt: skip
def test_a_faulty_file_is_reported_with_its_name_and_fault(change, message):
    with pytest.raises(InputError, match=f"my.yaml.*{re.escape(message)}") as fault:
        parse(small() | change)
    assert "(and" not in str(fault.value)  # more faults


@pytest.mark.parametrize("text", ["- a", "!!python/object/apply:os.system ['true']"])
def test_what_is_not_a_mapping_in_yaml_is_refused(text, tmp_path):
    with pytest.raises(InputError):
        parse_spec(text, origin="my.yaml")
    with pytest.raises(InputError, match="cannot read"):
        load_spec(tmp_path / "none.yaml")


def test_the_reference_page_is_current_and_has_every_key():
    assert (ROOT / "docs/reference/campaign_file.md").read_text() == page()
    assert {f"`{key}`" for key in small()} <= set(page().replace("|", " ").split())
    assert len(SECTIONS) + 1 == page().count("\n## ")


def test_the_schema_for_editors_accepts_a_preset_and_refuses_an_unknown_key():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(small() | {"canary": False}, json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(small() | {"sead": 3}, json_schema())
