"""Completion of names in a shell."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from trappm.profiler.errors import TrappmError


def _make_completion(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a completion; it completes nothing where names cannot be read."""

    def complete(incomplete: str) -> list[str]:
        with contextlib.suppress(TrappmError, OSError, ModuleNotFoundError):
            return sorted(name for name in names() if name.startswith(incomplete))
        return []

    return complete


@_make_completion
def models() -> Iterable[str]:
    from trappm.profiler.models.known_names import registered_names

    return registered_names()


@_make_completion
def devices() -> Iterable[str]:
    from trappm.prediction.selection import read_manifests
    from trappm.profiler.devices.catalogue import card_keys

    keys = (key for manifest in read_manifests(None) for key in manifest.heads)
    return {*keys, *card_keys()}


@_make_completion
def devices_or_all() -> Iterable[str]:
    return ["all", *devices("")]


@_make_completion
def campaigns() -> Iterable[str]:
    from trappm.label_store import store_to_read

    with store_to_read() as store:
        return [campaign.id for campaign in store.campaigns.all()]


@_make_completion
def snapshots() -> Iterable[str]:
    from trappm.prediction.selection import DEFAULT_SNAPSHOT, local_registry
    from trappm.profiler.host.environment import data_folder

    if not (data_folder() / "snapshots").is_dir():
        return [DEFAULT_SNAPSHOT]
    registry = local_registry()
    return [*registry.ids(), *registry.aliases(), DEFAULT_SNAPSHOT]
