"""`trappm campaign`: launch, status, report, pause, resume, cancel and validate."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trappm.cli import shell
from trappm.cli.options import AsJson, print_json
from trappm.profiler.errors import InputError, TrappmError, one_line

if TYPE_CHECKING:
    from trappm.cluster.spec import CampaignSpec
    from trappm.store import Home, Store

app = typer.Typer(
    help="Launch labelling campaigns and follow them.",
    no_args_is_help=True,
    epilog="Example: trappm campaign launch --preset laptop",
)

Address = Annotated[
    str | None,
    typer.Option(help="Address of a running Ray cluster, such as auto (default: start Ray here)."),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Leave the campaign to the cluster; needs --address.")
]


def _campaign(text: str) -> Any:
    return typer.Argument(metavar="CAMPAIGN", help=text, autocompletion=shell.campaigns)


CampaignId = Annotated[str | None, _campaign("Campaign id (default: the latest).")]
File = Annotated[Path | None, typer.Argument(metavar="FILE", help="Campaign file (YAML).")]


@app.command(epilog="Example: trappm campaign launch --preset laptop")
def launch(
    file: File = None,
    preset: Annotated[
        str | None,
        typer.Option(help="Campaign file of TraPPM: compile, gpu, laptop, paper or transformers."),
    ] = None,
    address: Address = None,
    detach: Detach = False,
) -> None:
    """Run a campaign: measure, learn, publish a snapshot.

    An unfinished campaign of the same file is continued. If it has finished, a new one starts.
    A campaign whose learner is a network ends with a comparison with the default learner.
    """
    if (file is None) == (preset is None):
        raise InputError("name one of a campaign file or --preset; for example --preset laptop")
    from trappm.store import Home

    home = Home.open()
    from trappm.cluster.spec import load_preset, load_spec

    spec = load_spec(file) if file is not None else load_preset(str(preset))
    from trappm.cluster.campaign.planner import with_whole_pool
    from trappm.cluster.launch import check_spec, open_store, start_or_continue

    with open_store(home) as store:
        try:
            spec = with_whole_pool(spec, store)
            check_spec(store, spec, address)
            campaign, spec = start_or_continue(store, spec)
        except InputError as error:
            raise InputError(f"{file or f'preset {preset}'}: {error}") from error
    _run_and_report(home, campaign.id, spec, address, detach)


@app.command(epilog="Example: trappm campaign status --follow")
def status(
    campaign_id: Annotated[
        str | None,
        _campaign("Campaign id (default: list all campaigns; with --follow, the latest)."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Update the display until the campaign ends.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List all campaigns, or show the progress, errors and cost of one.

    The campaign may run on this machine or on a cluster. Ctrl-C ends the display only.
    """
    if follow and as_json:
        raise InputError("--follow and --json exclude each other; drop one")
    from trappm.label_store import store_or_none_yet
    from trappm.store import Home

    with store_or_none_yet(Home.find()) as store:
        is_list = campaign_id is None and not follow
        name = "" if is_list else store.campaigns.get(campaign_id).id
        from trappm.reports import campaign_report
        from trappm.reports.campaign_facts import campaign_facts, campaign_rows

        if is_list:
            rows = campaign_rows(store)
            if as_json:
                print_json([asdict(row) for row in rows])
            else:
                campaign_report.print_campaigns(rows)
            return
        if as_json:
            print_json(campaign_facts(store, name).to_json())
        elif follow:
            _follow(store, name)
            campaign_report.print_status(campaign_facts(store, name))
        else:
            campaign_report.print_status(campaign_facts(store, name))


