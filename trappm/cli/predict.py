"""`trappm predict`, `compare` and `scale`: what a step costs, where, and on how many GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from trappm.cli import options, shell
from trappm.cli.options import AsJson, print_json, with_options
from trappm.profiler.errors import InputError

if TYPE_CHECKING:
    from trappm.prediction.prediction import Prediction

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL",
        help="timm architectures, hf: names, or ONNX files.",
        autocompletion=shell.models,
    ),
]
DeviceName = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        help="A device by any of its names, again for more, or all; by default the snapshot's.",
        autocompletion=shell.devices,
    ),
]
Phase = Annotated[str, typer.Option(help="train or infer.")]
Precision = Annotated[
    str | None, typer.Option(help="fp32, amp-fp16, amp-bf16 or bf16; as most labels.")
]
MemoryFormat = Annotated[str | None, typer.Option(help="contiguous or channels-last.")]
Optimizer = Annotated[str | None, typer.Option(help="sgd, momentum, adam or adamw.")]
SnapshotName = Annotated[
    str | None,
    typer.Option(
        "--snapshot",
        help="An id, alias or folder; by default the device's latest, then default.",
        autocompletion=shell.snapshots,
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Of a whole run, with --samples.")]
Samples = Annotated[int | None, typer.Option(help="Of one epoch.")]
Carbon = Annotated[float | None, typer.Option(help="Of the electricity, in g CO2 per kWh.")]
PowerLimit = Annotated[
    float | None,
    typer.Option("--power-limit", help="Of the card, in W; by default as delivered."),
]
Nodes = Annotated[int, typer.Option(min=1, help="With --gpus: so many nodes.")]
Accumulation = Annotated[int, typer.Option(min=1, help="Passes before each optimizer step.")]
Network = Annotated[
    float | None,
    typer.Option("--network", help="Between nodes, in Gbit/s; by default of the usual node."),
]

_COUNTS = "1,2,4,8,16"
GpuCounts = Annotated[
    str | None, typer.Option("--gpus", help=f"In all, with commas; {_COUNTS} by default.")
]
Strategies = Annotated[
    list[str] | None, typer.Option(help="ddp, fsdp or tp, again for more; by default all.")
]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What step it is about: the options that `predict`, `compare` and `scale` have in common."""

    batch_size: options.BatchSize
    input_size: options.InputSize
    sequence_length: options.SequenceLength
    device: DeviceName
    precision: Precision
    memory_format: MemoryFormat
    optimizer: Optimizer
    snapshot: SnapshotName

    def question(self) -> dict[str, Any]:
        """All but the device, as arguments of a prediction."""
        return {name: value for name, value in vars(self).items() if name != "device"}

    @property
    def has_several_devices(self) -> bool:
        return len(self.device or []) > 1 or self.device == ["all"]


_with_step = with_options("step", get_type_hints(Step, include_extras=True), Step)


@_with_step
def predict(
    step: Step,
    models: Models,
    phase: Phase = "train",
    epochs: Epochs = None,
    samples: Samples = None,
    carbon: Carbon = None,
    power_limit: PowerLimit = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Of each node, to share it.")] = None,
    nodes: Nodes = 1,
    strategy: Annotated[str | None, typer.Option(help="With --gpus: ddp, fsdp or tp.")] = None,
    accumulation: Accumulation = 1,
    network: Network = None,
    as_json: AsJson = False,
) -> None:
    """Predict time, memory, power and energy of a step, what fits, and what a whole run costs.

    Beside it stands the GPU memory of the step in fp32, simulated on CUDA's allocator.

    Example: trappm predict resnet50 --batch-size 64 --device a100
    """
    if gpus is not None or strategy or nodes > 1 or accumulation > 1 or network is not None:
        _refuse(
            {
                "--phase infer": phase != "train",
                "--epochs": epochs is not None,
                "--samples": samples is not None,
                "--carbon": carbon is not None,
                "--power-limit": power_limit is not None,
                "more than one MODEL": len(models) > 1,
                "more than one --device": step.has_several_devices,
            }
        )
        from trappm.prediction.parallel.shared_step import predict_parallel
        from trappm.terminal.parallel.parallel_tables import print_parallel

        shared = predict_parallel(
            models[0],
            device=step.device[0] if step.device else None,
            gpus=gpus or 1,
            nodes=nodes,
            strategy=strategy or "ddp",
            accumulation=accumulation,
            network_gbit=network,
            **step.question(),
        )
        if as_json:
            print_json(shared.to_dict())
        else:
            print_parallel(shared)
        return
    from trappm.terminal.prediction_tables import print_comparison, print_prediction

    predictions = _ask(
        models,
        step.device,
        phase=phase,
        epochs=epochs,
        samples=samples,
        carbon_g_per_kwh=carbon,
        power_limit_w=power_limit,
        **step.question(),
    )
    if as_json:
        rows = [prediction.to_dict() for prediction in predictions]
        print_json(rows if len(models) > 1 or step.has_several_devices else rows[0])
    elif len(predictions) == 1:
        print_prediction(predictions[0])
    else:
        print_comparison(predictions)


