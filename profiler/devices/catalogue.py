"""Data sheets of devices by their keys; `catalogue.csv` has NVIDIA's cards.

The figures are from NVIDIA's data sheets and architecture white papers (Volta to Blackwell),
without sparsity and with fp32 accumulation, which PyTorch uses and which halves the tensor peak of
most GeForce cards; where only clocks are given, cores times boost clock. Parts by MIG follow
`nvidia-smi mig -lgip` and the MIG user guide. Unknown figures are missing, never guessed. To add a
card, add a line. A user's own cards are in `cards.csv` of TRAPPM_HOME, with the same columns.

`read_name` normalizes all names of a card: NVML's (`NVIDIA A100-SXM4-40GB`), Ray's labels
(`GeForce-RTX-3090`), and keys (`a100`, `rtx-3090`, `rtx3090`, `a100-80gb`).

The constants of priors start from a `DeviceSpec`; labels correct everything that depends on it.
"""

from __future__ import annotations

import csv
import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trappm.profiler.errors import InputError, nearest, one_line
from trappm.profiler.files import read_plain
from trappm.profiler.host import procfs
from trappm.profiler.host.environment import data_folder
from trappm.profiler.records import Execution, Phase, Precision, is_cpu_device
from trappm.profiler.traced_step import KernelKind, Kernels, Size

_BoolArray = npt.NDArray[np.bool_]
_FILE = Path(__file__).parent / "catalogue.csv"
OWN_CARDS = "cards.csv"
"""File in TRAPPM_HOME with cards that the catalogue does not list."""
_MAX_BYTES = 1 << 20
_NO_NAME = frozenset(
    {"nvidia", "tesla", "geforce", "quadro", "graphics", "device", "generation", "edition", "gpu",
     "simulated", "120gb", "480gb", "ac"}
)  # fmt: skip
"""Words that do not identify a card.

The sizes are those of GH200's CPU memory; `ac` is an air-cooled B300.
"""
_FORM = re.compile(r"sxm\d?|pcie|nvl|dgxs")
_MEMORY = re.compile(r"(\d+)gb?")
_HBM = re.compile(r"hbm\w+")
_PART = re.compile(r"[\s-]mig[\s-](\S+)$")
_PROFILE = re.compile(r"(?:(\d)c\.)?(\d)g\.(\d+)gb(?:\+.*)?")
_SERIES = re.compile(r"\b(rtx|gtx)\W*(\d+)(ti|super|d)?\b")
_GEFORCE = re.compile(r"[rg]tx-\d")
_NUMBERED = re.compile(r"[rg]tx-\D*\d+")
_MEMORY_TOLERANCE = 0.12
"""NVML reports less than data sheets: error correction, the driver's memory, GB for GiB."""
_USUAL_SHARE = {1: 1 / 8, 2: 2 / 8, 3: 4 / 8, 4: 4 / 8, 7: 1.0}
"""Share of the memory by compute slices of a part, for cards with seven slices."""

_RANKS = r"(?P<ranks>[2-9]|[1-9]\d)"
_STRATEGY = r"(?:-(?P<strategy>fsdp))?"
_CORES_OF_RANKS = re.compile(rf"cpu-{_RANKS}x(?P<threads>[1-9]\d{{0,3}}t){_STRATEGY}")
_CARDS_OF_RANKS = re.compile(rf"(?P<card>[^:]+)x{_RANKS}{_STRATEGY}")


@dataclass(frozen=True)
class RankKey:
    """Ranks of a device: processes with a member device each."""

    member: str
    """Key of the device of each rank, such as `a100` or `cpu-1t`."""
    ranks: int = 1
    strategy: str = "ddp"
    """Strategy by which the ranks share a step."""


@lru_cache(maxsize=10_000)
def rank_key(device: str) -> RankKey:
    """Return the member, number of ranks and strategy of a device; one rank of most devices.

    Keys of several ranks are such as `a100x4`, `cpu-2x1t` and `a100x4-fsdp`. The strategy is `ddp`
    (replicated parameters) or `fsdp` (sharded parameters).
    """
    cores = _CORES_OF_RANKS.fullmatch(device)
    match = cores or _CARDS_OF_RANKS.fullmatch(device)
    if match is None or (cores is None and device.startswith("cpu-")):
        return RankKey(device)
    member = f"cpu-{cores['threads']}" if cores else match["card"]
    return RankKey(member, int(match["ranks"]), match["strategy"] or "ddp")


