"""Writes the rows of a Parquet file as JSON lines; a script, for a process of its own.

A few hundred bytes of Parquet can unpack to any size, and the sizes in its header may be a
lie. So `store.exchange.files` has it unpacked here, in a process with a bound for its memory.

    python -IS parquet_reader.py FILE SYS_PATH... > lines

Each line is one row as an object; a list ends them, with the reason of a refusal, or empty.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

MAX_MEMORY_BYTES = 768 << 20
"""Beside what the libraries take."""
MAX_ROWS = 10_000_000
_BATCH = 500


def main() -> None:
    sys.path[:] = sys.argv[2:]
    reason = []
    try:
        _write(sys.argv[1])
    except MemoryError:  # Arrow's own is one, too
        reason = [f"its rows unpack to more than {MAX_MEMORY_BYTES >> 20} MiB at once"]
    except (OSError, TypeError, ValueError, RuntimeError) as error:  # Arrow's others
        reason = [f"it is no Parquet file that can be read: {' '.join(str(error).split())[:300]}"]
    sys.stdout.write(json.dumps(reason) + "\n")


def _write(path: str) -> None:
    # The usual allocator reserves a gigabyte of the address space before it allocates a byte.
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Each thread reserves more of the address space than it takes.
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    status = Path("/proc/self/statm").read_text(encoding="ascii")
    limit = int(status.split()[0]) * resource.getpagesize() + MAX_MEMORY_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
    # Not buffered before, a column is unpacked page by page, not a whole group of rows at once.
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        if file.metadata.num_rows > MAX_ROWS:
            raise ValueError(f"it has more than {MAX_ROWS:,} rows; split it")
        if len(set(file.schema_arrow.names)) < len(file.schema_arrow.names):
            raise ValueError("it has a column twice")
        if any(pa.types.is_nested(kind) for kind in file.schema_arrow.types):
            raise ValueError("it has columns with structure, and an export has none")
        for batch in file.iter_batches(batch_size=_BATCH, use_threads=False):
            for row in batch.to_pylist():
                sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
