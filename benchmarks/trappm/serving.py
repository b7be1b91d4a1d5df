"""How long answers of `trappm serve` take under a steady load (docs/studies/serving_speed.md).

    PYTHONPATH=. python benchmarks/trappm/serving.py [--rate 200] [--seconds 20] [--replicas 0]
        [--json]

Starts the server in a process of its own, asks once about the model, and then sends requests at the
given rate whether earlier ones have been answered or not (an open loop), over a few kept
connections, from this process. A latency counts from the moment at which its request was due, so a
server that stalls is not excused. Three loads: one question again and again, eight batch sizes in
turn (as somebody compares), and every batch size once (nothing is remembered but the graph).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import psutil

CONNECTIONS = 64
LOADS = {
    "one question": lambda at: 64,
    "eight batch sizes": lambda at: 2 ** (at % 8),
    "a new batch size each time": lambda at: 100 + at,
}
_TRAPPM = "from trappm.cli import main; main()"
_PORT = re.compile(r"http://127\.0\.0\.1:(\d+)")


@contextlib.contextmanager
def server(replicas: int) -> Iterator[tuple[int, psutil.Process]]:
    """The port of a running server, and its process."""
    port = ["--port", "0"] if replicas == 0 else ["--port", "8765", "--replicas", str(replicas)]
    command = [sys.executable, "-c", _TRAPPM, "serve", *port, "--max-requests", "256"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = _PORT.search(process.stdout.readline())
        assert port, "the server did not start"
        yield int(port[1]), psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


class Connection:
    """One kept connection, which one request at a time uses."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> int:
        """The status of the answer, which is read to its end."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        length = next(int(x.split(":")[1]) for x in lines if x.startswith("content-length:"))
        await reader.readexactly(length)
        return int(lines[0].split()[1])


async def load(port: int, rate: float, seconds: float, kind: str, model: str) -> dict[str, float]:
    """Sends the requests when they are due; latencies in ms."""
    idle: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        idle.put_nowait(Connection(port))
    latencies: list[float] = []
    statuses: list[int] = []
    begin = time.perf_counter() + 0.1

    async def ask(at: int) -> None:
        due = begin + at / rate
        question = {"model": model, "device": "a100", "batch_size": LOADS[kind](at)}
        connection = await idle.get()
        try:
            statuses.append(await connection.post("/v1/predict", json.dumps(question).encode()))
        except (OSError, asyncio.IncompleteReadError):
            statuses.append(0)
            connection = Connection(port)
        latencies.append(1000 * (time.perf_counter() - due))
        idle.put_nowait(connection)

    tasks = []
    for at in range(int(rate * seconds)):
        await asyncio.sleep(max(begin + at / rate - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(ask(at)))
    await asyncio.gather(*tasks)
    p50, p95, p99 = np.percentile(latencies, [50, 95, 99])
    errors = sum(status != 200 for status in statuses)
    return {"requests": len(statuses), "errors": errors, "p50_ms": round(p50, 2),
            "p95_ms": round(p95, 2), "p99_ms": round(p99, 2),
            "max_ms": round(max(latencies), 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with server(options.replicas) as (port, process):
        first = json.dumps({"model": options.model, "device": "a100", "batch_size": 64}).encode()
        status = asyncio.run(Connection(port).post("/v1/predict", first))
        assert status == 200, f"the first question was answered with {status}"
        for kind in LOADS:
            cpu = process.cpu_times()
            row = asyncio.run(load(port, options.rate, options.seconds, kind, options.model))
            spent = process.cpu_times().user + process.cpu_times().system - cpu.user - cpu.system
            cores = round(spent / options.seconds, 2) if options.replicas == 0 else None
            rows.append({"load": kind, **row, "server_cores": cores})
    if options.json:
        print(json.dumps({"rate": options.rate, "cores": os.cpu_count(), "rows": rows}, indent=2))
        return
    print(f"{options.rate:g} requests a second, {options.seconds:g} s, {os.cpu_count()} cores")
    names = list(rows[0])
    print(" | ".join(names))
    for row in rows:
        print(" | ".join(str(row[name]) for name in names))


if __name__ == "__main__":
    main()
