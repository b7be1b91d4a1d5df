"""Why a campaign chose what it chose: reasons come back from the store, the map has every kind."""

import json
import os
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from terminal import Terminal

from trappm.cli import run
from trappm.cluster.learning.campaign_learner import CampaignLearner
from trappm.cluster.spec import parse_spec
from trappm.cluster.tasks import ChoiceRequest
from trappm.learner.paper.presets import LAPTOP, PRESETS
from trappm.profiler.errors import InputError
from trappm.profiler.host.environment import utc_now
from trappm.profiler.records import (
    QUICK,
    Configuration,
    Measurement,
    Outcome,
    Provenance,
    StepSummary,
)
from trappm.reports.choices import explain
from trappm.store import Assignment, Home, Store

SPEC = """
name: explained
devices: {source: cpu-2t}
evaluation: {source: 2}
initial: {source: 4}
rounds: {count: 1, source: 2}
pool:
  groups:
    - {architectures: [test_resnet, test_vit, test_efficientnet], batch_sizes: [1, 2, 4],
       input_sizes: [64]}
"""


@pytest.fixture(scope="module")
def hasty():
    """The laptop preset with an encoder that hardly learns: where points lie does not matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "laptop", replace(LAPTOP, encoder=replace(LAPTOP.encoder, steps=1)))
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory, hasty):
    from trappm.profiler.static_profile import graph_template

    folder = tmp_path_factory.mktemp("home")
    home = Home(folder)
    spec = parse_spec(SPEC, origin="the test")
    templates = {
        name: graph_template(name, 64).to_bytes()
        for name in ("test_resnet", "test_vit", "test_efficientnet")
    }
    pool = [
        (Configuration(architecture=name, batch_size=batch, input_size=64), templates[name])
        for name in templates
        for batch in (1, 2, 4)
    ]
    with Store.open(home.database_url) as store:
        for name, template in templates.items():
            store.workloads.save_graph(name, 64, template, None)
        campaign = store.campaigns.create(spec.name, spec.model_dump(mode="json"), spec.seed)
        held_out = "test_vit"
        store.campaigns.set_pool(campaign.id, [(c, c.architecture == held_out) for c, _ in pool])
        learner = CampaignLearner(
            preset=spec.learner, strategy=spec.strategy, source="cpu-2t", seed=spec.seed,
            cache=home.campaigns / campaign.id,
        )  # fmt: skip
        ordered = [(c, templates[c.architecture]) for c, _ in store.campaigns.pool(campaign.id)]
        learner.set_pool(ordered)
        ids = [c.id for c, _ in pool if c.architecture != held_out]
        choices = learner.choose(
            ChoiceRequest(device="cpu-2t", count=2, candidates=ids, known=[], seed=(1,))
        )
        by_id = {c.id: c for c, _ in pool}
        store.rounds.plan(
            campaign.id, 0, "acquired",
            [
                Assignment(
                    configuration=by_id[c.configuration_id], device="cpu-2t", role="train",
                    rank=rank, reason=dict(c.reason),
                )
                for rank, c in enumerate(choices)
            ],
        )  # fmt: skip
    return home


def test_choices_have_reasons_and_the_next_ones_differ(home):
    with Store.open(home.database_url) as store:
        facts = explain(store, home, store.campaigns.get(None).id, device=None, count=2)
    assert facts.strategy == "ours"
    assert [c.reason["rank"] for c in facts.chosen] == [0, 1]
    assert all(c.reason["variance_reduction"] > 0 for c in facts.chosen)
    assert all(c.reason["representation"] >= 0 for c in facts.chosen)
    assert facts.wanted[0].reason["distance_to_nearest_label"] >= 0
    chosen, wanted = ({c.configuration for c in part} for part in (facts.chosen, facts.wanted))
    assert len(wanted) == 2
    assert not chosen & wanted
    kinds = [p.kind for p in facts.map]
    assert {k: kinds.count(k) for k in set(kinds)} == {
        "held out": 3, "pending": 2, "wanted": 2, "pool": 2,
    }  # fmt: skip
    assert np.isfinite([[p.x, p.y] for p in facts.map]).all()


def test_labels_change_the_next_choices(home, tmp_path):
    folder = shutil.copytree(home.path, tmp_path / "labelled")
    labelled = Home(folder)
    with Store.open(labelled.database_url) as store:
        campaign = store.campaigns.get(None).id
        taken = {a.configuration for a in store.assignments.of_campaign(campaign)}
        free = [c for c, held_out in store.campaigns.pool(campaign) if not held_out]
        more = [c for c in free if c not in taken][:2]
        store.rounds.plan(campaign, 1, "acquired", [
            Assignment(configuration=c, device="cpu-2t", role="train", rank=rank, reason={})
            for rank, c in enumerate(more)
        ])  # fmt: skip
        for waiting in store.assignments.of_campaign(campaign, device="cpu-2t", state="open"):
            (lease,) = store.measurements.record_and_lease([], [(waiting.id, "one")])
            ms = 10.0 * lease.configuration.batch_size + 3.0 * len(lease.configuration.architecture)
            measurement = Measurement(
                configuration=lease.configuration, device="cpu-2t", outcome=Outcome.OK,
                protocol=QUICK, started_at=utc_now(), duration_s=1.0, attempt_key=lease.attempt_key,
                provenance=Provenance.MEASURED, step_samples_ms=(ms,) * 8,
                step=StepSummary(median_ms=ms, mean_ms=ms, iqr_ms=0.0, p95_ms=ms),
                memory_mib=10 * ms,
            )  # fmt: skip
            store.measurements.record(measurement, assignment_id=lease.id)
        facts = explain(store, labelled, campaign, device=None, count=2)
    assert len(facts.wanted) == 2
    # The labels are 40 to 80 ms; what the prior says without heads is 2 or 3.
    assert all(20 < choice.reason["predicted_step_time_ms"] < 150 for choice in facts.wanted)


def test_the_command_prints_draws_and_writes_json(home, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TRAPPM_HOME", str(home.path))
    command = ["campaign", "report", "--choices"]
    assert run([*command, "--png", str(tmp_path / "map.png")], debug=True) == 0
    printed = capsys.readouterr().out
    assert "next choices" in printed
    assert "X wanted" in printed
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"
    assert run([*command, "--json"], debug=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [*printed] == ["campaign", "device", "strategy", "chosen", "wanted", "map"]
    assert {*printed["chosen"][0]} == {"configuration", "round", "state", "reason"}
    assert len(printed["map"]) == 9
    assert {*printed["map"][0]} == {"configuration", "x", "y", "kind"}


COMMANDS = (
    "campaign report --choices",
    "compare test_resnet mobilenetv4_conv_small_035 --input-size 64 --batch-size 64",
    "predict test_resnet --input-size 64 --batch-size 4096 --epochs 90 --samples 1281167",
    "snapshot show default",
)
TABLES = f"""
from trappm.cli import run
for command in {COMMANDS!r}:
    print("$", command, flush=True)
    run(command.split())