@dataclass(frozen=True, kw_only=True)
class CardName:
    """Facts about a card in its name."""

    model: str
    """Such as `a100` or `rtx-3090-ti`."""
    form: str | None = None
    """`sxm4`, `pcie` or `nvl`."""
    memory_gb: int | None = None
    part: str | None = None
    """Profile of a part by MIG, such as `1g.5gb`."""

    def __str__(self) -> str:
        """Return the full name, such as `a100 sxm4 40gb`."""
        size = None if self.memory_gb is None else f"{self.memory_gb}gb"
        return " ".join(
            filter(None, (self.model, self.form, size, self.part and f"mig {self.part}"))
        )

    @property
    def key(self) -> str:
        """Key of such devices in any form: `a100`, `rtx-3090`, `a100-mig-1g.5gb`."""
        return f"{self.model}-mig-{self.part}" if self.part else self.model

    def may_be(self, other: CardName) -> bool:
        """Return whether two names can mean the same card; `sxm` matches any SXM form."""
        forms = self.form or other.form or "", other.form or self.form or ""
        sizes = {self.memory_gb, other.memory_gb} - {None}
        return (
            (self.model, self.part) == (other.model, other.part)
            and len(sizes) < 2
            and (forms[0].startswith(forms[1]) or forms[1].startswith(forms[0]))
        )


CONTEXT_MIB: Mapping[Phase, float] = {Phase.TRAIN: 760.0, Phase.INFER: 686.0}
"""Memory of a process outside of PyTorch's allocator: CUDA's context and loaded kernels.

Measured on an H100 with CUDA 13 and PyTorch 2.11: 758 to 762 and 686 MiB in each precision and
layout (examples/data/h100). An A100 needs as much (docs/research/memory.md).
"""


WATTS_PER_TFLOP = {
    (7, 0): 3.0, (7, 5): 3.0, (8, 0): 1.4, (8, 6): 2.3, (8, 9): 1.35, (9, 0): 0.95,
    (10, 0): 0.65, (12, 0): 0.9,
}  # fmt: skip
"""Power of products in 16 bits by compute capability, in W per TFLOP/s that is reached.

By large products of V100, Titan RTX (Sailor), A100, H100 (aiconfigurator), and by steps of an
RTX PRO 6000 Max-Q (timm). 8.6, 8.9 and 10.0 are rough: the ratio of their processes to the others.
"""


@dataclass(frozen=True, kw_only=True)
class Card:
    """Specification of a card, or of a part by MIG; None for unknown figures."""

    name: CardName
    half_tflops: float
    """Dense products in fp16 with fp32 accumulation; from Ampere on the same in bf16."""
    tf32_tflops: float | None
    """Dense products of fp32 numbers in TF32; None before Ampere."""
    fp32_tflops: float
    bandwidth_gbs: float
    memory_gb: float
    memory_mib: float | None
    """Observed memory of a CUDA process."""
    cache_mib: float
    """L2 cache."""
    units: int
    """Streaming multiprocessors."""
    power_w: float | None
    """Factory limit; None also for parts, which share the limit of their card."""
    capability: tuple[int, int]
    """Compute capability of CUDA."""
    units_of_part: tuple[tuple[int, int], ...] = ()
    """Streaming multiprocessors of a part by its compute slices."""

    @property
    def has_bf16(self) -> bool:
        return self.capability >= (8, 0)

    def can_run(self, precision: Precision, execution: Execution) -> bool:
        """Return whether it has the arithmetic of a precision, and Triton compiles for it."""
        has_arithmetic = self.has_bf16 or not precision.needs_bf16
        is_eager = execution is Execution.EAGER
        return has_arithmetic and (is_eager or has_triton(self.capability, precision))

    @property
    def has_hbm(self) -> bool:
        """Return whether the chip has stacked memory, as NVIDIA's largest of each generation."""
        major, minor = self.capability
        return major == 10 or (minor == 0 and major < 10)

    @property
    def tensor_share(self) -> float | None:
        """Share of the peak of tensor cores that the power limit allows; None if unknown."""
        needed = WATTS_PER_TFLOP.get(self.capability)
        if needed is None or self.power_w is None:
            return None
        return min(self.power_w / (needed * self.half_tflops), 1.0)

    def library_workspace_mib(self, phase: Phase) -> float:
        """Return the workspaces of cuBLAS in PyTorch's allocator, in MiB.

        One for the thread of the forward pass and one for that of the backward pass: 32 MiB each on
        Hopper and data-center Blackwell, (2 * 4096 + 8 * 16) KiB elsewhere, and 1 MiB of cuBLASLt
        (aten/src/ATen/cuda/CublasHandlePool.cpp; observed on an H100: examples/data/h100/traces).
        """
        threads = 2 if phase is Phase.TRAIN else 1
        return threads * (32.0 if self.capability[0] in {9, 10} else 8.125) + 1.0

    def part(self, profile: str) -> Card | None:
        """Return a part by MIG, such as `1g.5gb`; None for unknown sizes."""
        match = _PROFILE.fullmatch(profile)
        by_slices = dict(self.units_of_part)
        units = by_slices.get(int(match[1] or match[2])) if match else None
        if match is None or units is None:
            return None
        memory_gb = float(match[3])
        slices = 8 if 7 in by_slices else 4
        of_memory = min(max(round(memory_gb / self.memory_gb * slices), 1), slices) / slices
        of_units = units / self.units
        return replace(
            self,
            name=replace(self.name, part=profile),
            half_tflops=self.half_tflops * of_units,
            tf32_tflops=self.tf32_tflops and self.tf32_tflops * of_units,
            fp32_tflops=self.fp32_tflops * of_units,
            bandwidth_gbs=self.bandwidth_gbs * of_memory,
            memory_gb=memory_gb,
            memory_mib=None,
            cache_mib=self.cache_mib * of_memory,
            units=units,
            power_w=None,
            units_of_part=(),
        )


