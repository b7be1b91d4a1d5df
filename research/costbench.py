"""Published predictors and this one on the same rows of published sheets (docs/compared_with.md).

A tool predicts a row or fails; failures count against its coverage. Some peers are columns of the
sheet, others are optional packages (`research.peers.cost_models` says how to install them):

    PYTHONPATH=PEERS python -m research costbench
"""

from __future__ import annotations

import importlib.util
import math
import signal
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer

from research.data import data_folder
from research.held_out import Array, robust_line
from research.importers import hugging_face
from research.peers import mem_tracker
from research.peers.cost_models import (
    MEMORY,
    NAN,
    PROMPT,
    STEP,
    TENSORS,
    TOKEN,
    Figure,
    Figures,
    aiconfigurator,
    bigscience_run,
    kitsune_mib,
    llm_analysis,
    predicted_run,
    simumax_run,
)
from research.priors import decoding, neusight_models
from trappm.extensions.transformers.generation import generate
from trappm.extensions.transformers.model_heads import transformer_times
from trappm.prediction.fit import simulated_interval
from trappm.profiler.devices.catalogue import process_memory_mib
from trappm.profiler.errors import InputError, nearest, one_line
from trappm.profiler.memory.simulation import LoopPreset, memory_of
from trappm.profiler.records import Optimizer, Phase, Precision
from trappm.profiler.trace import trace

LIMIT_S = 60
"""Time limit of one prediction."""
LINE_ROWS, LINE_FLOOR = 8, 0.005
"""Least number of rows of a line, and least relative error in its weights."""
INFER, MIB = "inference, ms", "GPU memory, MiB"
HARDWARE_SPREAD = "0.07 to 2"
"""Standard deviation in percent of the time of the same program over 39 H100 nodes: ResNet-50 in
TF32, and BERT (published; `shared/data/new/README.md`)."""


@dataclass(frozen=True)
class Tool:
    """A predictor of a sheet's rows, or the reason why it is not run."""

    name: str
    predict: Callable[[Any], Figures] | str
    package: str = ""
    """Optional package that must be installed."""

    def figures(self, row: Any) -> Figures:
        """Predict a row within `LIMIT_S`, in the main thread.

        Raises:
            InputError: The tool is not run or not installed.
            TimeoutError: It takes too long.
            Exception: It fails.
        """
        if isinstance(self.predict, str):
            raise InputError(f"not run: {self.predict}")
        if self.package and importlib.util.find_spec(self.package) is None:
            raise InputError(f"not installed: {self.package}")
        signal.signal(signal.SIGALRM, _stop)
        signal.alarm(LIMIT_S)
        try:
            return self.predict(row)
        finally:
            signal.alarm(0)


def _stop(*_: object) -> None:
    raise TimeoutError(f"no result within {LIMIT_S} s")


@dataclass(frozen=True)
class PublishedSheet:
    """A published sheet and the tools that predict its rows."""

    file: str
    """File in the manifest."""
    read: Callable[[Path], pd.DataFrame]
    """Returns the rows of a file."""
    quantities: Mapping[str, str]
    """Column of each measured quantity; NaN where a row has none."""
    tools: Sequence[Tool]
    """The first one is TraPPM."""
    card: str
    """Column of the card, or the card of all rows."""
    model: str
    """Column of the model's name."""
    fitted: str = ""
    """Constants that were fitted to these rows."""

    def rows(self, data: Path) -> pd.DataFrame:
        return self.read(data / self.file)


@dataclass(frozen=True)
class ToolOutcome:
    """Prediction of one quantity of a row by one tool, or its failure."""

    quantity: str
    tool: str
    row: int
    measured: float
    figure: Figure
    seconds: float
    failure: str


def outcomes(sheet: PublishedSheet, rows: pd.DataFrame) -> Iterable[ToolOutcome]:
    """Run every tool of a sheet on every row."""
    for tool in sheet.tools:
        for number, row in enumerate(rows.itertuples(index=False)):
            figures: Figures = {}
            failure, begun = "no prediction", time.perf_counter()
            try:
                figures = tool.figures(row)
            except Exception as error:  # peers fail in many ways, which the table reports
                failure = one_line(error)
            seconds = time.perf_counter() - begun
            for quantity, column in sheet.quantities.items():
                measured, figure = float(getattr(row, column)), figures.get(quantity, Figure())
                if not math.isnan(measured):
                    reason = failure if math.isnan(figure.value) else ""
                    yield ToolOutcome(
                        quantity, tool.name, number, measured, figure, seconds, reason
                    )


