"""The confined process that traces a model for `trappm.prediction.models.tracing`."""

from __future__ import annotations

import base64
import json
import resource
from collections.abc import Callable, Mapping
from typing import Any

from trappm.learner.heads.predictions import StepSettings
from trappm.prediction.estimate import EstimateRequest
from trappm.prediction.models.profile_cache import profile_to_bytes
from trappm.prediction.models.tracing import FileTracer, TracingLimits, TracingRequest
from trappm.profiler.errors import TrappmError, one_line
from trappm.profiler.records import MemoryFormat, Optimizer, Phase, Precision

_MAX_WRITTEN_BYTES = 1 << 20
_MAX_OPEN_FILES = 64


def look(message: Mapping[str, Any], send: Callable[[Mapping[str, Any]], None]) -> None:
    """Profiles the model of a request, in a process of its own, and sends the result."""
    import torch

    request, limits = TracingRequest(**message["request"]), TracingLimits(**message["limits"])
    confine(limits)
    torch.set_num_threads(1)
    try:
        result = _result(request)
    except TrappmError as error:
        send({"error": type(error).__name__, "message": str(error)})
    except MemoryError:
        needs = f"{request.model} needs more than {limits.memory_bytes >> 20:,} MiB"
        send({"error": "ModelFileError", "message": needs})
    except Exception as error:  # a file may hold anything
        unexpected = f"unexpected {type(error).__name__} ({one_line(error)})"
        reason = f"{request.model} cannot be read: {unexpected}; please report it"
        send({"error": "UnsupportedModelError", "message": reason})
    else:
        send({"result": base64.b64encode(result).decode()})


def confine(limits: TracingLimits) -> None:
    """Limits this process: memory beside what it has, CPU time, what it writes and opens."""
    from trappm.profiler.host.procfs import memory_status_kib

    _limit(resource.RLIMIT_AS, (memory_status_kib()["VmSize"] << 10) + limits.memory_bytes)
    _limit(resource.RLIMIT_CPU, limits.cpu_s)
    _limit(resource.RLIMIT_FSIZE, _MAX_WRITTEN_BYTES)
    _limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES)
    _limit(resource.RLIMIT_CORE, 0)


def _result(request: TracingRequest) -> bytes:
    if request.estimate is not None:
        return json.dumps(EstimateRequest(**request.estimate).answer()).encode()
    tracer = request.tracer()
    if request.settings is None:
        return profile_to_bytes(*tracer.profile())
    precision, memory_format, optimizer = request.settings  # JSON has plain strings
    settings = StepSettings(Precision(precision), MemoryFormat(memory_format), Optimizer(optimizer))
    if request.phase is not None and isinstance(tracer, FileTracer):
        return tracer.step_with_origins(settings, request.batch_size or 1, Phase(request.phase))
    return tracer.step(settings, request.batch_size).to_bytes()


def _limit(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
