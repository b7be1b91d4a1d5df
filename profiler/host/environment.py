"""Environment of a measurement or a prediction: host, software, and the caller's PyTorch.

Facts about host and software decide whether labels are comparable. A device gives the facts of its
hardware and software (`Device.environment`); a run adds its own (precision, load).
`stack_fingerprint` hashes the few that decide whether labels may be mixed.

Answers neither depend on what a caller has set in PyTorch nor change it (`independent_of_caller`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime
from functools import cache, wraps
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from platformdirs import user_data_path

from trappm.profiler.host import procfs
from trappm.profiler.records import Configuration

MEASURING_VERSION = 2
"""Version of the protocol, raised with every change of what a label means.

2: ordinary gains, gradients scaled by 65,536, a GPU that is busy at both ends of the window.
"""

CORES_VERSION = 3
"""The same for one process on CPU cores: disturbed steps are rejected, lost time subtracted."""

GPU_VERSION = 3
"""The same for GPUs: each process is pinned to its GPU's share of the cores."""

SEED = 0
"""Seed of weights, images and targets of every measurement; it does not change their cost."""

_STACK = (
    "device", "device_name", "device_power_limit_w", "measuring_version", "python", "torch", "timm",
    "transformers", "peft", "cuda", "cudnn", "driver", "tf32", "cudnn_benchmark", "switches",
    "ecc_enabled", "device_clock_mhz", "host_cpu", "strategy", "collectives", "nccl",
)  # fmt: skip
"""Facts of the stack; they count if they are known.

`switches` are environment variables. Of a GPU its error correction, the clock set by a user and the
host's CPU count, of several ranks their strategy and their communication library.
"""

_USUAL_MEMORY = (None, "none", "nvml process memory", "peak resident set")
"""Methods of counting memory that do not make another stack."""

_SWITCHES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_CUDNN_V8_API_DISABLED", "TIMM_FUSED_ATTN",
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
    "OMP_WAIT_POLICY", "OMP_DYNAMIC", "OMP_SCHEDULE", "GOMP_SPINCOUNT", "KMP_BLOCKTIME",
    "GLIBC_TUNABLES", "MALLOC_CONF", "LD_PRELOAD",
)  # fmt: skip
"""Environment variables that change the time or memory of a step; a device sets its threads."""


def utc_now() -> str:
    """Return the time in UTC, ISO 8601, to the microsecond."""
    return datetime.now(UTC).isoformat()


def host_facts() -> dict[str, Any]:
    """Return the facts of host, processor and software without importing torch."""
    return {**_machine_facts(), "switches": _switches()}


@cache
def _machine_facts() -> Mapping[str, Any]:
    code, why_not = _code_version()
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "cpu_model": _cpu_model(),
        "cpu_cores": os.cpu_count(),
        "host_memory_mib": round(procfs.total_memory_mib()),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": _version("torch"),
        "timm": _version("timm"),
        "transformers": _version("transformers"),
        "peft": _version("peft"),
        "code_version": code,
        **({} if why_not is None else {"code_version_missing": why_not}),
        "measuring_version": MEASURING_VERSION,
    }


def _switches() -> dict[str, str]:
    return {name: os.environ[name] for name in _SWITCHES if os.environ.get(name)}


def run_facts(configuration: Configuration) -> dict[str, Any]:
    """Return the facts of one run: how it computes, when, and the load before it."""
    return {
        "precision": configuration.precision.value,
        "memory_format": configuration.memory_format.value,
        "optimizer": configuration.optimizer.value,
        "phase": configuration.phase.value,
        "seed": SEED,
        "utc": utc_now(),
        "load_average_before": os.getloadavg()[0],
    }


