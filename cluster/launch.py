"""Starting, watching, stopping and retrying campaigns from a command."""

from __future__ import annotations

import contextlib
import datetime
import enum
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from trappm.cluster.campaign.process import (
    STOP_S,
    Follower,
    Progress,
    follow,
    has_live_owner,
    mark_running,
)
from trappm.cluster.campaign.rules import find_stop, stop_by_deadline
from trappm.cluster.ray_runtime import (
    ACCELERATOR_LABEL,
    CAMPAIGN_ACTOR,
    last_line,
    list_gpus,
    ray_runtime,
    require_nodes,
    this_node_options,
)
from trappm.cluster.spec import ANY_GPU, CampaignSpec, StopRules, runs_nothing
from trappm.profiler.devices import meant_device, open_device
from trappm.profiler.errors import CampaignError, InputError, TrappmError
from trappm.profiler.models.own_modules import is_own_module
from trappm.profiler.records import Outcome
from trappm.store import (
    CampaignRecord,
    CampaignState,
    Home,
    Patience,
    Store,
    StoreAccess,
)
from trappm.store.campaigns import ENDED
from trappm.store.records import Activity

POLL_S = 0.3

MAX_RESTARTS = 100
"""Number of times that Ray restarts a campaign on a cluster after its process has ended.

If its node is gone, it restarts on another one, provided that the label store is PostgreSQL.
"""

MAX_ABSENCE_S = 300.0
"""Seconds for which a campaign on a cluster may be without a process, while Ray starts it again."""

ENDS_WITH_NODE = "a campaign with its labels in SQLite ends with its node"

LOST = "lost"
"""Used in place of an outcome if no attempt came to an end."""

RETRIED = (Outcome.UNSTABLE, Outcome.ERROR, LOST)
"""Outcomes that are retried by default. Others, such as oom, would be the same again."""


class End(enum.Enum):
    """End of a command's part in a campaign."""

    FINISHED = enum.auto()
    STOPPED = enum.auto()
    """The campaign is paused or cancelled."""
    LEFT = enum.auto()
    """The campaign continues without this process."""


def start_or_continue(store: Store, spec: CampaignSpec) -> tuple[CampaignRecord, CampaignSpec]:
    """Return the unfinished campaign of this spec, or else a new one.

    A new campaign of an existing name gets the next seed, so that it does not repeat the first.

    Raises:
        InputError: A new campaign would end at once, as its deadline has passed.
    """
    over = stop_by_deadline(spec.stop or StopRules(), datetime.datetime.now(datetime.UTC))
    campaign = store.campaigns.start_or_continue(
        spec.name, spec.model_dump(mode="json"), may_create=over is None
    )
    if campaign is None:
        raise InputError(f"stop.ends_at must be in the future: {over.reason if over else ''}")
    return campaign, CampaignSpec.of(campaign)


def check_spec(store: Store, spec: CampaignSpec, address: str | None) -> None:
    """Raise the first fault, before anything is started or stored."""
    for fault in spec_faults(store, spec, address):
        raise fault


def spec_faults(store: Store, spec: CampaignSpec, address: str | None) -> Iterator[TrappmError]:
    """Yield all faults of a campaign that can be found before it starts."""
    from trappm.cluster.campaign.planner import (  # imports torch
        check_budget,
        check_stop,
        drop_refused,
        pool_of,
    )
    from trappm.learner.snapshots.registry import check_library

    devices = spec.devices.keys
    checks: list[Callable[[], object]] = [
        *(partial(_check_device, device, address) for device in devices),
        partial(_check_learner_device, spec.learner_device, address),
        *([partial(check_library, spec.registry)] if spec.registry else []),
        partial(check_stop, spec),
        lambda: check_budget(spec, drop_refused(pool_of(spec, store), store)),
        *(partial(_check_canary, spec, device) for device in devices),
    ]
    for check in checks:
        try:
            check()
        except TrappmError as error:
            yield error


def _check_device(device: str, address: str | None) -> None:
    """Raise InputError for a device that is not on this machine; on a cluster, for a misspelt one.

    A cluster may start a node of any kind, so only names that are similar to known ones are
    refused. The cluster is queried only about names that are not in the catalogue.
    """
    if address is None or runs_nothing(device):
        open_device(device)
    elif meant_device(device) and (meant := meant_device(device, list_gpus(address))):
        raise InputError(
            f"no device {device!r}; did you mean {meant!r}? If it is a GPU of its own, first "
            f"start a node with the label {ACCELERATOR_LABEL}={device.upper()}"
        )


def _check_learner_device(device: str | None, address: str | None) -> None:
    """Raise InputError for a misspelt GPU of the learner, which only clusters give it."""
    if device not in {None, ANY_GPU} and address is not None:
        _check_device(str(device), address)


