"""What a campaign would choose next, kept beside its encoder until its store knows more.

Choosing trains heads and embeds the pool, which takes seconds of all cores. A damaged entry is made
again, and a folder that cannot be written keeps none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trappm.profiler.files.whole_file import made_whole

if TYPE_CHECKING:
    from trappm.store import Store


@dataclass(frozen=True)
class NextChoices:
    """The next picks on a device, and where the pool's configurations lie."""

    picks: Sequence[tuple[str, Mapping[str, Any]]]
    """Ids of configurations, and the reasons."""
    points: Sequence[tuple[float, float]]
    """One for each configuration of the pool, in its order."""


def kept_choices(
    store: Store, campaign_id: str, folder: Path, device: str, count: int,
    make: Callable[[], NextChoices],
) -> NextChoices:  # fmt: skip
    """The choices for what the store knows now, made if they are not there."""
    state = _state(store, campaign_id, folder, count)
    path = folder / f"choices-{device}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        entry = json.loads(path.read_bytes())
        if entry["state"] == state:
            picks = [(str(name), dict(reason)) for name, reason in entry["picks"]]
            return NextChoices(picks, [(float(x), float(y)) for x, y in entry["points"]])
    choices = make()
    with contextlib.suppress(OSError), made_whole(path, replace=True) as part:
        part.write_text(json.dumps({"state": state, **asdict(choices)}), encoding="utf-8")
    return choices


def _state(store: Store, campaign_id: str, folder: Path, count: int) -> str:
    """Changes with all that the choices rest on."""
    from trappm import __version__

    encoders = [(p.name, p.stat().st_mtime_ns) for p in sorted(folder.glob("encoder-*"))]
    assigned = [(a.id, str(a.state)) for a in store.assignments.of_campaign(campaign_id)]
    rounds = [(r.number, str(r.state)) for r in store.rounds.all(campaign_id)]
    labels = store.campaigns.label_counts().get(campaign_id, 0)
    knows = (encoders, sorted(assigned), rounds, labels, sorted(store.kernels.devices().items()))
    return hashlib.sha256(repr((__version__, count, knows)).encode()).hexdigest()