def stack_facts(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that decide whether labels may be mixed.

    Host name, kernel and load do not count: two equal nodes are one device.
    """
    facts = {name: environment.get(name) for name in _STACK}
    method = environment.get("memory_method")
    if method not in _USUAL_MEMORY:
        facts["memory_method"] = method
    return {name: fact for name, fact in facts.items() if fact is not None and fact != {}}


class Code(NamedTuple):
    """TraPPM's code in a process."""

    digest: str
    """Hash of the contents of all modules, however they were installed."""
    version: str | None
    """Installed version, which edited code shares with the original."""

    def __str__(self) -> str:
        return f"TraPPM {self.version or 'of unknown version'} (code {self.digest[:8]})"


@cache
def this_code() -> Code:
    """Return the code of this process."""
    package = Path(__file__).parents[2]
    return Code(hash_of_modules(package, follow_links=True)[:16], _version("trappm"))


def hash_of_modules(package: Path, *, follow_links: bool = False) -> str:
    """Return the SHA-256 of names and contents of all modules below a folder."""
    digest = hashlib.sha256()
    files = (
        Path(folder, name)
        for folder, _, names in os.walk(package, followlinks=follow_links)
        for name in names
        if name.endswith(".py")
    )
    for path in sorted(files):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def code_refusal(host: str, code: Code | None, wanted: Code) -> str | None:
    """Return why a host with other code than wanted is refused, or None if it has the same.

    Args:
        host: Name of the host.
        code: Its code; None if its version cannot report that yet.
        wanted: Code of the campaign.
    """
    if code is not None and code.digest == wanted.digest:
        return None
    return (
        f"host {host} has {code or 'an earlier TraPPM'}, the campaign has {wanted}; install the "
        "same TraPPM on every node, or pass it to Ray as runtime_env"
    )


def stack_fingerprint(environment: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that are equal for labels that may be mixed."""
    text = json.dumps(stack_facts(environment), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stack_difference(other: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Return the differences between the stacks of two environments as text, or None."""
    there, ours = stack_facts(other), stack_facts(here)
    differences = [
        f"{name} {there.get(name)!r} instead of {ours.get(name)!r}"
        for name in there | ours
        if there.get(name) != ours.get(name)
    ]
    return ", ".join(differences) or None


def _code_version() -> tuple[str | None, str | None]:
    """Return the installed version with the commit of a checkout, or why it is missing."""
    version, commit = _version("trappm"), code_commit()
    if commit.name is not None:
        return (f"{version}+{commit.name}" if version else commit.name), None
    if version is None and commit.missing is None:
        return None, "run neither from a checkout nor from an installed package"
    return version, commit.missing


LIBRARIES = ("torch", "timm", "torchvision", "transformers", "peft", "onnx")
"""Libraries that decide what a step of a model is."""


@cache
def library_versions() -> tuple[str | None, ...]:
    """Return the versions of `LIBRARIES`; None for one that is not installed."""
    return tuple(map(_version, LIBRARIES))


def uses_fused_attention() -> bool:
    """Return whether models of timm that are built now call PyTorch's fused attention.

    By its switch in this process, or by its environment variable if it is not imported.
    """
    config = sys.modules.get("timm.layers.config")
    if config is not None:
        return bool(config._USE_FUSED_ATTN)
    return os.environ.get("TIMM_FUSED_ATTN", "1") != "0"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """Return name, family and model: virtual machines often report only "AMD EPYC"."""
    facts: dict[str, str] = {}
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if not line.strip():
                break  # the first processor stands for all
            facts[name.strip()] = value.strip()
    name = facts.get("model name", platform.machine())
    if "cpu family" in facts and "model" in facts:
        return f"{name} (family {facts['cpu family']}, model {facts['model']})"
    return name


# An installation may lie inside of somebody else's repository, so git is asked for this very file.


class Commit(NamedTuple):
    """Commit of the code, or why that of a checkout is unknown; neither outside of a checkout."""

    name: str | None
    """12 hexadecimal digits, with `-dirty` where files were changed."""
    missing: str | None = None


@cache
def code_commit() -> Commit:
    """Return the commit of this code, cached per process."""
    here = Path(__file__).resolve()  # the rooms stand as links in `trappm/`
    if not any((folder / ".git").exists() for folder in here.parents):
        return Commit(None)
    try:
        if not _git(here.parent, "ls-files", "--", here.name):
            return Commit(None)
        words = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
        return Commit(_git(here.parent, *words))
    except subprocess.CalledProcessError as error:
        return Commit(None, f"the checkout's commit is unknown: {error.stderr.strip() or error}")
    except (OSError, subprocess.SubprocessError) as error:
        return Commit(None, f"the checkout's commit is unknown: {error}")


def _git(folder: Path, *words: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


VARIABLE = "TRAPPM_HOME"


def data_folder() -> Path:
    """Return TRAPPM_HOME, or else the user's data folder; it may not exist yet."""
    named = os.environ.get(VARIABLE)
    path = Path(named).expanduser() if named else user_data_path("trappm", appauthor=False)
    return path.absolute()


_P = ParamSpec("_P")
_T = TypeVar("_T")


def independent_of_caller(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run a function in PyTorch's defaults, and leave all modes and random states as they were.

    Before torch is imported the caller cannot have set anything, so it is not imported for this.
    """

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with _defaults():
            return function(*args, **kwargs)

    return run


@contextmanager
def _without_hooks() -> Iterator[None]:
    """Switch off the caller's hooks of saved tensors, such as those of `save_on_cpu`."""
    from torch._C import _autograd
    from torch.autograd.graph import saved_tensors_hooks

    why = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if why is not None:
        _autograd._saved_tensors_hooks_enable()
    has_hooks = _autograd._top_saved_tensors_default_hooks(False) is not None
    same: AbstractContextManager[object] = nullcontext()
    if has_hooks:  # only the last hooks apply
        same = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    try:
        with same:
            yield
    finally:
        if why is not None:
            _autograd._saved_tensors_hooks_disable(why)


@contextmanager
def _defaults() -> Iterator[None]:
    """Provide PyTorch's defaults: gradients, fp32 on the CPU, no autocast, no anomaly detection."""
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        if sys.modules.get("torch"):
            import torch
            from torch._C import _len_torch_function_stack
            from torch.overrides import _pop_mode_temporarily
            from torch.utils._python_dispatch import _disable_current_modes

            stack.callback(torch.random.set_rng_state, torch.random.get_rng_state())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            if torch.get_default_dtype() is not torch.float32:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float32)
            stack.enter_context(_without_hooks())
            stack.enter_context(torch._C._EnableTorchFunction())
            stack.enter_context(_disable_current_modes())
            for _ in range(_len_torch_function_stack()):  # such as the default device
                stack.enter_context(_pop_mode_temporarily())
        yield