def _check_canary(spec: CampaignSpec, device: str) -> None:
    if spec.canary is not None:
        from trappm.profiler.models.sources import source_of  # imports torch and timm

        reference = spec.canary.reference_on(device).architecture
        if is_own_module(reference):
            raise InputError(f"the canary is {reference}, whose code may change; name a timm model")
        source_of(reference).architectures([reference])


def plan_lines(spec: CampaignSpec, store: Store) -> list[str]:
    """Return what a campaign of this file would run, for people."""
    from trappm.cluster.campaign.planner import check_budget, drop_refused, pool_of  # imports torch

    pool = drop_refused(pool_of(spec, store), store)
    held_out = check_budget(spec, pool)
    lines = [
        f"campaign {spec.name}: {spec.total} measurements with protocol "
        f"{spec.measuring_protocol.name}, learner {spec.learner}, strategy {spec.strategy}",
        f"pool: {len(pool)} configurations of {len({c.architecture for c in pool})} architectures, "
        f"{len(held_out)} of them held out",
    ]
    for device in spec.devices.keys:
        evaluation, initial, *rounds = spec.shares(device)
        lines.append(
            f"{device}: {evaluation} evaluation, {initial} initial, {sum(rounds)} in "
            f"{len(rounds)} rounds"
        )
    if spec.stop is not None:
        given = {k: v for k, v in spec.stop.__dict__.items() if v is not None}
        lines.append(f"stop: {', '.join(f'{key} {value}' for key, value in given.items())}")
    return lines + spec.remarks


def to_resume(store: Store, campaign_id: str | None) -> CampaignRecord:
    """Return the campaign of this id, or the latest one that has not ended.

    Raises:
        InputError: There is none, or it has ended.
    """
    open_ones = [c for c in store.campaigns.all() if c.state not in ENDED]
    if campaign_id is None and open_ones:
        return open_ones[0]
    campaign = store.campaigns.get(campaign_id)
    if campaign.state in ENDED:
        raise InputError(
            f"campaign {campaign.id} is {campaign.state}; see it with: "
            f"trappm campaign report {campaign.id}"
        )
    return campaign


def order_stop(store: Store, campaign_id: str | None, state: CampaignState) -> CampaignRecord:
    """Pause or cancel a campaign, which looks at its state in the store once per second.

    Without an id it is the running one, or the latest if none runs.

    Raises:
        InputError: There is no such campaign, it has ended, or several run and none is named.
    """
    if campaign_id is None:
        running = [c.id for c in store.campaigns.all() if c.state is CampaignState.RUNNING]
        if len(running) > 1:
            raise InputError(
                f"{len(running)} campaigns run; name one of them: {', '.join(running)}"
            )
        campaign_id = running[0] if running else None
    campaign = store.campaigns.get(campaign_id)
    store.owners.stop_campaign(campaign.id, state)
    return store.campaigns.get(campaign.id)


def order_retry(
    store: Store, campaign_id: str | None, outcomes: Sequence[str] = RETRIED
) -> tuple[CampaignRecord, int]:
    """Reopen assignments that ended without a label; by default of the latest campaign.

    Their last attempts had one of these outcomes, or "lost" if no attempt ended. Returns the
    campaign, which is paused if it had finished, and the number of reopened assignments.

    Raises:
        InputError: No such campaign or outcome; the campaign was cancelled, is running, or was
            ended by a stop rule.
    """
    for outcome in outcomes:
        if outcome not in {LOST, *Outcome} - {Outcome.OK}:
            known = ", ".join([*(str(o) for o in Outcome if o is not Outcome.OK), LOST])
            raise InputError(f"Unknown outcome {outcome!r}. Expected one of: {known}")
    campaign = store.campaigns.get(campaign_id)
    held = find_stop(store, campaign.id)
    if held is not None:
        raise InputError(
            f"campaign {campaign.id} was ended by its stop rule ({held.rule}: {held.reason}), and "
            "measures no more; launch it with another rule: its labels are taken over"
        )
    count = sum(
        store.assignments.reopen(campaign.id, None if outcome == LOST else Outcome(outcome))
        for outcome in outcomes
    )
    return store.campaigns.get(campaign.id), count


def run_campaign(
    home: Home,
    campaign_id: str,
    spec: CampaignSpec,
    *,
    address: str | None,
    watch: Callable[[Progress], None],
    detach: bool = False,
) -> End:
    """Start a campaign and follow it to its end, or to Ctrl-C.

    On a cluster the campaign does not depend on this process; one that runs already is followed.

    Raises:
        CampaignError: It runs elsewhere, or cannot continue; nothing recorded is lost.
    """
    with open_store(home) as store, _sigterm_as_interrupt():
        if address is None:
            mark_running(store, campaign_id, lambda stage: watch(Progress(Activity(stage=stage))))
        follower = Follower(store, campaign_id)
        with ray_runtime(address):
            actor = _start_actor(store, home, campaign_id, spec, address, watch)
            return _follow(
                store, follower, actor, watch, is_detached=address is not None, until_begun=detach
            )