def line_error(predicted: Array, measured: Array) -> float:
    """Return the mean error in percent of a line through half of the rows, on the other half.

    It judges tools that leave out a part, such as CUDA's context, by what they explain.
    """
    if len(measured) < LINE_ROWS:
        return NAN
    errors, first = np.zeros(len(measured)), np.arange(len(measured)) % 2 == 0
    for judged in (first, ~first):
        offset, factor = robust_line(predicted[~judged], measured[~judged], LINE_FLOOR)
        errors[judged] = np.abs((offset + factor * predicted[judged]) / measured[judged] - 1)
    return float(100 * errors.mean())


def summary(found: Iterable[ToolOutcome]) -> pd.DataFrame:
    """Return coverage, errors in percent, seconds and failures by quantity and tool.

    `common %` and `line %` are mean errors on the rows that every tool with a prediction
    has predicted; the latter is that of a line (`line_error`).
    """
    rows = pd.DataFrame([{**vars(outcome), **vars(outcome.figure)} for outcome in found])
    rows["error"] = 100 * (rows.value / rows.measured - 1).abs()
    rows["inside"] = (100.0 * rows.measured.between(rows.low, rows.high)).where(rows.low.notna())
    lines = []
    for quantity, group in rows.groupby("quantity", sort=False):
        errors = group.pivot(index="row", columns="tool", values="error")
        common = errors.dropna(axis="columns", how="all").dropna().index
        for tool, own in group.groupby("tool", sort=False):
            predicted, failures = own[own.failure == ""], own.failure[own.failure != ""]
            shared = predicted[predicted.row.isin(common)]
            lines.append(
                {
                    "quantity": quantity,
                    "tool": tool,
                    "predicted": f"{len(predicted)} of {len(own)}",
                    "mean %": predicted.error.mean(),
                    "median %": predicted.error.median(),
                    "common %": shared.error.mean(),
                    "line %": line_error(shared.value.to_numpy(), shared.measured.to_numpy()),
                    "common rows": len(shared),
                    "inside %": predicted.inside.mean(),
                    "s": round(predicted.seconds.mean(), 3),
                    "first failure": next(iter(failures), ""),
                }
            )
    return pd.DataFrame(lines)


def by_card(
    name: str, sheet: PublishedSheet, rows: pd.DataFrame, of_sheet: Iterable[ToolOutcome]
) -> pd.DataFrame:
    """Return a line per quantity and card: rows, mean errors in percent, spread of the hardware.

    Errors of all tools are of the rows that TraPPM predicts, and cards without any are left out.
    """
    of_row = rows[sheet.card] if sheet.card in rows else pd.Series(sheet.card, index=rows.index)
    cards = of_row.astype(str).str.lower().tolist()
    table = pd.DataFrame(
        {
            "quantity": outcome.quantity,
            "card": cards[outcome.row],
            "row": outcome.row,
            "tool": outcome.tool,
            "error": 100 * abs(outcome.figure.value / outcome.measured - 1),
        }
        for outcome in of_sheet
    )
    ours, *peers = (tool.name for tool in sheet.tools)
    lines = []
    for (quantity, card), group in table.groupby(["quantity", "card"], sort=False):
        errors = group.pivot(index="row", columns="tool", values="error")
        errors = errors[errors[ours].notna()]
        if errors.empty:
            continue
        means = errors.mean().dropna()
        is_known = str(card).startswith("h100")
        lines.append(
            {
                "sheet": name,
                "card": card,
                "quantity": quantity,
                "rows": len(errors),
                "ours %": means.get(ours, NAN),
                "peers %": ", ".join(f"{p} {means[p]:.3g}" for p in peers if p in means),
                "hardware %": HARDWARE_SPREAD if is_known and str(quantity).endswith("ms") else "",
            }
        )
    return pd.DataFrame(lines)