def read_name(name: str) -> CardName:
    """Return the facts in a name of NVML, a label of Ray or a device's key."""
    words = _SERIES.sub(r"\1 \2 \3", name.strip().lower())
    part = _PART.search(words)
    if part is not None:
        words = words[: part.start()]
    model: list[str] = []
    form, memory_gb = None, None
    for word in re.split(r"[^a-z0-9]+", words):
        size = _MEMORY.fullmatch(word)
        if not word or word in _NO_NAME or _HBM.fullmatch(word):
            continue
        if _FORM.fullmatch(word):
            form = word
        elif size is not None:
            memory_gb = int(size[1])
        else:
            model.append(word)
    return CardName(
        model="-".join(model), form=form, memory_gb=memory_gb, part=part and part[1].lower()
    )


def card_of(name: str, memory_mib: float | None = None) -> Card | None:
    """Return the card or part of this name; None if it is not in the catalogue.

    Args:
        name: Any name of the card. Without form and memory, the first row is meant.
        memory_mib: Memory as NVML reports it, if known.
    """
    wanted = read_name(name)
    whole = replace(wanted, part=None)
    rows = [card for card in cards() if whole.may_be(card.name)]
    if memory_mib is not None and wanted.part is None:
        rows = [r for r in rows if abs(memory_mib / 1024 / r.memory_gb - 1) < _MEMORY_TOLERANCE]
    if wanted.part is None:
        return rows[0] if rows else None
    parts = [(row, part) for row in rows if (part := row.part(wanted.part)) is not None]
    # 1g.10gb is the eighth of 80 GB rather than the quarter of 40.
    parts.sort(key=lambda pair: not _is_usual(*pair))
    return parts[0][1] if parts else None


def most_similar(name: str, models: Iterable[str]) -> str | None:
    """Return the model of the card whose kernels are most similar to those of a card, or None.

    Libraries have kernels by generation, and chips with stacked memory (HBM) have several times the
    bandwidth and tensor arithmetic per multiprocessor of others. Of two cards with the same chip, a
    GeForce is sold with half of the tensor arithmetic, which it reaches. The other one reaches a
    smaller share of its peak.
    """
    card = card_of(name)

    def distance(model: str) -> tuple[bool, bool, int, float, float]:
        other = card_of(model)
        if card is None or other is None:
            return True, True, 0, math.inf, math.inf
        (major, minor), (own_major, own_minor) = other.capability, card.capability
        generations = abs(major - own_major + (minor - own_minor) / 10)
        faster = abs(math.log(other.bandwidth_gbs / card.bandwidth_gbs))
        tensors = other.half_tflops / other.fp32_tflops / (card.half_tflops / card.fp32_tflops)
        return (
            other.has_hbm != card.has_hbm,
            (other.tf32_tflops is None) != (card.tf32_tflops is None),
            abs(round(math.log2(tensors))),
            generations,
            faster,
        )

    similar = min(models, key=distance, default=None)
    return None if similar is None or distance(similar)[0] else similar


