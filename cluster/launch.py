"""Starting, resuming and watching a campaign from the command that asked for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from filelock import FileLock, Timeout

from cluster.campaign import Progress
from cluster.runtime import here, ray_runtime, require_nodes
from cluster.spec import CampaignSpec
from profiler.errors import CampaignError, TrappmError
from store import CampaignRecord, Home, Store

POLL_S = 0.3


def start_or_continue(store: Store, spec: CampaignSpec) -> tuple[CampaignRecord, CampaignSpec]:
    """The campaign for this spec: the unfinished one of the same spec, else a new one beside it.

    A new campaign of a name that exists gets the next seed, so that it draws and learns something
    new instead of repeating the first.
    """
    earlier = [c for c in store.campaigns() if c.name == spec.name]
    for campaign in earlier:
        old = CampaignSpec.model_validate(campaign.spec)
        if campaign.state not in {"finished", "cancelled"} and _same_work(old, spec):
            return campaign, old
    fresh = spec.model_copy(update={"seed": spec.seed + len(earlier)})
    campaign = store.create_campaign(fresh.name, fresh.model_dump(mode="json"), fresh.seed)
    return campaign, fresh


def run_campaign(
    home: Home,
    campaign_id: str,
    spec: CampaignSpec,
    *,
    address: str | None,
    watch: Callable[[Progress], None],
) -> str | None:
    """Runs a campaign to its end, or to Ctrl-C; the snapshot's id, or None when stopped.

    Raises:
        CampaignError: it runs already, or cannot go on; nothing recorded is lost.
    """
    folder = home.campaigns / campaign_id
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0), ray_runtime(address):
            return _run(home, campaign_id, spec, address, watch)
    except Timeout as error:
        raise CampaignError(
            f"campaign {campaign_id} is running in another process; "
            f"see it with: trappm campaign status {campaign_id}"
        ) from error


def _run(
    home: Home,
    campaign_id: str,
    spec: CampaignSpec,
    address: str | None,
    watch: Callable[[Progress], None],
) -> str | None:
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    from cluster.actors import CampaignActor

    if address is None:
        require_nodes(spec.devices.keys)  # a cluster may still scale up; this machine will not
    options = {**here(), "max_concurrency": 4}
    actor = ray.remote(CampaignActor).options(**options).remote(home.path, campaign_id, spec)
    running = actor.run.remote()
    seen = 0
    stopping = False
    while True:
        try:
            done, _ = ray.wait([running], timeout=POLL_S)
            state: dict[str, Any] = ray.get(actor.progress.remote(seen))
            seen += len(state["lines"])
            watch(Progress(**state))
            if done:
                snapshot_id: str | None = ray.get(running)
                return snapshot_id
        except KeyboardInterrupt:
            if stopping:
                raise  # a second Ctrl-C: leave at once, what is recorded is safe
            stopping = True
            watch(Progress(stage="stopping", lines=("stopping; Ctrl-C again to leave at once",)))
            actor.stop.remote()
        except RayTaskError as error:
            if isinstance(error.cause, TrappmError):
                raise error.cause from error
            raise CampaignError(
                f"campaign {campaign_id} failed: {error.cause!r}; nothing recorded is lost, "
                f"go on with: trappm campaign resume {campaign_id}"
            ) from error
        except RayActorError as error:
            raise CampaignError(
                f"the campaign's process died; nothing recorded is lost, go on with: "
                f"trappm campaign resume {campaign_id}"
            ) from error


def _same_work(one: CampaignSpec, other: CampaignSpec) -> bool:
    return one.model_copy(update={"seed": 0}) == other.model_copy(update={"seed": 0})
