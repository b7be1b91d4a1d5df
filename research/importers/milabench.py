"""Importer of milabench's training throughput on H100, H200 and other cards.

The source is mila-iqia/milabench (MIT), `config/scaling`. A row is one run of a benchmark at one
batch size. Only benchmarks of single steps of timm's models whose loader is faster than the GPU are
used: `benchmarks/torchvision/main.py` has autocast to fp16 with a GradScaler and plain SGD. TF32 is
off unless the name says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from research.importers.sheets import (
    SECOND,
    Cells,
    number_in,
    published,
    read_rows,
    reject,
    text_in,
    whole_in,
)
from trappm.profiler.records import (
    Configuration,
    MemoryFormat,
    Optimizer,
    Phase,
    Precision,
    Protocol,
)
from trappm.store.files import ParsedRow

SOURCE = "milabench"
COLUMNS = frozenset({"card", "benchmark", "batch_size", "cpu", "perf_items_per_s"})
INPUT_SIZE = 224
MIN_BATCH = 8
"""Smallest batch that is imported: smaller steps wait for their host."""
PROTOCOL = Protocol(name="milabench", warmup_steps=0, min_steps=1, max_steps=1)
REJECTED_CARDS = ("MI325X", "unnamed")


@dataclass(frozen=True)
class Benchmark:
    """timm's name of a benchmark's model, and its settings."""

    architecture: str
    precision: Precision = Precision.AMP_FP16
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS


BENCHMARKS = {
    "convnext_large-fp16": Benchmark("convnext_large"),
    "convnext_large-tf32-fp16": Benchmark("convnext_large"),
    "convnext_large-tf32": Benchmark("convnext_large", Precision.TF32),
    "convnext_large-fp32": Benchmark("convnext_large", Precision.FP32_STRICT),
    "regnet_y_128gf": Benchmark("regnety_1280"),
    "resnet50-noio": Benchmark("resnet50", memory_format=MemoryFormat.CHANNELS_LAST),
}
"""The other benchmarks wait for a loader, use several GPUs, or have no model of timm."""


def parse_rows(path: Path) -> list[ParsedRow]:
    """Return each row of the sheet.

    Memory is not imported: ResNet-50's is twice that of its steps, for a reason that the source
    does not state.

    Raises:
        InputError: The file or a row of it cannot be read.
    """
    seen: set[tuple[str, Configuration]] = set()
    return list(read_rows(path, COLUMNS, lambda cells: _parse_row(cells, seen)))


def _parse_row(cells: Cells, seen: set[tuple[str, Configuration]]) -> ParsedRow:
    card, name = text_in(cells, "card"), text_in(cells, "benchmark")
    benchmark = BENCHMARKS.get(name)
    if benchmark is None:
        return reject(f"benchmark {name} is not a step of a model of timm alone")
    if card.startswith(REJECTED_CARDS):
        return reject(f"card {card} is not in the catalogue")
    if not cells["perf_items_per_s"]:
        return reject("no throughput")
    batch = whole_in(cells, "batch_size")
    if batch < MIN_BATCH:
        return reject("the step waits for its host")
    step_ms = 1000 * batch / number_in(cells, "perf_items_per_s")
    what = Configuration(
        architecture=benchmark.architecture,
        batch_size=batch,
        input_size=INPUT_SIZE,
        precision=benchmark.precision,
        memory_format=benchmark.memory_format,
        optimizer=Optimizer.SGD,
        phase=Phase.TRAIN,
    )
    if (card, what) in seen:
        return SECOND  # with another number of loader processes, or TF32 that autocast does not use
    seen.add((card, what))
    environment = {
        "device": "-".join(card.lower().split()),
        "device_name": card,
        "source": SOURCE,
        "licence": "MIT",
    }
    label = published(what, PROTOCOL, environment, row=str(step_ms), step_time_ms=step_ms)
    return ParsedRow(reason="step time", measurement=label)
