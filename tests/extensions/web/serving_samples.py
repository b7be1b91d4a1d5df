"""Asking an application without a network, and snapshots that differ in nothing but their id."""

import asyncio
import json
from dataclasses import dataclass

from trappm.extensions.web.app import create_app
from trappm.extensions.web.gate import ServingSettings
from trappm.learner.snapshots.manifest import (
    MANIFEST,
    manifest_bytes,
    read_whole,
    seal,
    write_folder,
)
from trappm.prediction.selection import SHIPPED

QUESTION = {"model": "test_resnet", "input_size": 64, "device": "a100", "batch_size": 4}


@dataclass(frozen=True)
class Response:
    """An answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


class Asker:
    """An application and the event loop that it lives in."""

    def __init__(self, **settings):
        self.app = create_app(ServingSettings(**settings))
        self._runner = asyncio.Runner()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.app.state.answerer.close()
        self._runner.close()

    def run(self, coroutine):
        return self._runner.run(coroutine)

    def post(self, path, question, **headers):
        body = question if isinstance(question, bytes) else json.dumps(question).encode()
        return self.run(self.ask("POST", path, [body], headers))

    def get(self, path, **headers):
        return self.run(self.ask("GET", path, [b""], headers))

    async def ask(self, method, path, chunks, headers=None):
        """One request."""
        path, _, query = path.partition("?")
        given = {"host": "127.0.0.1:8000", **(headers or {})}
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "",
            "query_string": query.encode(), "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 1),
            "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in given.items()],
        }  # fmt: skip
        waiting, sent = list(chunks), []

        async def receive():
            if waiting:
                body = waiting.pop(0)
                return {"type": "http.request", "body": body, "more_body": bool(waiting)}
            return await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        await self.app(scope, receive, send)
        start, *parts = sent
        return Response(
            start["status"],
            {name.decode(): value.decode() for name, value in start["headers"]},
            b"".join(part["body"] for part in parts),
        )


def other_snapshot(registry, name):
    """The shipped snapshot under another id, in a registry's folder; returns the id."""
    manifest, contents = read_whole(SHIPPED)
    manifest = seal({**manifest.to_json(), "campaign": name})
    write_folder(registry / manifest["id"], {**contents, MANIFEST: manifest_bytes(manifest)})
    return manifest["id"]