def open_store(home: Home) -> Store:
    """Open the store for a command that begins; wait while the database is away.

    Raises:
        StoreAccessError: Its address or password is wrong, or it is not a store of this version.
        StoreError: It did not come back in time.
    """
    return Patience()(partial(Store.open, home.database_url))


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let `kill` and `timeout` stop the campaign in the block as Ctrl-C does."""

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _start_actor(
    store: Store,
    home: Home,
    campaign_id: str,
    spec: CampaignSpec,
    address: str | None,
    watch: Callable[[Progress], None],
) -> Any:
    """Return the campaign's actor, which runs; on a cluster it may have been there before."""
    import ray

    from trappm.cluster.campaign.actor import CampaignActor

    access = StoreAccess.of(home)
    is_detached, is_bound = address is not None, access.url.startswith("sqlite")
    options = {**this_node_options(soft=not is_bound), "max_concurrency": 4}
    if not is_detached:
        require_nodes(spec.devices.keys)  # a cluster may still scale up; this machine will not
    else:
        if (there := _find_running_actor(store, campaign_id, watch)) is not None:
            return there
        options |= {
            "name": f"{CAMPAIGN_ACTOR}{campaign_id}",
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": MAX_RESTARTS,
        }
        if is_bound:
            line = f"{ENDS_WITH_NODE}; with PostgreSQL it continues on another"
            store.campaigns.log_event(campaign_id, "news", {"message": line})
    actor_class = ray.remote(CampaignActor).options(**options)
    return actor_class.remote(home.path, access, campaign_id, spec, is_detached)


def _find_running_actor(
    store: Store, campaign_id: str, watch: Callable[[Progress], None]
) -> Any | None:
    """Return the actor that runs the campaign; None if there is none, and a new one may begin.

    One that was asked to stop needs a moment. The campaign counts as running from now on, so that
    an order to stop holds even if it comes before the next actor begins.

    Raises:
        OwnedError: It runs elsewhere, on another cluster.
    """
    import ray

    begun_at = time.monotonic()
    while True:
        try:
            actor = ray.get_actor(f"{CAMPAIGN_ACTOR}{campaign_id}")
        except ValueError:  # there is none
            mark_running(store, campaign_id, lambda stage: watch(Progress(Activity(stage=stage))))
            return None
        campaign = store.campaigns.get(campaign_id)
        if campaign.state is CampaignState.RUNNING and has_live_owner(campaign):
            return actor
        if campaign.owner is None or time.monotonic() - begun_at > 2 * STOP_S:
            ray.kill(actor)  # it has ended, or does not answer; only an owner can write
        watch(Progress(Activity(stage="waiting for it to stop")))
        time.sleep(POLL_S)


def _follow(
    store: Store,
    follower: Follower,
    actor: Any,
    watch: Callable[[Progress], None],
    *,
    is_detached: bool,
    until_begun: bool,
) -> End:
    """Follow a campaign until it ends, or until Ctrl-C.

    Raises:
        CampaignError: It failed, or its process is gone.
    """
    campaign_id, ended, stopping = follower.id, actor.wait_for_end.remote(), False
    check = partial(_raise_failure, ended, campaign_id, is_detached=is_detached)
    while True:
        try:
            campaign = follow(
                follower, watch, silent_s=MAX_ABSENCE_S, until_begun=until_begun, check=check
            )
            break
        except KeyboardInterrupt:
            if is_detached:
                return End.LEFT
            if stopping:
                raise  # a second Ctrl-C: leave at once, what is recorded is safe
            stopping = True
            lines = ("stopping; Ctrl-C again to leave at once",)
            watch(Progress(Activity(stage="stopping"), lines))
            store.owners.stop_campaign(campaign_id, CampaignState.PAUSED)
    if campaign.state is CampaignState.FAILED:
        why = store.campaigns.events(campaign_id, kind=CampaignState.FAILED, last=1)
        raise CampaignError(str(why[-1].message["message"]) if why else "it failed")
    if campaign.state is CampaignState.RUNNING:
        return End.LEFT
    return End.FINISHED if campaign.state is CampaignState.FINISHED else End.STOPPED


def _raise_failure(ended: Any, campaign_id: str, *, is_detached: bool) -> None:
    """Raise what ended the campaign's process; that of a cluster is started again by Ray."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    if not ray.wait([ended], timeout=0)[0]:
        return
    try:
        ray.get(ended)
    except RayTaskError as error:
        if isinstance(error.cause, TrappmError):
            raise error.cause from error
        raise CampaignError(f"campaign {campaign_id} failed: {error.cause!r}") from error
    except RayError as error:
        if not is_detached:
            raise CampaignError(
                f"the campaign's process crashed ({last_line(error)}); nothing recorded is lost, "
                f"continue with: trappm campaign resume {campaign_id}"
            ) from error