@_with_step
def compare(
    step: Step,
    models: Models,
    phase: Phase = "train",
    epochs: Epochs = None,
    samples: Samples = None,
    carbon: Carbon = None,
    gpus: GpuCounts = None,
    strategy: Strategies = None,
    as_json: AsJson = False,
) -> None:
    """Compare devices, models, numbers of GPUs: the fastest, the cheapest, and what fits.

    Example: trappm compare resnet50 --batch-size 128 --phase infer --epochs 1 --samples 1000000
    """
    devices = step.device or ["all"]
    if gpus is not None or strategy:
        _refuse(
            {
                "--phase infer": phase != "train",
                "--epochs": epochs is not None,
                "--samples": samples is not None,
                "--carbon": carbon is not None,
            }
        )
        _print_scaling(models, devices, gpus, strategy, as_json=as_json, **step.question())
        return
    from trappm.prediction.comparison import best_models, verdicts
    from trappm.terminal.prediction_tables import print_comparison

    predictions = _ask(
        models,
        devices,
        phase=phase,
        epochs=epochs,
        samples=samples,
        carbon_g_per_kwh=carbon,
        **step.question(),
    )
    if as_json:
        print_json(
            {
                "predictions": [prediction.to_dict() for prediction in predictions],
                "best": verdicts(predictions),
                "best_of_all": {
                    what: {"model": best.model, "device": best.device}
                    for what, best in best_models(predictions).items()
                },
            }
        )
    else:
        print_comparison(predictions)


@_with_step
def scale(
    step: Step,
    models: Models,
    gpus: GpuCounts = None,
    per_node: Annotated[
        int | None,
        typer.Option("--per-node", min=1, help="GPUs of a node; by default of the usual one."),
    ] = None,
    strategy: Strategies = None,
    accumulation: Accumulation = 1,
    network: Network = None,
    as_json: AsJson = False,
) -> None:
    """Compare strategies and numbers of GPUs: which is fastest, cheapest, and fits?

    Each GPU takes --batch-size samples a pass.

    Example: trappm scale resnet50 --batch-size 64 --device a100 --gpus 1,2,4,8,16
    """
    _print_scaling(
        models,
        step.device,
        gpus,
        strategy,
        gpus_per_node=per_node,
        accumulation=accumulation,
        network_gbit=network,
        as_json=as_json,
        **step.question(),
    )


def _print_scaling(
    models: list[str],
    devices: list[str] | None,
    gpus: str | None,
    strategies: list[str] | None,
    *,
    as_json: bool,
    **options: Any,
) -> None:
    from trappm.prediction.parallel.scaling import scaling, scaling_json
    from trappm.terminal.parallel.parallel_tables import print_scaling

    named = _COUNTS if gpus is None else gpus
    try:
        counts = sorted({int(count) for count in named.split(",")})
    except ValueError:
        raise InputError(f"--gpus is {named!r}; give numbers with commas, such as 1,2,4") from None
    predictions, refusals = scaling(models, devices, counts, strategies or (), **options)
    if as_json:
        print_json(scaling_json(predictions, refusals))
    else:
        print_scaling(predictions, refusals)


def _refuse(lone: Mapping[str, bool]) -> None:
    """Arguments that go with one GPU only, and whether they are given."""
    given = [name for name, is_given in lone.items() if is_given]
    if given:
        raise InputError(f"{given[0]} does not go with --gpus; leave out either of them")


def _ask(models: list[str], device: list[str] | None, **options: Any) -> list[Prediction]:
    from trappm.prediction.predict import predict as answer

    if device == ["all"]:
        return answer(models, devices="all", **options)
    if device and len(device) > 1:
        return answer(models, devices=device, **options)
    return answer(models, device=device[0] if device else None, **options)
