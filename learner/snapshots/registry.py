"""A registry of snapshots: immutable versions by content, and names that move, on any fsspec place.

    <location>/<id>/manifest.json, *.safetensors     one version; there once its manifest is
               aliases/<name>/<time>-<id>.json       one entry for each time that a name was moved

A location is a folder, or a URL such as s3://bucket/path. Every file is written under another name
and then moved, a version's manifest last and its removal first; an alias is a log that only grows.
So whatever is killed at any moment, what can be seen is whole, and the same command goes on.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import fsspec

from trappm.learner.snapshots.manifest import (
    ID,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    NAME,
    STALE_S,
    check_file,
    checked_manifest,
    damaged,
    manifest_bytes,
    read_whole,
    write_folder,
)
from trappm.learner.snapshots.manifest_fields import Manifest
from trappm.profiler.errors import SnapshotError, one_line

ALIASES = "aliases"
LATEST = "latest"
_PART = ".part-"
_STAMP = "%Y%m%dT%H%M%S%fZ"
_ENTRY_BYTES = 64 << 10


@dataclass(frozen=True)
class AliasEntry:
    """One move of an alias."""

    name: str
    """Of the entry; entries sort by when they were made."""
    snapshot: str
    at: str
    why: str
    restores: str | None = None
    """The entry that a rollback went back to."""


class Registry:
    """A registry of snapshots at one location: a folder or a URL."""

    def __init__(self, location: str | Path) -> None:
        """Raises SnapshotError for a location that cannot be reached."""
        self.location = without_secrets(str(location))
        with self._reaching():
            self._fs, root = fsspec.url_to_fs(str(location))
        self._root = root.rstrip("/")

    # What is there.

    def ids(self) -> list[str]:
        """The ids of all whole versions."""
        return sorted(
            name
            for name in self._names(self._root)
            if ID.fullmatch(name) and self._exists(f"{self._root}/{name}/{MANIFEST}")
        )

    def manifest(self, snapshot_id: str) -> Manifest:
        """A version's manifest, checked.

        Raises:
            SnapshotError: there is none, it is damaged, or it is another version's.
        """
        place = f"{self.location}/{snapshot_id}"
        data = self._read(f"{self._root}/{snapshot_id}/{MANIFEST}", MAX_MANIFEST_BYTES, place)
        manifest = checked_manifest(data, place)
        if manifest.id != snapshot_id:
            raise SnapshotError(
                f"{place} holds snapshot {manifest.id}, under another one's name; "
                "remove it, or give it its own name back"
            )
        return manifest

    def contents(self, snapshot_id: str) -> tuple[Manifest, dict[str, bytes]]:
        """Manifest and files of a version, every byte checked.

        Raises:
            SnapshotError: as `manifest`, or a file that is missing, damaged or too large.
        """
        place = f"{self.location}/{snapshot_id}"
        manifest = self.manifest(snapshot_id)
        files = {}
        for name, entry in manifest.files.items():
            files[name] = self._read(f"{self._root}/{snapshot_id}/{name}", entry.bytes, place)
            check_file(name, entry, files[name], place)
        return manifest, files

    def is_whole(self, snapshot_id: str) -> bool:
        """Whether a version is there, every byte as it should be."""
        try:
            self.contents(snapshot_id)
        except SnapshotError:
            return False
        return True

    def resolve(self, name: str) -> str:
        """The id that an alias, an id or its unambiguous beginning means.

        Raises:
            SnapshotError: it means none, or more than one.
        """
        moves = self._moves(name) if NAME.fullmatch(name) else []
        if moves:
            return _snapshot_of(moves[-1])
        ids = self.ids()
        matching = (
            [name] if name in ids else [i for i in ids if len(name) >= 4 and i.startswith(name)]
        )
        if len(matching) == 1:
            return matching[0]
        known = [*self.aliases(), *ids]
        none = "it holds none yet; trappm snapshot push publishes one"
        there = f"there are: {', '.join(known)}" if known else none
        if matching:
            raise SnapshotError(f"{name!r} is the beginning of several snapshots; {there}")
        raise SnapshotError(f"no snapshot {name!r} in {self.location}; {there}")

    def aliases(self) -> dict[str, str]:
        """Snapshot ids by alias."""
        moves = {name: self._moves(name) for name in self._names(f"{self._root}/{ALIASES}")}
        return {name: _snapshot_of(names[-1]) for name, names in sorted(moves.items()) if names}

    def history(self, alias: str) -> list[AliasEntry]:
        """All moves of an alias, the last one in force.

        Raises:
            SnapshotError: what an entry tells of its move cannot be read.
        """
        return [self._entry(f"{self._root}/{ALIASES}/{alias}", x) for x in self._moves(alias)]

    def meanings(self, alias: str) -> list[str]:
        """What an alias means and what it meant before, the newest first, each once.

        What a rollback left behind is no meaning any more.

        Raises:
            SnapshotError: as `history`.
        """
        history = self.history(alias)
        names = [entry.name for entry in history]
        ids, at = [], len(history) - 1
        while at >= 0:
            ids.append(history[at].snapshot)
            restores = history[at].restores
            at = (names.index(restores) if restores in names[:at] else at) - 1
        return list(dict.fromkeys(ids))

    def _moves(self, alias: str) -> list[str]:
        """The names of an alias' entries, which tell what it meant whatever stands in them."""
        return [x for x in self._names(f"{self._root}/{ALIASES}/{alias}") if _is_entry(x)]

    # What changes it.

    def push(self, folder: Path) -> str:
        """Publishes a snapshot's folder as a version, and returns its id.

        A second time is nothing, but for a version that is damaged by then: it is mended.

        Raises:
            SnapshotError: it is damaged, or the registry cannot be written.
        """
        manifest, files = read_whole(folder)
        place = f"{self._root}/{manifest.id}"
        if self.is_whole(manifest.id):
            return manifest.id
        for name, data in files.items():
            self._write(f"{place}/{name}", data)
        self._write(f"{place}/{MANIFEST}", (folder / MANIFEST).read_bytes())
        return manifest.id

    def pull(self, snapshot_id: str, to: Path) -> None:
        """Copies a version, every byte checked, into a new folder, which appears when it is whole.

        Raises:
            SnapshotError: it is damaged, or cannot be written.
        """
        manifest, files = self.contents(snapshot_id)
        write_folder(to, {**files, MANIFEST: manifest_bytes(manifest.to_json())})

    def set_alias(
        self, alias: str, snapshot_id: str, why: str, restores: str | None = None
    ) -> AliasEntry:
        """Moves an alias to a version.

        Raises:
            SnapshotError: no such version, or a name that cannot be an alias.
        """
        if not NAME.fullmatch(alias) or ID.fullmatch(alias):
            raise SnapshotError(
                f"{alias!r} cannot be an alias; use letters, digits, '.', '_' and '-'"
            )
        self.manifest(snapshot_id)
        folder = f"{self._root}/{ALIASES}/{alias}"
        at = datetime.now(UTC)
        moves = self._moves(alias)
        if moves:  # whatever this machine's clock says, this move is the latest
            last = datetime.strptime(moves[-1].split("-")[0], _STAMP).replace(tzinfo=UTC)
            try:
                at = max(at, last + timedelta(microseconds=1))
            except OverflowError as error:
                raise SnapshotError(f"no time is after {folder}/{moves[-1]}; remove it") from error
        name = f"{at.strftime(_STAMP)}-{snapshot_id}.json"
        entry = {"at": at.isoformat(timespec="seconds"), "why": why, "restores": restores}
        self._write(f"{folder}/{name}", json.dumps(entry).encode())
        return self._entry(folder, name)

    def roll_back(self, alias: str) -> AliasEntry:
        """Moves an alias back to where it was before; once more, back one further.

        Raises:
            SnapshotError: it was nowhere before.
        """
        history = self.history(alias)
        names = [entry.name for entry in history]
        at = len(history) - 1
        while at > 0 and history[at].restores in names:
            at = names.index(str(history[at].restores))
        current = history[-1].snapshot if history else None
        while at >= 0 and history[at].snapshot == current:
            at -= 1
        if at < 0:
            raise SnapshotError(
                f"alias {alias!r} in {self.location} has not been anywhere before; "
                f"see: trappm snapshot show {alias}"
            )
        target = history[at]
        return self.set_alias(alias, target.snapshot, f"rolled back from {current}", target.name)

    def collect(self, keep: int, *, dry_run: bool = False) -> list[str]:
        """Removes versions that no alias means or meant before, but for the newest `keep`.

        Also what killed processes left behind a day ago or longer. Returns what goes. Versions
        that cannot be read stay: they may be of a newer trappm, or be mended by another push.
        """
        kept = {_snapshot_of(name) for alias in self.aliases() for name in self._moves(alias)[-2:]}
        made = {}
        for name in self.ids():
            with contextlib.suppress(SnapshotError):
                made[name] = self.manifest(name).created_at
        newest = sorted(made, key=lambda name: (made[name], name), reverse=True)[:keep]
        going = [name for name in made if name not in kept and name not in newest]
        if not dry_run:
            for name in going:
                self._fs.rm_file(f"{self._root}/{name}/{MANIFEST}")  # now nobody sees it
                self._fs.rm(f"{self._root}/{name}", recursive=True)
        return going + [name for name in self._leftovers() if self._swept(name, dry_run)]

    # Files.

    def _leftovers(self) -> Iterator[str]:
        """Unfinished folders, and parts of files beside whole ones."""
        for name in self._names(self._root):
            folder = f"{self._root}/{name}"
            unfinished = name.startswith(".unfinished-") or (
                ID.fullmatch(name) is not None and not self._exists(f"{folder}/{MANIFEST}")
            )
            if unfinished or name.startswith(_PART):
                yield name
            elif ID.fullmatch(name):
                yield from (f"{name}/{x}" for x in self._names(folder) if x.startswith(_PART))

    def _swept(self, name: str, dry_run: bool) -> bool:
        """Whether something unfinished is old enough to be removed; then it is."""
        path = f"{self._root}/{name}"
        try:
            files = self._fs.find(path) or [path]
            age_s: float = time.time() - max(self._fs.modified(x).timestamp() for x in files)
        except (OSError, NotImplementedError):
            return False  # such a place tells no times: it goes when somebody pushes it again
        if age_s > STALE_S and not dry_run:
            self._fs.rm(path, recursive=True)
        return age_s > STALE_S

    def _entry(self, folder: str, name: str) -> AliasEntry:
        data = self._read(f"{folder}/{name}", _ENTRY_BYTES, folder)
        try:
            entry: Mapping[str, Any] = json.loads(data)
            at, why, restores = entry["at"], entry["why"], entry["restores"]
        except (ValueError, KeyError, TypeError, RecursionError):
            at = None
        if not (isinstance(at, str) and isinstance(why, str) and isinstance(restores, str | None)):
            raise SnapshotError(f"{folder}/{name} is no entry of an alias; remove it")
        return AliasEntry(name, _snapshot_of(name), at, why, restores)

    def _names(self, folder: str) -> list[str]:
        with self._reaching():
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(folder, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in entries)

    def _exists(self, path: str) -> bool:
        with self._reaching():
            return bool(self._fs.isfile(path))

    def _read(self, path: str, limit: int, place: str) -> bytes:
        name = path.rsplit("/", 1)[-1]
        with self._reaching():
            if not self._fs.exists(path):
                if name == MANIFEST:
                    raise SnapshotError(f"there is no snapshot {place}; see: trappm snapshot list")
                raise damaged(place, f"{name} is missing")
            if not self._fs.isfile(path):  # opening a pipe would wait for somebody to write
                raise damaged(place, f"{name} is no plain file")
            if self._fs.size(path) > limit:
                raise damaged(place, f"{name} has more than {limit} bytes")
            with self._fs.open(path, "rb") as file:
                data = bytes(file.read(limit + 1))
        if len(data) > limit:
            raise damaged(place, f"{name} has more than {limit} bytes")
        return data

    def _write(self, path: str, data: bytes) -> None:
        folder, name = path.rsplit("/", 1)
        part = f"{folder}/{_PART}{secrets.token_hex(4)}-{name}"
        with self._reaching():
            self._fs.makedirs(folder, exist_ok=True)
            try:
                self._fs.pipe_file(part, data)
                self._fs.mv(part, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._fs.rm_file(part)
                raise

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except SnapshotError:
            raise
        except Exception as error:  # each kind of place raises classes of its own
            reason = without_secrets(one_line(error))
            if "***" in self.location and not isinstance(error, OSError):
                reason = type(error).__name__  # it may quote a piece of the password
            raise SnapshotError(
                f"the registry {self.location} cannot be used: {reason}; snapshots that were "
                "pulled before can be used without it"
            ) from None  # nor does a trace tell its password


def without_secrets(text: str) -> str:
    """The text with nothing that may be a password in the URLs in it: user and query."""
    return re.sub(r"(://\S*?)\?\S*", r"\1", re.sub(r"://\S*@", "://***@", text))


def _snapshot_of(entry: str) -> str:
    return entry.removesuffix(".json").split("-")[1]


def _is_entry(name: str) -> bool:
    stamp, _, rest = name.removesuffix(".json").partition("-")
    try:
        datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC)
    except ValueError:
        return False
    return name.endswith(".json") and bool(ID.fullmatch(rest))
