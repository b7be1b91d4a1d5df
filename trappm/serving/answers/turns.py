"""Work that callers wait for: it ends with the last of them, and clients take turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from trappm.serving.problems import BusyError

Result = TypeVar("Result")


class Shared(Generic[Result]):
    """Work by its key: who wants the same waits together, and it is cancelled with the last one."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[Result]] = {}
        self._waiting: Counter[asyncio.Task[Result]] = Counter()

    async def wait(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """The result of `work`, begun now unless it is under way already."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(lambda done: self._forget(key, done))
        self._waiting[task] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[task] -= 1
            if not self._waiting[task]:
                del self._waiting[task]
                if not task.done():
                    self._forget(key, task)  # the next caller begins anew
                    task.cancel()

    def _forget(self, key: Hashable, task: asyncio.Task[Result]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        if task.done() and not task.cancelled():
            task.exception()  # retrieved, though all callers may have left


class Turns:
    """Limits work to so many at once; waiting clients get their turns one after the other."""

    def __init__(self, at_once: int, max_waiting: int, max_of_client: int) -> None:
        self._free = at_once
        self._max_waiting = max_waiting
        self._max_of_client = max_of_client
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Raises BusyError: too many wait already, of this client or in all."""
        if self._free:
            self._free -= 1
        else:
            await self._queue(client)
        try:
            yield
        finally:
            self._next()

    async def _queue(self, client: str) -> None:
        own = self._waiting.setdefault(client, deque())
        waiting = sum(map(len, self._waiting.values()))
        if waiting >= self._max_waiting or len(own) >= self._max_of_client:
            raise BusyError(
                f"{waiting} models wait to be looked at for the first time; ask again in a minute"
            )
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        own.append(ticket)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled():
                self._next()  # it had just come to its turn
            elif ticket in own:
                own.remove(ticket)
                if not own:
                    del self._waiting[client]
            raise

    def _next(self) -> None:
        while self._waiting:
            client, own = self._waiting.popitem(last=False)
            ticket = own.popleft()
            if own:
                self._waiting[client] = own  # at the end of the row
            if not ticket.done():  # else its owner has left
                ticket.set_result(None)
                return
        self._free += 1
