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

from trappm.cluster.campaign.history import rule_held
from trappm.cluster.campaign.ownership import begin
from trappm.cluster.campaign.planner import check_budget, check_stop, pool_of, without_refused
from trappm.cluster.campaign.progress import Progress
from trappm.cluster.campaign.stop_rules import StopRules, deadline_passed
from trappm.cluster.ray_runtime import (
    ACCELERATOR_LABEL,
    CAMPAIGN_ACTOR,
    RayLostError,
    get,
    gpus_known_to,
    here,
    last_line,
    ray_runtime,
    require_nodes,
)
from trappm.cluster.spec import CampaignSpec, runs_nothing
from trappm.profiler.devices import meant_device, open_device
from trappm.profiler.errors import CampaignError, InputError, TrappmError
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

POLL_S = 0.3

MAX_RESTARTS = 100
"""Number of times that Ray restarts a campaign on a cluster after its process has ended.

If its node is gone, it restarts on another one, provided that the label store is PostgreSQL.
"""

ANSWER_S = 10.0
"""Seconds that a call to a campaign's process may take before it is repeated."""

SILENT_S = 300.0
"""Seconds after which a campaign's process that does not answer is not waited for any longer."""

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
    over = deadline_passed(spec.stop or StopRules(), datetime.datetime.now(datetime.UTC))
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
    devices = spec.devices.keys
    checks: list[Callable[[], object]] = [
        *(partial(_check_device, device, address) for device in devices),
        partial(check_stop, spec),
        lambda: check_budget(spec, without_refused(pool_of(spec, store), store)),
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
    elif meant_device(device) and (meant := meant_device(device, gpus_known_to(address))):
        raise InputError(
            f"no device {device!r}; did you mean {meant!r}? If it is a GPU of its own, first "
            f"start a node with the label {ACCELERATOR_LABEL}={device.upper()}"
        )


def _check_canary(spec: CampaignSpec, device: str) -> None:
    if spec.canary is not None:
        from trappm.profiler.models.sources import source_of  # imports torch and timm

        reference = spec.canary.reference_on(device).architecture
        source_of(reference).architectures([reference])


def plan_lines(spec: CampaignSpec, store: Store) -> list[str]:
    """Return what a campaign of this file would run, for people."""
    pool = without_refused(pool_of(spec, store), store)
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
    held = rule_held(store, campaign.id)
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
    """Run a campaign to its end, or to Ctrl-C.

    On a cluster the campaign does not depend on this process; one that runs already is watched.

    Raises:
        CampaignError: It runs elsewhere, or cannot continue; nothing recorded is lost.
    """
    if address is None:
        with opened_first(home) as store:
            begin(store, campaign_id)
    with ray_runtime(address), _sigterm_as_interrupt():
        return _run(home, campaign_id, spec, address, watch, detach)


def opened_first(home: Home) -> Store:
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


def _run(
    home: Home,
    campaign_id: str,
    spec: CampaignSpec,
    address: str | None,
    watch: Callable[[Progress], None],
    detach: bool,
) -> End:
    import ray

    from trappm.cluster.campaign.actor import CampaignActor

    access = StoreAccess.of(home)
    is_detached, is_bound = address is not None, access.url.startswith("sqlite")
    options = {**here(or_elsewhere=not is_bound), "max_concurrency": 4}
    if not is_detached:
        require_nodes(spec.devices.keys)  # a cluster may still scale up; this machine will not
    else:
        if is_bound:
            line = f"{ENDS_WITH_NODE}; with PostgreSQL it continues on another"
            watch(Progress(lines=(line,), line_count=1))
        _wait_for_previous(home, campaign_id, watch)
        options |= {
            "name": f"{CAMPAIGN_ACTOR}{campaign_id}",
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": MAX_RESTARTS,
        }
    actor_class = ray.remote(CampaignActor).options(**options)
    actor = actor_class.remote(home.path, access, campaign_id, spec, is_detached)
    return _follow(
        actor, campaign_id, watch, is_detached=is_detached, leave=detach,
        is_bound=is_bound and is_detached,
    )  # fmt: skip


def _wait_for_previous(home: Home, campaign_id: str, watch: Callable[[Progress], None]) -> None:
    """Wait for the campaign's previous actor to end, unless it runs the campaign.

    An actor that has ended still replies to watchers for a while, and one that was asked to stop
    needs a moment. One that does not reply for `SILENT_S` is killed: the store lets only one of
    them write. The campaign counts as running from now on, so that an order to stop holds even if
    it comes before the next actor begins.

    Raises:
        OwnedError: It runs elsewhere, on another cluster.
        CampaignError: Its earlier process has not ended for twice `SILENT_S`.
    """
    import ray
    from ray.exceptions import RayError

    begun_at = heard_at = time.monotonic()
    with opened_first(home) as store:
        while True:
            try:
                actor = ray.get_actor(f"{CAMPAIGN_ACTOR}{campaign_id}")
            except ValueError:  # there is none
                begin(store, campaign_id)
                return
            with contextlib.suppress(RayError):  # it is just ending
                status = _status(actor, "", 0)
                now = time.monotonic()
                if status is None:
                    watch(Progress(stage="waiting for its process to answer"))
                    if now - heard_at > SILENT_S:
                        ray.kill(actor)
                elif status["ended"]:
                    ray.kill(actor)
                elif store.campaigns.state(campaign_id) is CampaignState.RUNNING:
                    return
                else:
                    heard_at = now
                    watch(Progress(stage="waiting for it to stop"))
            if time.monotonic() - begun_at > 2 * SILENT_S:
                raise CampaignError(
                    f"an earlier process of campaign {campaign_id} has not ended for "
                    f"{2 * SILENT_S:.0f} s; see it with: trappm campaign status {campaign_id}; "
                    f"once it has stopped: trappm campaign resume {campaign_id}"
                )
            time.sleep(POLL_S)


def _status(actor: Any, life: str, seen: int) -> dict[str, Any] | None:
    """Return what a campaign's actor reports, or None while Ray starts it again."""
    from ray.exceptions import ActorUnavailableError, GetTimeoutError

    try:
        status: dict[str, Any] = get(actor.progress.remote(life, seen), ANSWER_S)
    except (ActorUnavailableError, GetTimeoutError):
        return None
    return status


def _follow(
    actor: Any,
    campaign_id: str,
    watch: Callable[[Progress], None],
    *,
    is_detached: bool,
    leave: bool,
    is_bound: bool = False,
) -> End:
    """Watch a campaign until it ends, or until Ctrl-C; `leave`: until it has begun.

    It continues without this process if it `is_detached`, but ends with the node of its label store
    if it `is_bound` to that.

    Raises:
        CampaignError: It failed, or its process is gone or has not replied for `SILENT_S`.
    """
    from ray.exceptions import ActorUnschedulableError, RayError, RayTaskError

    node = f"{ENDS_WITH_NODE}; " if is_bound else ""
    advice = f"nothing recorded is lost, continue with: trappm campaign resume {campaign_id}"
    life, seen = "", 0
    stopping = False
    heard_at = time.monotonic()
    while True:
        try:
            status = _status(actor, life, seen)
            now = time.monotonic()
            if status is not None:
                heard_at = now
                life, seen = status["life"], status["lines_seen"]
                watch(Progress(**status["progress"]))
                if status["ended"]:
                    return End.FINISHED if get(actor.result.remote()) else End.STOPPED
                if leave and status["begun"]:
                    return End.LEFT
            elif now - heard_at > SILENT_S:
                raise CampaignError(
                    f"the campaign's process has not answered for {SILENT_S:.0f} s; {node}{advice}"
                )
            else:
                watch(Progress(stage="waiting for its process to answer"))
            time.sleep(POLL_S)
        except KeyboardInterrupt:
            if is_detached:
                return End.LEFT
            if stopping:
                raise  # a second Ctrl-C: leave at once, what is recorded is safe
            stopping = True
            watch(Progress(stage="stopping", lines=("stopping; Ctrl-C again to leave at once",)))
            actor.stop.remote()
        except RayTaskError as error:
            if isinstance(error.cause, TrappmError):
                raise error.cause from error
            raise CampaignError(
                f"campaign {campaign_id} failed: {error.cause!r}; {advice}"
            ) from error
        except (RayError, RayLostError) as error:
            is_node_gone = isinstance(error, ActorUnschedulableError)
            why = "its node is gone" if is_node_gone else last_line(error)
            raise CampaignError(
                f"the campaign's process crashed ({why}); {node}{advice}"
            ) from error