def card_name(device: str, environments: Iterable[Mapping[str, object]]) -> str:
    """Return the full name of the card with a device's key: `a100 sxm4 80gb` for `a100`.

    The full name can be used as a key, and identifies one row of the catalogue. If measurements
    name no listed card or several, the key is returned.

    Args:
        device: The key.
        environments: Environments of measurements with this key (`device_name`,
            `device_memory_mib`).
    """
    names = set()
    for environment in environments:
        name, memory_mib = environment.get("device_name"), environment.get("device_memory_mib")
        known_mib = memory_mib if isinstance(memory_mib, int | float) else None
        if name or known_mib:
            card = card_of(str(name or device), known_mib)
            names.add(str(card.name) if card else device)
    return names.pop() if len(names) == 1 else device


def process_memory_mib(device: str, phase: Phase) -> float:
    """Return the memory of a process in addition to its step, on any GPU.

    It is CUDA's context with the loaded kernels, and the workspaces of cuBLAS.
    """
    card = card_of(rank_key(device).member)
    return CONTEXT_MIB[phase] + (0.0 if card is None else card.library_workspace_mib(phase))


def cards() -> tuple[Card, ...]:
    """Return all cards in the catalogue's order, the user's own last.

    Raises:
        InputError: The file of the user's own cards is invalid.
    """
    own = data_folder() / OWN_CARDS
    try:
        modified_ns = own.stat().st_mtime_ns
    except OSError:
        return _read_cards(_FILE)
    listed, added = _read_cards(_FILE), _read_cards(own, modified_ns)
    names = {card.name for card in listed}
    for card in added:
        if card.name in names:
            raise InputError(
                f"{own} has {card.name}, which is in the catalogue; give it another name"
            )
    return listed + added


@lru_cache(maxsize=8)
def _read_cards(path: Path, _modified_ns: int = 0) -> tuple[Card, ...]:
    """Return the cards in a file, read again when it was modified."""
    table, columns = _table(path), _table(_FILE).fieldnames or ()
    if unknown := sorted({*(table.fieldnames or ())} - {*columns}):
        raise InputError(
            f"{path} has the unknown column {unknown[0]!r}; {nearest(unknown[0], columns)}"
        )
    read: list[Card] = []
    for row in table:
        try:
            read.append(_card(row))
        except ValueError as error:
            raise InputError(
                f"card {row.get('model')!r} in {path} cannot be read: {one_line(error)}; give the "
                f"columns of {_FILE}"
            ) from error
    return tuple(read)


def _table(path: Path) -> csv.DictReader[str]:
    text = read_plain(path, _MAX_BYTES).decode("utf-8-sig", errors="replace")
    return csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))


def card_keys() -> tuple[str, ...]:
    """Return the keys of all cards in the catalogue's order."""
    return tuple(dict.fromkeys(card.name.key for card in cards()))


def ray_labels(device: str) -> tuple[str, ...]:
    """Return the values of `ray.io/accelerator-type` that nodes with this device may have.

    Ray derives it from NVML's name: `A100`, `RTX-A6000`, but `GeForce-RTX-3090`, and `RTX-6000` for
    cards of three generations. The profiler on the node checks which card it is.
    """
    model = read_name(device).model
    labels = [device.upper().replace(" ", "-"), model.upper()]
    if _GEFORCE.match(model):
        words = model.split("-")
        labels.append(
            "-".join(["GeForce", *(w.capitalize() if w == "ti" else w.upper() for w in words)])
        )
    if numbered := _NUMBERED.match(model):
        labels.append(numbered[0].upper())
    return tuple(dict.fromkeys(labels))


def _is_usual(whole: Card, part: Card) -> bool:
    match = _PROFILE.fullmatch(part.name.part or "")
    share = _USUAL_SHARE.get(int(match[2])) if match else None
    return share is not None and abs(part.memory_gb / whole.memory_gb / share - 1) < 0.1


