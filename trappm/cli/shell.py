"""What a shell sees of the commands: their order, their help, and how words are completed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from typer import _click as click
from typer.core import TyperGroup, TyperOption

from trappm.profiler.errors import TrappmError

ORDER = (
    "predict", "fits", "compare", "estimate", "scale", "generate", "devices",
    "measure", "campaign", "pool", "device", "labels", "snapshot", "store",
    "serve", "ui",
    "launch", "watch", "status", "report", "explain", "list", "pause", "resume", "retry", "cancel",
)  # fmt: skip
"""Commands in the order in which they are used; others stand behind, as they are defined."""


class Commands(TyperGroup):
    """Commands in the order of use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda n: ORDER.index(n) if n in ORDER else len(ORDER))


def flags_without_type() -> None:
    """Has the help print flags alone: that they are true or false is plain."""
    of_any: Callable[[TyperOption, click.Context], str | None] = TyperOption.display_type_rich

    def display(option: TyperOption, ctx: click.Context) -> str | None:
        return None if option.is_flag else of_any(option, ctx)

    TyperOption.display_type_rich = display  # type: ignore[method-assign, assignment]


def _completing(names: Callable[[str], Iterable[str]]) -> Callable[[str], list[str]]:
    """Names that begin with what was typed; none where they cannot be told: nothing may fail."""

    def complete(incomplete: str) -> list[str]:
        with contextlib.suppress(TrappmError, OSError, ModuleNotFoundError):
            return sorted(name for name in names(incomplete) if name.startswith(incomplete))
        return []

    return complete


@_completing
def models(_incomplete: str) -> Iterable[str]:
    from trappm.profiler.models.known_names import registered_names

    return registered_names()


@_completing
def devices(_incomplete: str) -> Iterable[str]:
    from trappm.prediction.snapshot_choice import manifests_that_answer
    from trappm.profiler.devices.catalogue import card_keys

    keys = (key for manifest in manifests_that_answer(None) for key in manifest.heads)
    return {*keys, *card_keys(), "all"}


@_completing
def campaigns(_incomplete: str) -> Iterable[str]:
    from trappm.label_store import store_to_read

    with store_to_read() as store:
        return [campaign.id for campaign in store.campaigns.all()]


@_completing
def snapshots(_incomplete: str) -> Iterable[str]:
    from trappm.prediction.snapshot_choice import DEFAULT, local_registry
    from trappm.profiler.host.data_folder import data_folder

    if not (data_folder() / "snapshots").is_dir():
        return [DEFAULT]
    registry = local_registry()
    return [*registry.ids(), *registry.aliases(), DEFAULT]