"""
EXPLAINED = re.compile(r"on a wider screen: .*")


def words_and_widths(home, columns):
    """All words of the commands' output on such a screen, and how wide each table's lines are."""
    terminal = Terminal(
        [sys.executable, "-c", TABLES], env={**os.environ, "TRAPPM_HOME": str(home.path)},
        columns=columns,
    )  # fmt: skip
    assert terminal.wait(280) == 0, terminal.raw
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\u2800-\u28ff]", "", terminal.raw).replace("\r", "")
    assert plain.count("$ ") == len(COMMANDS)
    rules = [len(line) for line in plain.split("\n") if set(line) == {"─"}]
    return set(re.split(r"[\s│─;]+", EXPLAINED.sub("", plain))), rules


def test_tables_fit_the_screen_without_cutting_words(home):
    """On 250 columns nothing needs to be broken: what a narrow screen has beside is a cut word."""
    whole, _ = words_and_widths(home, 250)
    words, rules = words_and_widths(home, 80)
    assert max(rules) <= 80
    assert words - whole == set()


def test_impossible_questions_about_choices_are_refused(home, tmp_path):
    with Store.open(home.database_url) as store:
        id_ = store.campaigns.get(None).id
        with pytest.raises(InputError, match="it does on: cpu-2t"):
            explain(store, home, id_, device="a100", count=2)
        with pytest.raises(InputError, match="has not encoded"):
            explain(store, Home(tmp_path), id_, device=None, count=2)
