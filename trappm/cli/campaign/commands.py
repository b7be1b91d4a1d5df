"""`trappm campaign`: launch, resume, watch, pause, cancel, retry, list, status and report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trappm.cli import shell
from trappm.cli.campaign import explain
from trappm.cli.options import AsJson, print_json
from trappm.profiler.errors import InputError

if TYPE_CHECKING:
    from trappm.cluster.spec import CampaignSpec
    from trappm.reports.campaign_facts import CampaignFacts
    from trappm.store import Home

app = typer.Typer(
    help="Launch labelling campaigns and follow them.",
    no_args_is_help=True,
    cls=shell.Commands,
    epilog="Example: trappm campaign launch --preset laptop",
)

app.command(epilog="Example: trappm campaign explain --png map.png")(explain.explain)

Address = Annotated[
    str | None,
    typer.Option(help="A running Ray cluster, such as auto; by default Ray starts here."),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="With --address: leave it to the cluster at once.")
]
CampaignId = Annotated[
    str | None,
    typer.Argument(
        metavar="CAMPAIGN",
        help="Its id; the latest one by default.",
        autocompletion=shell.campaigns,
    ),
]


@app.command(epilog="Example: trappm campaign launch --preset laptop")
def launch(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A campaign file (YAML).")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="A campaign file that ships with TraPPM: laptop or transformers."),
    ] = None,
    address: Address = None,
    detach: Detach = False,
) -> None:
    """Run a campaign: measure, learn, publish a snapshot.

    An unfinished campaign of the same file goes on; beside a finished one a new one starts.
    """
    if (file is None) == (preset is None):
        raise InputError("name one of a campaign file or --preset; for example --preset laptop")
    from trappm.store import Home

    home = Home.open()
    from trappm.cluster.launch import check_spec, opened_first, start_or_continue
    from trappm.cluster.spec import load_preset, load_spec

    spec = load_spec(file) if file is not None else load_preset(str(preset))
    with opened_first(home) as store:
        try:
            check_spec(store, spec, address)
            campaign, spec = start_or_continue(store, spec)
        except InputError as error:
            raise InputError(f"{file or f'preset {preset}'}: {error}") from error
    _run(home, campaign.id, spec, address, detach)


@app.command(epilog="Example: trappm campaign validate my-campaign.yaml")
def validate(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="A campaign file (YAML).")
    ] = None,
    address: Address = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of campaign files, and end.")
    ] = False,
) -> None:
    """Check a campaign file and show what it would run; nothing is started."""
    if schema:
        from trappm.cluster.file_reference import json_schema

        print_json(json_schema())
        return
    if file is None:
        raise InputError("name a campaign file, or give --schema")
    from trappm.cluster.launch import plan_lines, spec_faults
    from trappm.cluster.spec import load_spec
    from trappm.cluster.yaml_file import FileFaultsError
    from trappm.label_store import store_or_none_yet
    from trappm.store import Home

    try:
        spec = load_spec(file)
        with store_or_none_yet(Home.find()) as store:
            faults = spec_faults(store, spec, address)
            lines = [] if faults else plan_lines(spec, store)
    except FileFaultsError as error:
        faults = list(error.faults)
    for fault in faults:
        typer.echo(f"{file}: {fault}", err=True)
    if faults:
        raise typer.Exit(2)
    for line in lines:
        typer.echo(line)


@app.command(epilog="Example: trappm campaign resume")
def resume(campaign_id: CampaignId = None, address: Address = None, detach: Detach = False) -> None:
    """Go on with a campaign that was stopped or killed; no label is lost or measured twice."""
    from trappm.store import Home

    home = Home.open()
    from trappm.cluster.launch import opened_first, to_resume
    from trappm.cluster.spec import spec_of

    with opened_first(home) as store:
        campaign = to_resume(store, campaign_id)
    _run(home, campaign.id, spec_of(campaign), address, detach)


@app.command(epilog="Example: trappm campaign watch")
def watch(
    campaign_id: CampaignId = None,
    once: Annotated[bool, typer.Option("--once", help="Tell how it is now, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Follow a campaign that runs, on this machine or a cluster: rates, errors, time to go."""
    from trappm.label_store import store_to_read
    from trappm.reports import live_campaign
    from trappm.reports.campaign_facts import campaign_facts
    from trappm.store import Home

    home = Home.find()
    with store_to_read(home) as store:
        campaign = store.campaigns.get(campaign_id)
        if as_json:
            print_json(campaign_facts(store, campaign.id).to_json())
        else:
            live_campaign.watch(store, campaign.id, once=once)


