"""A laptop campaign to heads, by workers that make their measurements up: a program.

    python tests/installed/installed_campaign.py FOLDER_OF_FAKES NUMBER_OF_LABELS

Store, loop, traced steps, learner and snapshot are the real ones; Ray is not started. It prints
what the heads were trained on as one line of JSON, and leaves its data folder for other commands.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(sys.argv[1])

import fakes

from trappm.cluster.campaign.campaign import CampaignRunner
from trappm.cluster.campaign.learner import CampaignLearner
from trappm.cluster.spec import load_preset
from trappm.cluster.trace_tasks import trace_of
from trappm.learner.paper.presets import LAPTOP, PRESETS
from trappm.store import Home, Store

ARCHITECTURES = ["test_convnext", "test_efficientnet", "test_resnet", "test_vit", "test_vit2"]


class Learner(CampaignLearner):
    """Remembers on what it was trained last."""

    def fit(self, labels):
        self.report = super().fit(labels)
        return self.report


def main():
    # Where points lie does not matter here, so the encoder hardly learns.
    PRESETS["laptop"] = replace(LAPTOP, encoder=replace(LAPTOP.encoder, steps=1))
    laptop = load_preset("laptop").model_dump(mode="json") | {
        "evaluation": {"source": 8, "target": 4, "architecture_share": 0.2},
        "initial": {"source": int(sys.argv[2]), "target": 8},
        "rounds": {"count": 0, "source": 0},
        "pool": {
            "groups": [
                {
                    "architectures": ARCHITECTURES,
                    "batch_sizes": list(range(1, 25)),
                    "input_sizes": [64],
                }
            ]
        },
        "canary": None,
    }
    home = Home.open()
    with Store.open(home.database_url) as store:
        record = store.campaigns.create("laptop", laptop, laptop["seed"])
        spec = fakes.CampaignSpec.of(record)
        learner = Learner(
            preset=spec.learner, strategy=spec.strategy, source=spec.devices.source,
            seed=spec.seed, cache=home.campaigns / record.id,
        )  # fmt: skip
        CampaignRunner(
            store=fakes.owned(store, record.id), id=record.id, spec=spec,
            profilers=fakes.FakeWorkers(trace_of=trace_of), learner=fakes.Inline(learner),
            snapshots=home.snapshots,
        ).run()  # fmt: skip
        report = {
            "trained_on": learner.report.labels,
            "state": str(store.campaigns.state(record.id)),
            "trappm": str(Path(sys.modules["trappm"].__file__ or "")),
        }
    sys.stdout.write(json.dumps(report))


if __name__ == "__main__":
    main()
