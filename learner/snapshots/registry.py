"""A registry of snapshots in a folder or bucket: immutable versions, and aliases that move.

    <location>/<id>/manifest.json, *.safetensors     one version, visible once its manifest is there
               aliases/<name>/<time>-<id>.json       one entry per move of an alias
               encoder-<hash>.safetensors            an encoder, found by all that it was made from

A location is a folder, or an fsspec URL such as s3://bucket/path. Files are written under another
name and then moved, a version's manifest last, and an alias is a log that only grows. So a process
killed at any moment leaves only whole versions visible, and the same command continues.

Credentials for buckets come from the environment of the process, such as AWS_ACCESS_KEY_ID, or from
the provider's files, such as ~/.aws/credentials.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fsspec

from trappm.learner.snapshots.manifest import (
    ID,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MAX_SNAPSHOT_BYTES,
    NAME,
    Manifest,
    check_file,
    damage_error,
    manifest_bytes,
    parse_manifest,
    read_whole,
    write_folder,
)
from trappm.profiler.errors import (
    InputError,
    MissingLibraryError,
    SnapshotError,
    one_line,
)

EXTRAS = {"s3": "s3", "gs": "gcs", "gcs": "gcs"}
"""Extras of the package that have the library of a protocol."""

ALIASES = "aliases"
LATEST = "latest"
_PART = ".part-"
_STAMP = "%Y%m%dT%H%M%S%fZ"
_ENTRY_BYTES = 64 << 10


@dataclass(frozen=True)
class AliasEntry:
    """Move of an alias."""

    snapshot: str
    at: str
    why: str


class Registry:
    """A registry of snapshots at one location: a folder or a URL.

    >>> Registry("memory://snapshots").ids()
    []
    """

    def __init__(self, location: str | Path) -> None:
        """Open a location.

        Raises:
            SnapshotError: It cannot be reached.
            MissingLibraryError: Its protocol needs a library that is not installed.
        """
        self.location = hide_secrets(str(location))
        with self._report_errors():
            try:
                self._fs, root = fsspec.url_to_fs(str(location))
            except ImportError as error:
                raise _missing_library(self.location, error) from None
        self._root = root.rstrip("/")

    def ids(self) -> list[str]:
        """Return the ids of all whole versions."""
        return sorted(
            name
            for name in self._names(self._root)
            if ID.fullmatch(name) and self._exists(f"{self._root}/{name}/{MANIFEST}")
        )

    def manifest(self, snapshot_id: str) -> Manifest:
        """Return a version's manifest, checked.

        Raises:
            SnapshotError: It is missing, damaged, or another version's.
        """
        place = f"{self.location}/{snapshot_id}"
        data = self._read(f"{self._root}/{snapshot_id}/{MANIFEST}", MAX_MANIFEST_BYTES, place)
        manifest = parse_manifest(data, place)
        if manifest.id != snapshot_id:
            raise SnapshotError(
                f"{place} holds snapshot {manifest.id}, under another one's name; "
                "remove it, or give it its own name back"
            )
        return manifest

    def contents(self, snapshot_id: str) -> tuple[Manifest, dict[str, bytes]]:
        """Return manifest and files of a version, every byte checked.

        Raises:
            SnapshotError: As `manifest`, or a file is missing, damaged or too large.
        """
        place = f"{self.location}/{snapshot_id}"
        manifest = self.manifest(snapshot_id)
        files = {}
        for name, entry in manifest.files.items():
            files[name] = self._read(f"{self._root}/{snapshot_id}/{name}", entry.bytes, place)
            check_file(name, entry, files[name], place)
        return manifest, files

    def is_whole(self, snapshot_id: str) -> bool:
        """Return whether a version is there with every byte intact."""
        try:
            self.contents(snapshot_id)
        except SnapshotError:
            return False
        return True

    def resolve(self, name: str) -> str:
        """Return the id for an alias, an id or the unambiguous beginning of an id.

        Raises:
            SnapshotError: There is none, or more than one.
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
        """Return snapshot ids by alias."""
        moves = {name: self._moves(name) for name in self._names(f"{self._root}/{ALIASES}")}
        return {name: _snapshot_of(names[-1]) for name, names in sorted(moves.items()) if names}

    def history(self, alias: str) -> list[AliasEntry]:
        """Return all moves of an alias, the last one in force.

        Raises:
            SnapshotError: An entry cannot be read.
        """
        return [self._entry(f"{self._root}/{ALIASES}/{alias}", x) for x in self._moves(alias)]

    def meanings(self, alias: str) -> list[str]:
        """Return the ids that an alias has meant, the newest first, each once."""
        return list(dict.fromkeys(_snapshot_of(move) for move in reversed(self._moves(alias))))

    def _moves(self, alias: str) -> list[str]:
        """Return the file names `<time>-<id>.json` of an alias: when it moved, and where to."""
        return [x for x in self._names(f"{self._root}/{ALIASES}/{alias}") if _is_entry(x)]

    def push(self, folder: Path) -> str:
        """Publish a snapshot's folder as a version, or the rest of one, and return its id.

        Raises:
            SnapshotError: The folder is damaged, or the registry cannot be written.
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
        """Copy a version, every byte checked, into a new folder, which appears once it is whole.

        Raises:
            SnapshotError: It is damaged, or cannot be written.
        """
        manifest, files = self.contents(snapshot_id)
        write_folder(to, {**files, MANIFEST: manifest_bytes(manifest.to_json())})

    def set_alias(self, alias: str, snapshot_id: str, why: str) -> None:
        """Move an alias to a version.

        Raises:
            SnapshotError: There is no such version, or the name cannot be an alias.
        """
        if not NAME.fullmatch(alias) or ID.fullmatch(alias):
            raise SnapshotError(
                f"{alias!r} cannot be an alias; use letters, digits, '.', '_' and '-'"
            )
        self.manifest(snapshot_id)
        folder = f"{self._root}/{ALIASES}/{alias}"
        at = datetime.now(UTC)
        moves = self._moves(alias)
        if moves:  # this move is the latest, even if this machine's clock is behind
            last = datetime.strptime(moves[-1].split("-")[0], _STAMP).replace(tzinfo=UTC)
            at = max(at, last + timedelta(microseconds=1))
        name = f"{at.strftime(_STAMP)}-{snapshot_id}.json"
        entry = {"at": at.isoformat(timespec="seconds"), "why": why}
        self._write(f"{folder}/{name}", json.dumps(entry).encode())

    def read_file(self, name: str) -> bytes | None:
        """Return the file of an encoder, or None if there is none.

        Raises:
            SnapshotError: It is too large, or the registry cannot be read.
        """
        path = f"{self._root}/{name}"
        return self._read(path, MAX_SNAPSHOT_BYTES, self.location) if self._exists(path) else None

    def cache(self, name: str, data: bytes) -> None:
        """Write the file of an encoder; raise SnapshotError if the registry cannot be written."""
        self._write(f"{self._root}/{name}", data)

    def _entry(self, folder: str, name: str) -> AliasEntry:
        data = self._read(f"{folder}/{name}", _ENTRY_BYTES, folder)
        try:
            entry = json.loads(data)
            if not isinstance(entry["at"], str) or not isinstance(entry["why"], str):
                raise TypeError("time and reason are not texts")
            return AliasEntry(_snapshot_of(name), entry["at"], entry["why"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SnapshotError(f"{folder}/{name} is no entry of an alias; remove it") from error

    def _names(self, folder: str) -> list[str]:
        with self._report_errors():
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(folder, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in entries)

    def _exists(self, path: str) -> bool:
        with self._report_errors():
            return bool(self._fs.isfile(path))

    def _read(self, path: str, limit: int, place: str) -> bytes:
        name = path.rsplit("/", 1)[-1]
        with self._report_errors():
            if not self._fs.exists(path):
                if name == MANIFEST:
                    raise SnapshotError(f"there is no snapshot {place}; see: trappm snapshot show")
                raise damage_error(place, f"{name} is missing")
            if not self._fs.isfile(path):  # opening a pipe would block
                raise damage_error(place, f"{name} is no plain file")
            if self._fs.size(path) > limit:
                raise damage_error(place, f"{name} has more than {limit} bytes")
            with self._fs.open(path, "rb") as file:
                data = bytes(file.read(limit + 1))
        if len(data) > limit:
            raise damage_error(place, f"{name} has more than {limit} bytes")
        return data

    def _write(self, path: str, data: bytes) -> None:
        folder, name = path.rsplit("/", 1)
        part = f"{folder}/{_PART}{secrets.token_hex(4)}-{name}"
        with self._report_errors():
            self._fs.makedirs(folder, exist_ok=True)
            try:
                self._fs.pipe_file(part, data)
                self._fs.mv(part, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._fs.rm_file(part)
                raise

    @contextlib.contextmanager
    def _report_errors(self) -> Iterator[None]:
        try:
            yield
        except (SnapshotError, MissingLibraryError):
            raise
        except Exception as error:  # each kind of place raises classes of its own
            reason = hide_secrets(one_line(error))
            if "***" in self.location and not isinstance(error, OSError):
                reason = type(error).__name__  # it may quote a piece of the password
            raise SnapshotError(
                f"the registry {self.location} cannot be used: {reason}; snapshots that were "
                "pulled before can be used without it"
            ) from None  # a traceback could show the password


def check_location(location: str) -> None:
    """Refuse a location that means another place elsewhere, or that may hold a password.

    Raises:
        InputError: It is neither an absolute folder nor a URL of a protocol that fsspec knows, or
            the URL has a user, a password or a query.
    """
    protocol, is_url, rest = location.partition("://")
    shown = ascii(hide_secrets(location))
    if not location.isprintable():
        raise InputError(f"registry: {shown} has characters that cannot be printed; remove them")
    if not is_url:
        if not Path(location).is_absolute():
            raise InputError(
                f"registry: {shown} is not an absolute folder; begin it with '/', or give a URL "
                "such as s3://bucket/path"
            )
    elif "@" in rest or "?" in rest:
        raise InputError(
            f"registry: {shown} has a user or a query, which may hold a password; leave it out "
            "and give credentials in the environment, such as AWS_ACCESS_KEY_ID"
        )
    elif protocol not in fsspec.available_protocols():
        raise InputError(
            f"registry: fsspec knows no protocol {protocol!r}; there are s3://, gs:// and others"
        )
    elif not rest.strip("/"):
        raise InputError(f"registry: {shown} names no bucket or folder; add it behind '://'")


def check_library(location: str) -> None:
    """Raise MissingLibraryError if a location needs a library that is not installed."""
    protocol, is_url, _ = location.partition("://")
    try:
        fsspec.get_filesystem_class(protocol if is_url else "file")
    except ImportError as error:
        raise _missing_library(location, error) from None


def _missing_library(location: str, error: ImportError) -> MissingLibraryError:
    """Return an error with fsspec's name of the library, such as s3fs."""
    extra = EXTRAS.get(location.partition("://")[0])
    way = "with pip" if extra is None else f"pip install 'trappm[{extra}]'"
    return MissingLibraryError(
        f"the registry {location} needs a library: {one_line(error)} ({way})"
    )


def hide_secrets(text: str) -> str:
    """Return the text without user and query of URLs, which may hold passwords."""
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
