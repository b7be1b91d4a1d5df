"""One thread for the heads: questions that come while it works wait, and are answered together.

Nothing waits for company: a question that comes alone is answered at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batcher(Generic[Item, Result]):
    """Collects jobs of an event loop into batches, and runs `work` on them in one thread."""

    def __init__(
        self, work: Callable[[Sequence[Item]], Sequence[Result | Exception]], max_batch: int
    ) -> None:
        """`work` gives a result or an error for each of at most `max_batch` items."""
        self._work = work
        self._max_batch = max_batch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trappm-answers")
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._running: asyncio.Task[None] | None = None

    async def submit(self, item: Item) -> Result:
        """What `work` makes of the item; raises what it gave as an error."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await future

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch = self._waiting[: self._max_batch]
                del self._waiting[: self._max_batch]
                items = [item for item, _ in batch]
                try:
                    results = await loop.run_in_executor(self._thread, self._work, items)
                except Exception as error:  # of the thread itself: every caller gets it
                    results = [error] * len(batch)
                for (_, future), result in zip(batch, results, strict=True):
                    if future.done():
                        continue  # its caller has left
                    if isinstance(result, Exception):
                        future.set_exception(result)
                    else:
                        future.set_result(result)
        finally:
            self._running = None
