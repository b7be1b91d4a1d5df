"""Fused kernels of inference steps, derived here, and those of inductor's own schedule on a CPU
(docs/research/compiled_steps.md).

Inductor is stopped before it generates code. A kernel of one side is also one of the other side if
it has the same operators. An operator counts once, as inductor computes some of them again in the
kernels that read them. Kernels that only copy or add a bias are left out.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import torch
import typer

from trappm.profiler.models.model_input import Sample
from trappm.profiler.models.on_meta import on_meta
from trappm.profiler.models.zoo import create_model
from trappm.profiler.records import Phase
from trappm.profiler.tracing.data_flow import Role
from trappm.profiler.tracing.fusion import FusedKernelLog
from trappm.profiler.tracing.tracer import StepOptions, Tracer

MODELS = (
    ("resnet18", 128), ("vit_tiny_patch16_224", 224), ("mobilenetv3_small_100", 160),
    ("convnext_atto", 128), ("efficientnet_b0", 128), ("regnety_002", 160),
    ("mixer_s32_224", 224), ("swin_tiny_patch4_window7_224", 224), ("densenet121", 96),
    ("resnet50", 128), ("deit_tiny_patch16_224", 224), ("poolformer_s12", 128),
    ("ghostnet_100", 128), ("mobilevit_xxs", 128), ("edgenext_xx_small", 128), ("nf_resnet50", 128),
    ("xcit_nano_12_p16_224", 224), ("resmlp_12_224", 224), ("tinynet_e", 128), ("dla34", 128),
)  # fmt: skip
"""Architecture and input size."""
BATCH_SIZE = 4
Kernels = Counter[tuple[str, ...]]
"""Kernels by their operators."""


NAMES = {"_native_batch_norm_legit_no_training": "native_batch_norm"}
NOT_COUNTED = {
    "convolution", "addmm", "mm", "bmm", "baddbmm", "broadcast", "_scaled_dot_product_attention",
    "view", "_unsafe_view", "reshape", "expand", "transpose", "permute", "t", "unsqueeze",
    "squeeze",
    "select", "slice", "split", "split_with_sizes", "unbind", "clone", "alias",
}  # fmt: skip
"""Products and their biases, which a CPU's library adds, views and copies."""


class Scheduled(Exception):  # noqa: N818
    """Inductor has a schedule, and needs to do nothing more."""


def derived(name: str, input_size: int) -> tuple[Kernels, int]:
    """Return the fused kernels of an inference step, and the number of library kernels."""
    tracer = Tracer(
        on_meta(name, input_size), Sample.of(input_size), StepOptions(is_compiled=True),
        (BATCH_SIZE, 2 * BATCH_SIZE),
    )  # fmt: skip
    tracer.phase(Phase.INFER)
    log = tracer._known[Phase.INFER, False][1].kernels
    assert isinstance(log, FusedKernelLog)
    kernels, library = Kernels(), 0
    for group in log.groups:
        nodes = [log.nodes[i] for i in group]
        if nodes[0].role is Role.EXTERN:
            library += 1
        else:
            kernels[_operators(node.name for node in nodes)] += 1
    del kernels[()]
    return kernels, library


def scheduled(name: str, input_size: int) -> tuple[Kernels, int]:
    """Return the same of inductor's schedule, before it generates code."""
    from torch._inductor import config, ir

    nodes: list[Any] = []

    def stop(fused: list[Any]) -> list[Any]:
        nodes.extend(fused)
        raise Scheduled

    torch._dynamo.reset()
    model = create_model(name, input_size).train(mode=False)
    images = torch.randn(BATCH_SIZE, 3, input_size, input_size)
    with config.patch(_post_fusion_custom_pass=stop), torch.no_grad():
        try:
            torch.compile(model)(images)
        except Exception as error:
            if not nodes:
                raise error
    kernels, library = Kernels(), 0
    for node in nodes:
        buffers = [part.node for part in node.get_nodes()]
        if any(isinstance(buffer, ir.ExternKernel) for buffer in buffers):
            library += 1
            continue
        if all(isinstance(buffer, ir.NopKernel) for buffer in buffers):
            continue
        kernels[_operators(_origins(buffers))] += 1
    del kernels[()]
    return kernels, library


def _origins(buffers: Sequence[Any]) -> Iterator[str]:
    """Yield the names of the operators that these buffers were made of."""
    for buffer in buffers:
        for origin in buffer.get_origins():
            operator = origin.meta.get("original_aten")
            if operator is not None:
                yield operator._schema.name.removeprefix("aten::")


def _operators(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a kernel's operators, without those that do not count."""
    return tuple(sorted({NAMES.get(name, name) for name in names} - NOT_COUNTED))


def main(
    most: Annotated[int, typer.Option(help="Number of architectures.")] = len(MODELS),
) -> None:
    """Print numbers of kernels by model, and the share that inductor has as well."""
    warnings.filterwarnings("ignore")
    totals = Counter[str]()
    for name, input_size in MODELS[:most]:
        (here, library), (there, other_library) = (
            derived(name, input_size), scheduled(name, input_size)
        )  # fmt: skip
        both = (here & there).total()
        totals += Counter(derived=here.total(), scheduled=there.total(), both=both)
        totals["same_library"] += library == other_library
        print(
            f"{name:30} derived {here.total():4} of inductor {there.total():4} equal {both:4}"
            f" library kernels {library:4} {other_library:4}",
            flush=True,
        )
    print(dict(totals), f"{totals['both'] / totals['derived']:.0%} of the derived")