def markdown(table: pd.DataFrame) -> str:
    """Return a table in Markdown, with numbers of three significant digits."""

    def cell(value: object) -> str:
        if isinstance(value, float):
            return "" if math.isnan(value) else f"{float(f'{value:.3g}'):g}"
        return str(value).replace("|", "/")

    lines = [list(table.columns), ["---"] * table.shape[1]]
    lines += [[cell(value) for value in row] for row in table.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def published(columns: Mapping[str, str]) -> Callable[[Any], Figures]:
    """Return a predictor that reads the sheet's own predictions, given a column per quantity."""
    return lambda row: {q: Figure(float(getattr(row, name))) for q, name in columns.items()}


def read_neusight(file: Path) -> pd.DataFrame:
    sheet = pd.read_csv(file)
    is_inference = sheet.phase == "infer"
    times = sheet.e2e_ms
    return sheet.assign(infer=times.where(is_inference), train=times.where(~is_inference))


def neusight_ours(row: Any) -> Figures:
    rows = neusight_models.predicted(pd.DataFrame([row._asdict()]))
    if rows.empty:
        raise InputError("an AMD GPU, several GPUs, fused kernels or a routed model")
    known = transformer_times(row.device.lower(), Precision.FP32)
    factors = (1.0, NAN, NAN) if known is None else (1.0, *known.errors)
    figure = Figure(*(factor * rows.predicted.iloc[0] for factor in factors))
    return {INFER: figure, STEP: figure}


def read_bigscience(file: Path) -> pd.DataFrame:
    """Return runs with memory and a known shape; the source doubts the shape of 104B."""
    sheet = pd.read_csv(file)
    sheet = sheet[sheet.source.str.startswith("bigscience") & (sheet.status == "ok")]
    sheet = sheet[sheet.suspect.isna() & ~sheet.model.str.contains("104B")]
    sheet = sheet.dropna(subset=["mem_gb", "hidden", "layers", "heads", "tp", "pp", "dp"])
    cards = {card: sheet.mem_gb.where(sheet.device.str.startswith(card)) for card in MEMORY}
    return sheet.assign(**cards)


def read_timm(file: Path) -> pd.DataFrame:
    """Return steps of MemTracker's page at batch 32."""
    sheet = pd.read_csv(file)
    sheet = sheet.merge(pd.read_csv(file.with_name("a100_40gb_train_memory_quality.csv")))
    sheet = sheet[(sheet["class"] == "usable") & (sheet.batch_size == 32)]
    return sheet[sheet.architecture.isin(mem_tracker.MODELS)]


def timm_ours(row: Any) -> Figures:
    """Simulate the memory of a step; no head learned from labels has a part in it."""
    memory = memory_of(
        trace(row.architecture, 224), row.batch_size, Optimizer.SGD, LoopPreset.TUNED
    )
    process_mib = process_memory_mib("a100-40gb", Phase.TRAIN)
    return {MIB: Figure(*simulated_interval(memory.reserved_with_workspace_mib + process_mib))}


def read_generation(file: Path) -> pd.DataFrame:
    sheet = pd.read_csv(file)
    sheet.columns = pd.Index([str(name).split(" (")[0].replace(" ", "_") for name in sheet])
    return sheet.assign(prompt_ms=1000 * sheet.Prefill_Latency)


def generation_ours(row: Any) -> Figures:
    if row.Experiment_Name not in decoding.NAMES:
        raise InputError("weights in 4 bits are not covered")
    result = generate(
        decoding.NAMES[row.Experiment_Name], prompt=decoding.PROMPT, tokens=decoding.TOKENS,
        batch_size=row.Per_Process_Batch_Size, device=decoding.DEVICE,
    )  # fmt: skip
    prompt = Figure(result.first_token_ms, *result.first_token_interval_ms)
    return {PROMPT: prompt, TOKEN: Figure(result.token_ms, *result.token_interval_ms)}


NO_PACKAGE = "not on PyPI, and published predictions are of B200s only"
SHEETS: Mapping[str, PublishedSheet] = {
    "neusight": PublishedSheet(
        "new/neusight_and_its_peers_predictions.csv.gz",
        read_neusight,
        {INFER: "infer", STEP: "train"},
        [
            Tool("TraPPM", neusight_ours),
            *(
                Tool(name, published(dict.fromkeys((INFER, STEP), f"{column}_all_e2e_latency")))
                for name, column in {
                    "NeuSight": "neusight", "Habitat": "habitat", "Li et al.": "micro",
                    "roofline": "roofline",
                }.items()
            ),
        ],
        card="device", model="model",
        fitted="NeuSight's kernels, the interval and the choice of L4's constants",
    ),
    "simumax": PublishedSheet(
        "new/simumax_b200_training.csv.gz",
        pd.read_csv,
        {STEP: "real_ms", TENSORS: "real_alloc_gib"},
        [
            Tool("TraPPM", lambda row: predicted_run(simumax_run(row))),
            Tool("SimuMax", published({STEP: "perf_ms", TENSORS: "perf_alloc_gib"})),
            Tool("llm-analysis", lambda row: llm_analysis(simumax_run(row)), "llm_analysis"),
        ],
        card="b200", model="model",
        fitted="choice of the host's time, per operator or per kernel of Megatron-DeepSpeed",
    ),
    "bigscience": PublishedSheet(
        "nodes/llm_training.csv",
        read_bigscience,
        {name: card for card, name in MEMORY.items()},
        [
            Tool("TraPPM", lambda row: predicted_run(bigscience_run(row))),
            Tool("llm-analysis", lambda row: llm_analysis(bigscience_run(row)), "llm_analysis"),
            Tool("SimuMax", NO_PACKAGE),
        ],
        card="device", model="model", fitted="bytes per parameter and the interval",
    ),
    "timm": PublishedSheet(
        "a100_40gb_train_memory.csv",
        read_timm,
        {MIB: "max_gpu_memory_mib"},
        [
            Tool("TraPPM, simulation", timm_ours),
            Tool("MemTracker", lambda row: {MIB: Figure(
                mem_tracker.tracked_mib(row.architecture, 224, row.batch_size))}),
            Tool("FakeTensor", published({MIB: "faketensor_mib"})),
            Tool("torch-kitsune", lambda row: {MIB: Figure(
                kitsune_mib(row.architecture, 224, row.batch_size))}, "kitsune"),
        ],
        card="a100-40gb", model="architecture", fitted="workspaces, on half of the architectures",
    ),
    "generation": PublishedSheet(
        "new/llama2_generate_a100_80gb.csv.gz",
        read_generation,
        {PROMPT: "prompt_ms", TOKEN: "ms_per_token"},
        [
            Tool("TraPPM", generation_ours),
            Tool("aiconfigurator", aiconfigurator, "aiconfigurator"),
        ],
        card=decoding.DEVICE, model="Model", fitted="three constants",
    ),
    "fine-tuning": PublishedSheet(
        "new/fms_llm_fine_tuning_a100_80gb.csv.gz",
        hugging_face.read_fine_tuning,
        {hugging_face.ONE_GPU: "one", hugging_face.FSDP: "several"},
        [Tool("TraPPM", hugging_face.fine_tuning_ours)],
        card="card", model="model", fitted="the interval",
    ),
    "short-passes": PublishedSheet(
        "nodes/llm_training.csv",
        hugging_face.read_short_passes,
        {hugging_face.ONE_GPU: "one", hugging_face.FSDP: "several"},
        [Tool("TraPPM", hugging_face.short_passes_ours)],
        card="card", model="model",
        fitted="times of the host: per operator, per unpacked weight and per block of FSDP",
    ),
    "compiled": PublishedSheet(
        "new/compile_pairs_v100_a100_t4.csv.gz",
        hugging_face.read_pairs,
        {hugging_face.EAGER: "eager_ms", hugging_face.COMPILED: "compiled_ms"},
        [Tool("TraPPM", hugging_face.pairs_ours)],
        card="card", model="model",
        fitted="time of the host per operator, the interval of eager steps, and the forms of tiles "
        "and of the compiled ratio in fp32",
    ),
}  # fmt: skip


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Sheets (default: all): {', '.join(SHEETS)}.")
    ] = None,
) -> None:
    """Print coverage, errors and seconds of each tool on each sheet, and a table of all cards."""
    warnings.filterwarnings("ignore")
    for name in names or SHEETS:
        if name not in SHEETS:
            raise InputError(f"Unknown sheet {name!r}; {nearest(name, list(SHEETS))}")
    cards = []
    for name in names or SHEETS:
        sheet = SHEETS[name]
        rows = sheet.rows(data_folder())
        of_sheet = list(outcomes(sheet, rows))
        cards.append(by_card(name, sheet, rows, of_sheet))
        print(f"\n## {name}\n\n{markdown(summary(of_sheet))}", flush=True)
        if sheet.fitted:
            print(f"\n*In the fit*: {sheet.fitted}.")
    print(f"\n## By card\n\n{markdown(pd.concat(cards))}")