def _card(row: Mapping[str, str]) -> Card:
    """Return the card in a row; raise ValueError if a figure is missing or invalid."""

    def text(column: str) -> str:
        if not row.get(column):
            raise ValueError(f"it has no {column}")
        return row[column]

    def number(column: str) -> float:
        value = float(text(column))
        if not 0 < value < math.inf:
            raise ValueError(f"{column} is {row[column]}, not a positive number")
        return value

    def known(column: str) -> float | None:
        return number(column) if row.get(column) else None

    model = read_name(text("model")).model
    capability = text("capability")
    major, has_minor, minor = capability.partition(".")
    if not (has_minor and major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"capability is {capability!r}; give MAJOR.MINOR, such as 9.0")
    memory_gb = int(number("memory_gb"))
    of_part = (pair.split(":") for pair in (row.get("mig_units") or "").split())
    return Card(
        name=CardName(model=model, form=row.get("form") or None, memory_gb=memory_gb),
        half_tflops=number("half_tflops"),
        tf32_tflops=known("tf32_tflops"),
        fp32_tflops=number("fp32_tflops"),
        bandwidth_gbs=number("bandwidth_gbs"),
        memory_gb=memory_gb,
        memory_mib=known("memory_mib"),
        cache_mib=number("cache_mib"),
        units=int(number("units")),
        power_w=known("power_w"),
        capability=(int(major), int(minor)),
        units_of_part=tuple((int(slices), int(count)) for slices, count in of_part),
    )


_FURTHER_GPUS = (
    "a100x", "a10m", "a30x", "k40", "k80", "l2", "l40g", "m10", "m40",
    "m60", "p4", "p40", "p6", "t4g",
)  # fmt: skip
"""NVIDIA's server GPUs outside of the catalogue; they are not misspellings of others."""

_TOO_MANY = ("rtx", "gtx")
"""Prefixes of names of cards that no list has completely."""

_CLOSE = 0.75
"""Cutoff of difflib, above its default of 0.6, as names of cards are similar."""
_SIMULATED = "simulated:"


def nearest_device(key: str, offered: Iterable[str]) -> str | None:
    """Return the device that a misspelled key probably means; None for a plausible key.

    Args:
        key: Name of a GPU, or a simulated one.
        offered: Further valid keys.
    """
    if key.startswith(_SIMULATED):
        near = None if card_of(key) else _nearest(key.removeprefix(_SIMULATED), card_keys())
        return f"{_SIMULATED}{near}" if near else None
    if key.startswith(_TOO_MANY) or (key == key.lower() and card_of(key)):
        return None
    return _nearest(key, {*card_keys(), *_FURTHER_GPUS, *offered})


def _nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the most similar known name; None if it is known, or similar to none."""
    ordered = sorted(known)
    if name in ordered:
        return None
    near = difflib.get_close_matches(name.lower(), ordered, n=1, cutoff=_CLOSE)
    return near[0] if near else None


USABLE_SHARE = 0.94
"""Usable share of a device's memory; the rest is lost to fragmentation.

Most published runs that reached 38,000 of an A100's 40,536 MiB ran out of memory.
"""


def has_triton(capability: tuple[int, int], precision: Precision) -> bool:
    """Return whether Triton supports GPUs of a compute capability in a precision.

    Inductor refuses GPUs below 7.0. Triton's own list begins with 8.0; below it, only kernels
    without half precision are expected to compile.
    """
    return capability >= ((7, 0) if precision.is_fp32 else (8, 0))


def possible_runs(device: str) -> frozenset[tuple[Precision, Execution]]:
    """Return the precisions and executions that can be measured on a device.

    All of them for unknown devices. Compiled steps are neither simulated nor run by several ranks.
    """
    card = None if is_cpu_device(device) else card_of(rank_key(device).member)
    only_eager = device.startswith(_SIMULATED) or rank_key(device).ranks > 1
    every = itertools.product(Precision, [Execution.EAGER] if only_eager else Execution)
    return frozenset(run for run in every if card is None or card.can_run(*run))


def arithmetic_of(device: str, precision: Precision) -> Precision:
    """Return the precision that a device computes in: without TF32, the three of fp32 are one."""
    spec = known_spec(device)
    return precision if spec is None or spec.tf32_tflops else precision.types


def card_capacity_mib(device: str) -> float | None:
    """Return the memory of a GPU or of its part; None for other devices.

    It is the observed memory of a process, or else that of the data sheet.
    """
    card = None if is_cpu_device(device) else card_of(device)
    if card is None:
        return None
    return card.memory_mib or 1024.0 * card.memory_gb


def device_capacity_mib(device: str) -> float | None:
    """Return the memory of a GPU, or for CPU cores that of this machine's processes."""
    key = rank_key(device)
    if is_cpu_device(device):
        return procfs.allowed_memory_mib() / key.ranks
    return card_capacity_mib(key.member)