@app.command(epilog="Example: trappm campaign report --choices --count 5")
def report(
    campaign_id: CampaignId = None,
    choices: Annotated[
        bool,
        typer.Option("--choices", help="Show which configurations were chosen, and why."),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device of --choices (default: the source).",
            autocompletion=shell.devices,
        ),
    ] = None,
    count: Annotated[
        int,
        typer.Option(min=1, max=1000, help="Number of --choices."),
    ] = 10,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="LEARNER",
            help="Train this learner on the same labels, such as laptop, and show the errors of "
            "both by number of labels.",
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, max=20, help="Trainings of --compare with other seeds on the same labels."
        ),
    ] = 1,
    png: Annotated[
        Path | None, typer.Option(help="Draw the errors of --compare into this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a campaign found: labels, errors, transfer, predicted against measured, canary."""
    if not choices and device is not None:
        raise InputError("--device needs --choices")
    if choices and compare is not None:
        raise InputError("--choices and --compare exclude each other; drop one")
    if compare is None and (png is not None or seeds != 1):
        raise InputError("--png and --seeds need --compare")
    if png is not None:
        from trappm.terminal.plots import require_matplotlib

        require_matplotlib("--png")
        if not png.parent.is_dir():
            raise InputError(f"there is no folder {png.parent} for --png; make it first")
    from trappm.label_store import store_or_none_yet
    from trappm.store import Home

    with store_or_none_yet(Home.find()) as store:
        name = store.campaigns.get(campaign_id).id
        if compare is not None:
            _compare(Home.find(), store, name, compare, seeds=seeds, png=png, as_json=as_json)
            return
        from trappm.reports.campaign_facts import campaign_facts
        from trappm.reports.campaign_report import print_report
        from trappm.reports.choices import choices_of, print_choices

        if not choices:
            facts = campaign_facts(store, name)
            if as_json:
                print_json(facts.to_json())
            else:
                print_report(facts)
            return
        chosen = choices_of(store, name, device=device, count=count)
    if as_json:
        print_json(asdict(chosen))
    else:
        print_choices(chosen)


@app.command(epilog="Example: trappm campaign pause")
def pause(
    campaign_id: Annotated[
        str | None, _campaign("Campaign id (default: the running campaign).")
    ] = None,
) -> None:
    """Stop a campaign, wherever it runs; `resume` continues it."""
    next_step = "it stops within a minute; continue (on a cluster with --address auto) with: "
    _stop(campaign_id, "paused", f"{next_step}trappm campaign resume")


@app.command(epilog="Example: trappm campaign resume --retry-failed")
def resume(
    campaign_id: CampaignId = None,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed", help="Also measure configurations again that have no label."
        ),
    ] = False,
    outcome: Annotated[
        str | None,
        typer.Option(
            help="Outcome of the last attempt that --retry-failed selects, such as timeout "
            "(default: unstable, error and lost)."
        ),
    ] = None,
    address: Address = None,
    detach: Detach = False,
) -> None:
    """Continue a campaign that was paused or interrupted; nothing is measured twice."""
    if outcome is not None and not retry_failed:
        raise InputError("--outcome needs --retry-failed")
    from trappm.store import Home

    home = Home.open()
    from trappm.cluster.launch import RETRIED, open_store, order_retry, to_resume
    from trappm.cluster.spec import CampaignSpec
    from trappm.store import CampaignState

    with open_store(home) as store:
        if retry_failed:
            outcomes = RETRIED if outcome is None else (outcome,)
            campaign, count = order_retry(store, campaign_id, outcomes)
            if not count and campaign.state is CampaignState.FINISHED:
                typer.echo(
                    f"Campaign {campaign.id} has no configuration to retry (last outcome: "
                    f"{', '.join(outcomes)}). See all outcomes with: "
                    f"trappm campaign status {campaign.id}"
                )
                return
            typer.echo(f"{count} assignments are measured again")
            campaign_id = campaign.id
        campaign = to_resume(store, campaign_id)
    _run_and_report(home, campaign.id, CampaignSpec.of(campaign), address, detach)


@app.command(epilog="Example: trappm campaign cancel 1a2b3c4d")
def cancel(
    campaign_id: Annotated[str, _campaign("Campaign id.")],
) -> None:
    """End a campaign for good; its labels are kept."""
    _stop(
        campaign_id, "cancelled", "it measures no more; see its labels with: trappm campaign report"
    )


@app.command(epilog="Example: trappm campaign validate my-campaign.yaml")
def validate(
    file: File = None,
    address: Address = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of campaign files and exit.")
    ] = False,
) -> None:
    """Check a campaign file and show what it would run; nothing is started."""
    if schema:
        from trappm.cluster.file_reference import json_schema

        print_json(json_schema())
        return
    if file is None:
        raise InputError("name a campaign file, or give --schema")
    from trappm.cluster.spec import FileFaultsError, load_spec
    from trappm.label_store import store_or_none_yet
    from trappm.store import Home

    try:
        spec = load_spec(file)
        from trappm.cluster.campaign.planner import with_whole_pool  # imports torch
        from trappm.cluster.launch import plan_lines, spec_faults

        with store_or_none_yet(Home.find()) as store:
            spec = with_whole_pool(spec, store)
            faults = [str(fault) for fault in spec_faults(store, spec, address)]
            lines = [] if faults else plan_lines(spec, store)
    except FileFaultsError as error:
        faults = list(error.faults)
    for fault in faults:
        typer.echo(f"{file}: {fault}", err=True)
    if faults:
        raise typer.Exit(2)
    for line in lines:
        typer.echo(line)