@app.command(epilog="Example: trappm campaign pause")
def pause(
    campaign_id: Annotated[
        str | None,
        typer.Argument(
            metavar="CAMPAIGN",
            help="Its id; by default the one that runs.",
            autocompletion=shell.campaigns,
        ),
    ] = None,
) -> None:
    """Have a campaign stop, wherever it runs; `resume` goes on with it."""
    _stop(campaign_id, "paused", "it stops within seconds; go on with: trappm campaign resume")


@app.command(epilog="Example: trappm campaign cancel 1a2b3c4d")
def cancel(
    campaign_id: Annotated[
        str, typer.Argument(metavar="CAMPAIGN", help="Its id.", autocompletion=shell.campaigns)
    ],
) -> None:
    """End a campaign for good; its labels are kept."""
    _stop(campaign_id, "cancelled", "its labels are kept; see them with: trappm campaign report")


@app.command(epilog="Example: trappm campaign retry --outcome error")
def retry(
    campaign_id: CampaignId = None,
    outcome: Annotated[
        str | None,
        typer.Option(
            help="Only those whose last attempt ended so, such as timeout "
            "(default: unstable, error and lost)."
        ),
    ] = None,
) -> None:
    """Open configurations without a label again; the next `resume` measures them."""
    from trappm.cluster.launch import RETRIED, order_retry
    from trappm.store import Home, Store

    with Store.open(Home.open().database_url) as store:
        outcomes = RETRIED if outcome is None else (outcome,)
        campaign, count = order_retry(store, campaign_id, outcomes)
    if not count:
        typer.echo(
            f"Campaign {campaign.id} has no configuration to retry (last outcome: "
            f"{', '.join(outcomes)}). See all outcomes with: trappm campaign status {campaign.id}"
        )
        return
    typer.echo(
        f"{count} assignments wait again; measure them with: trappm campaign resume {campaign.id}"
    )


@app.command("list", epilog="Example: trappm campaign list")
def list_campaigns(as_json: AsJson = False) -> None:
    """List all campaigns, the latest first."""
    from trappm.label_store import store_or_none_yet
    from trappm.reports.campaign_facts import campaign_rows
    from trappm.reports.campaign_report import print_campaigns
    from trappm.store import Home

    home = Home.find()
    with store_or_none_yet(home) as store:
        rows = campaign_rows(store)
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        print_campaigns(rows)


@app.command(epilog="Example: trappm campaign status")
def status(campaign_id: CampaignId = None, as_json: AsJson = False) -> None:
    """Tell where a campaign stands: assignments, outcomes, errors by round, last events."""
    from trappm.reports.campaign_report import print_status

    _show(campaign_id, as_json, print_status)


@app.command("report", epilog="Example: trappm campaign report")
def show_report(campaign_id: CampaignId = None, as_json: AsJson = False) -> None:
    """Show what a campaign found: labels, errors, transfer, predicted against measured, canary."""
    from trappm.reports.campaign_report import print_report

    _show(campaign_id, as_json, print_report)


def _show(
    campaign_id: str | None, as_json: bool, for_people: Callable[[CampaignFacts], None]
) -> None:
    from trappm.label_store import store_or_none_yet
    from trappm.reports.campaign_facts import campaign_facts
    from trappm.store import Home

    with store_or_none_yet(Home.find()) as store:
        facts = campaign_facts(store, store.campaigns.get(campaign_id).id)
    if as_json:
        print_json(facts.to_json())
    else:
        for_people(facts)


def _stop(campaign_id: str | None, state: str, next_step: str) -> None:
    from trappm.cluster.launch import order_stop
    from trappm.store import CampaignState, Home, Store

    with Store.open(Home.open().database_url) as store:
        campaign = order_stop(store, campaign_id, CampaignState(state))
    typer.echo(f"campaign {campaign.id} is {state}: {next_step} {campaign.id}")


def _run(
    home: Home, campaign_id: str, spec: CampaignSpec, address: str | None, detach: bool
) -> None:
    from trappm.cluster.launch import End, run_campaign
    from trappm.label_store import store_to_read
    from trappm.reports.campaign_facts import campaign_facts
    from trappm.reports.campaign_report import print_report
    from trappm.terminal.campaign_display import Display

    with Display(campaign_id, spec) as display:
        end = run_campaign(
            home, campaign_id, spec, address=address, watch=display.show, detach=detach
        )
    if end is End.LEFT:
        typer.echo(
            f"\nThe campaign goes on by itself. See it with: trappm campaign watch {campaign_id}; "
            f"stop it with: trappm campaign pause {campaign_id}"
        )
        return
    if end is End.STOPPED:
        typer.echo(f"\nStopped; go on with: trappm campaign resume {campaign_id}")
        raise typer.Exit(130)
    with store_to_read(home) as store:
        print_report(campaign_facts(store, campaign_id))
