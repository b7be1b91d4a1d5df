"""`trappm predict`, `compare` and `scale`: what a step costs, where, and on how many GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from trappm.cli import options, shell
from trappm.cli.options import AsJson, Explain, print_json, with_options
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
        help="Device by any of its names, repeatable, or all GPUs (default: a100-40gb).",
        autocompletion=shell.devices,
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option(help="Number of epochs of a whole run, without data loading; needs --samples."),
]
Samples = Annotated[int | None, typer.Option(help="Number of training samples per epoch.")]
Carbon = Annotated[
    float | None, typer.Option(help="Carbon intensity of the electricity (g CO2/kWh).")
]
PowerLimit = Annotated[
    float | None,
    typer.Option("--power-limit", help="GPU power limit in watts (default: factory setting)."),
]
Nodes = Annotated[int, typer.Option(min=1, help="Number of nodes, with --gpus.")]
Accumulation = Annotated[int, typer.Option(min=1, help="Passes before each optimizer step.")]
Network = Annotated[
    float | None,
    typer.Option("--network", help="Network between nodes in Gbit/s (default: usual node's)."),
]

_COUNTS = "1,2,4,8,16"
GpuCounts = Annotated[
    str | None, typer.Option("--gpus", help=f"Total numbers of GPUs (default: {_COUNTS}).")
]
Strategies = Annotated[
    list[str] | None, typer.Option(help="ddp, fsdp or tp, repeatable (default: all).")
]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What step it is about: the options that `predict`, `compare` and `scale` have in common."""

    batch_size: options.BatchSize
    input_size: options.InputSize
    sequence_length: options.SequenceLength
    device: DeviceName
    precision: options.Precision
    memory_format: options.MemoryFormat
    optimizer: options.Optimizer
    snapshot: options.SnapshotName

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
    phase: options.Phase = "train",
    epochs: Epochs = None,
    samples: Samples = None,
    carbon: Carbon = None,
    power_limit: PowerLimit = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs per node that share the step.")
    ] = None,
    nodes: Nodes = 1,
    strategy: Annotated[str | None, typer.Option(help="ddp, fsdp or tp, with --gpus.")] = None,
    accumulation: Accumulation = 1,
    network: Network = None,
    explain: Explain = False,
    as_json: AsJson = False,
) -> None:
    """Predict time, memory, power and energy of a step, what fits, and what a whole run costs.

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
            print_parallel(shared, explain=explain)
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
        print_prediction(predictions[0], explain=explain)
    else:
        print_comparison(predictions, explain=explain)


@_with_step
def compare(
    step: Step,
    models: Models,
    phase: options.Phase = "train",
    epochs: Epochs = None,
    samples: Samples = None,
    carbon: Carbon = None,
    gpus: GpuCounts = None,
    strategy: Strategies = None,
    explain: Explain = False,
    as_json: AsJson = False,
) -> None:
    """Compare GPUs, models or numbers of GPUs: the fastest, the cheapest, and what fits.

    Without --device these are all GPUs that a model was trained on.

    Example: trappm compare resnet50 --batch-size 128 --phase infer --epochs 1 --samples 1000000
    """
    devices = step.device or ["all"]
    everywhere = devices == ["all"]
    if gpus is not None or strategy:
        _refuse(
            {
                "--phase infer": phase != "train",
                "--epochs": epochs is not None,
                "--samples": samples is not None,
                "--carbon": carbon is not None,
            }
        )
        _print_scaling(
            models, devices, gpus, strategy, explain=explain, as_json=as_json, **step.question()
        )
        return
    from trappm.prediction.comparison import best_models, verdicts, without_extrapolations
    from trappm.prediction.question import Question
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
    left_out: list[dict[str, str]] = []
    if everywhere:
        predictions, left_out = without_extrapolations(predictions)
        question = Question(phase=phase, precision=step.precision, snapshot=step.snapshot)
        unable = question.unable_devices()
        left_out += [{"device": key, "reason": reason} for key, reason in unable.items()]
    if as_json:
        print_json(
            {
                "predictions": [prediction.to_dict() for prediction in predictions],
                "best": verdicts(predictions),
                "best_of_all": {
                    what: {"model": best.model, "device": best.device}
                    for what, best in best_models(predictions).items()
                },
                "left_out": left_out,
            }
        )
    else:
        print_comparison(predictions, left_out, explain=explain)


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
    explain: Explain = False,
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
        explain=explain,
        as_json=as_json,
        **step.question(),
    )


def _print_scaling(
    models: list[str],
    devices: list[str] | None,
    gpus: str | None,
    strategies: list[str] | None,
    *,
    explain: bool,
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
        print_scaling(predictions, refusals, explain=explain)


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