WIDE_TFLOPS = 0.3
"""Peak in fp32 of one multiprocessor: 64 lanes have 0.16 to 0.2, 128 have 0.35 to 0.65."""


@dataclass(frozen=True)
class DeviceSpec:
    """Speed of a device according to its data sheet, and memory of its processes."""

    half_tflops: float
    """Peak of dense products in 16 bits."""
    full_tflops: float
    """Peak of products in fp32 without TF32, PyTorch's default for matrix products."""
    bandwidth_gbs: float
    cache_mib: float
    """Size of the last-level cache."""
    units: int
    """Number of streaming multiprocessors, or of CPU threads."""
    launch_us: float = 2.0
    """Shortest time of a kernel on the device."""
    dispatch_us: float = 8.0
    """Host time per operator."""
    process_mib: float = CONTEXT_MIB[Phase.TRAIN]
    """Memory of a training process without its tensors: context, libraries, workspaces."""
    fragments: float = 1.0
    """Share of the gaps between blocks of CUDA's allocator that also occurs here."""
    tf32_tflops: float | None = None
    """Peak of products in TF32; None without TF32."""

    @property
    def has_tensor_cores(self) -> bool:
        """Return whether products in 16 bits have units of their own, from Volta on.

        Cards without them, such as Pascal's and GTX 16, have at most twice the peak of fp32.
        """
        return self.tf32_tflops is not None or self.half_tflops > 3 * self.full_tflops

    @property
    def lanes_tflops(self) -> float:
        """Peak in fp32 next to the arithmetic of indices.

        In multiprocessors of 128 lanes, half of them do either whole numbers or fp32 (NVIDIA's
        whitepapers of GA102 and AD102).
        """
        is_wide = self.full_tflops / self.units > WIDE_TFLOPS
        return self.full_tflops / (2 if is_wide else 1)

    def products_at_peak_ms(self, kernels: Kernels, precision: Precision) -> float:
        """Return the time that the products of a step would take at the device's peak, in ms.

        Divided by the step time, this is the model FLOPs utilization (MFU; Chowdhery et al., PaLM,
        2022, appendix B), with the peak of each product's own data type.
        """
        table = kernels.table
        tf32 = self.uses_tf32(table.kinds, table.half, precision)
        tflops = np.select(
            [table.half, tf32], [self.half_tflops, self.tf32_tflops or 0.0], self.full_tflops
        )
        flops = table.counts * kernels.sizes[:, Size.FLOPS] * (table.kinds <= KernelKind.ATTENTION)
        return float((flops / tflops).sum() / 1e9)

    def uses_tf32(
        self, kinds: npt.NDArray[np.integer], half: _BoolArray, precision: Precision
    ) -> _BoolArray:
        """Return which of n kernels compute in TF32; depthwise convolutions never do."""
        if self.tf32_tflops is None or precision is Precision.FP32_STRICT:
            return np.zeros_like(half)
        allowed = kinds <= KernelKind.GROUPED
        if precision is Precision.TF32:
            allowed |= (kinds < KernelKind.ATTENTION) & (kinds != KernelKind.DEPTHWISE)
        return ~half & allowed


# Memory above the baseline of a warm CPU process consists mostly of tensors.
CPU = DeviceSpec(
    0.06, 0.06, 20, 32, 2, launch_us=5.0, dispatch_us=5.0, process_mib=5.0, fragments=0.1
)


def spec_of(device: str) -> DeviceSpec:
    """Return the specification of a device key such as `a100` or `cpu-2t`.

    Raises:
        InputError: The catalogue does not list the device.
    """
    spec = known_spec(device)
    if spec is None:
        raise InputError(
            f"nothing is known of device {device!r}, so its step times cannot be simulated; add "
            "a line of its data sheet to profiler/devices/catalogue.csv"
        )
    return spec


def known_spec(device: str) -> DeviceSpec | None:
    """Return the specification of a device, or None if the catalogue does not list it."""
    if device.startswith("cpu"):
        return CPU
    card = card_of(rank_key(device).member)
    if card is None:
        return None
    return DeviceSpec(
        half_tflops=card.half_tflops,
        full_tflops=card.fp32_tflops,
        bandwidth_gbs=card.bandwidth_gbs,
        cache_mib=card.cache_mib,
        units=card.units,
        tf32_tflops=card.tf32_tflops,
        process_mib=process_memory_mib(device, Phase.TRAIN),
    )
