"""Read-only JSON API of the page over the label store and the registry.

Every response is bounded: rows come in pages.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_type_hints

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response

from trappm.extensions.web.page import facts
from trappm.label_store import MAX_PAGE, store_or_none_yet
from trappm.prediction.selection import ONLY_MEASURED
from trappm.profiler.devices.catalogue import card_keys
from trappm.profiler.errors import InputError
from trappm.profiler.models.known_names import registered_names
from trappm.profiler.records import StepSettings
from trappm.store import Home, LabelFilter

router = APIRouter(prefix="/api", tags=["page"])

Page = Annotated[int, Query(ge=1, le=10_000)]
Size = Annotated[int, Query(ge=1, le=MAX_PAGE)]
ShortText = Annotated[str | None, Query(max_length=200)]


Wanted = Annotated[LabelFilter, Depends(LabelFilter)]


@router.get("/campaigns")
def list_campaigns() -> dict[str, Any]:
    """Return all campaigns, the latest first."""
    with store_or_none_yet(Home.find()) as store:
        return {"campaigns": facts.campaigns(store)}


@router.get("/campaigns/{campaign_id}")
def show_campaign(campaign_id: str) -> dict[str, Any]:
    """Return the progress of a campaign: pace, errors by round, budget, workers, events."""
    with store_or_none_yet(Home.find()) as store:
        return facts.campaign(store, campaign_id)


@router.get("/labels")
def list_labels(
    wanted: Wanted,
    sort: ShortText = "architecture",
    columns: ShortText = None,
    page: Page = 1,
    size: Size = 50,
) -> dict[str, Any]:
    """Return one page of the labels (with an outcome: attempts) that match the filter."""
    with store_or_none_yet(Home.find()) as store:
        return facts.labels(
            store, wanted, sort=sort or "architecture", columns=columns, page=page, size=size
        )


@router.get("/labels/names")
def names_of_labels() -> dict[str, Any]:
    """Return the names and settings for the filter fields."""
    with store_or_none_yet(Home.find()) as store:
        return facts.label_names(store)


@router.get("/labels/download/{kind}")
def download_labels(
    kind: Literal["csv", "json"],
    wanted: Wanted,
    sort: ShortText = "architecture",
    columns: ShortText = None,
) -> Response:
    """Return all labels that match the filter as a file."""
    with store_or_none_yet(Home.find()) as store:
        text = facts.labels_file(
            store, wanted, sort=sort or "architecture", columns=columns, kind=kind
        )
    media = "text/csv" if kind == "csv" else "application/json"
    disposition = f'attachment; filename="labels.{kind}"'
    return Response(text, media_type=media, headers={"Content-Disposition": disposition})


@router.get("/labels/{label_id}")
def show_label(label_id: int) -> dict[str, Any]:
    """Return the raw samples, attempts and environment of one label."""
    if not 0 < label_id < 2**63:
        raise InputError(f"no label has the id {label_id}; see: trappm labels query")
    with store_or_none_yet(Home.find()) as store:
        return facts.label(store, label_id)


@router.get("/snapshots")
def list_snapshots() -> dict[str, Any]:
    """Return all snapshots of this machine, the latest first, and the shipped one."""
    return {"snapshots": facts.snapshots()}


@router.get("/snapshots/{name}")
def show_snapshot(name: str) -> dict[str, Any]:
    """Return a snapshot's manifest, and its errors by head and by family."""
    with store_or_none_yet(Home.find()) as store:
        return facts.snapshot(store, name)


@router.get("/models")
def list_models() -> dict[str, Any]:
    """Return the timm names for autocompletion."""
    return {"models": sorted(registered_names())}


@router.get("/devices")
def list_devices() -> dict[str, Any]:
    """Return all GPUs of the catalogue, the choices of a step's settings, and reasons by phase."""
    kinds = get_type_hints(StepSettings)
    return {
        "cards": card_keys(),
        "settings": {name: [*kind] for name, kind in kinds.items()},
        "only_measured": ONLY_MEASURED,
    }