def _stop(campaign_id: str | None, state: str, next_step: str) -> None:
    from trappm.cluster.launch import order_stop
    from trappm.store import CampaignState, Home, Store

    with Store.open(Home.open().database_url) as store:
        campaign = order_stop(store, campaign_id, CampaignState(state))
    typer.echo(f"campaign {campaign.id} is {state}: {next_step} {campaign.id}")


def _follow(store: Store, campaign_id: str) -> None:
    """Show the progress of a campaign until its process has ended; a file gets only its status."""
    from trappm.cluster.campaign.process import Follower, follow, has_live_owner
    from trappm.cluster.launch import MAX_ABSENCE_S
    from trappm.cluster.spec import CampaignBudget
    from trappm.terminal.progress_bars import CampaignDisplay
    from trappm.terminal.tables import console

    campaign = store.campaigns.get(campaign_id)
    if not (has_live_owner(campaign) and console().is_terminal):
        return
    budget = CampaignBudget.of(campaign)
    with CampaignDisplay(campaign.id, budget, campaign.name, campaign.seed) as display:
        follow(Follower(store, campaign.id), display.show, silent_s=MAX_ABSENCE_S)


def _run_and_report(
    home: Home, campaign_id: str, spec: CampaignSpec, address: str | None, detach: bool
) -> None:
    from trappm.cluster.launch import End, run_campaign
    from trappm.label_store import store_to_read
    from trappm.reports.campaign_facts import campaign_facts
    from trappm.reports.campaign_report import print_report
    from trappm.terminal.progress_bars import CampaignDisplay

    if detach and address is None:
        raise InputError("--detach needs --address; without a cluster Ray ends with this command")
    with CampaignDisplay(campaign_id, spec, spec.name, spec.seed) as display:
        end = run_campaign(
            home, campaign_id, spec, address=address, watch=display.show, detach=detach
        )
    if end is End.LEFT:
        typer.echo(
            f"\nThe campaign continues on the cluster. Follow it with: trappm campaign status "
            f"{campaign_id} --follow; stop it with: trappm campaign pause {campaign_id}"
        )
        return
    if end is End.STOPPED:
        typer.echo(f"\nStopped; continue with: trappm campaign resume {campaign_id}")
        raise typer.Exit(130)
    with store_to_read(home) as store:
        facts = campaign_facts(store, campaign_id)
        print_report(facts)
        from trappm.learner.paper.presets import LAPTOP, preset_named

        has_heads = any(report.devices for _, report in facts.trained)
        if has_heads and not preset_named(spec.learner).head.physical_prior:
            png = home.campaigns / campaign_id / "errors_by_labels.png"
            try:
                png.parent.mkdir(parents=True, exist_ok=True)
                _compare(home, store, campaign_id, LAPTOP.name, png=png)
            except (TrappmError, OSError) as error:  # the campaign has ended well
                typer.echo(
                    f"the comparison with {LAPTOP.name} failed ({one_line(error)}); repeat it: "
                    f"trappm campaign report {campaign_id} --compare {LAPTOP.name}",
                    err=True,
                )


def _compare(
    home: Home,
    store: Store,
    campaign_id: str,
    learner: str,
    *,
    seeds: int = 1,
    png: Path | None = None,
    as_json: bool = False,
) -> None:
    """Show the errors of a campaign's learner and of another one by number of labels."""
    from trappm.cluster.campaign.learner_comparison import compare_learners
    from trappm.reports.learner_comparison import draw_png, print_comparison
    from trappm.terminal.plots import require_matplotlib
    from trappm.terminal.progress_bars import ProgressLine

    with ProgressLine() as progress:
        made = compare_learners(store, home, campaign_id, learner, seeds=seeds, watch=progress.show)
    if as_json:
        print_json(asdict(made))
    else:
        print_comparison(made)
    if png is None:
        return
    require_matplotlib("The plot as a file")
    draw_png(made, png)
    typer.echo(f"Plot: {png}", err=as_json)
