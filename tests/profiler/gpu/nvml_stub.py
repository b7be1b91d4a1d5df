"""Machines with NVIDIA GPUs that a test describes and breaks: the real pynvml on a stub library.

The library (`nvml_stub.c`) is compiled when it is first wanted. `install` puts it under the pynvml
of this process; a process of its own finds it by the variables of `Machine.variables`. Each field
of a board may be a list: then each question takes the next of its values, and the last one stays.
An error of NVML among them is NVML's answer. What is None is "not supported".
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pynvml
import pytest

GIB = 2**30

_SOURCE = Path(__file__).with_name("nvml_stub.c")
_FIELDS = {"power_instant_mw": f"field_{pynvml.NVML_FI_DEV_POWER_INSTANT}"}
_OF_AN_INSTANCE = ("uuid", "name", "total", "used", "reserved", "processes")


def error(name):
    """An error of NVML, by the name of its code: `GPU_IS_LOST`."""
    return pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))


@dataclass(frozen=True)
class Process:
    pid: int
    bytes: int | None = GIB


@dataclass(eq=False)
class Board:
    """A GPU, or with `is_instance` a MIG instance of one. A change is seen by the next question."""

    uuid: str
    name: str = "NVIDIA A100-SXM4-40GB"
    total: Any = 40 * GIB
    used: Any = 0
    energy_mj: Any = 1_000_000
    power_mw: Any = 250_000
    power_instant_mw: Any = None
    power_limit_mw: Any = 400_000
    utilization: Any = (97, 41)
    sm_clock_mhz: Any = 1410
    memory_clock_mhz: Any = 1215
    temperature_c: Any = 55
    temperature_v_c: Any = None
    reasons: Any = 0
    processes: Any = field(default_factory=list)
    """Or "nobody": then not even the process that uses it by `stub_use` is listed."""
    ecc: Any = (1, 1)
    persistence: Any = 1
    mig: Any = (0, 0)
    most_instances: Any = 7
    capability: Any = (8, 0)
    application_clock_mhz: Any = 1410
    cores: Any = None
    """The cores of its NUMA node, as a tuple."""
    reserved: int | None = 0
    """What the driver keeps for itself; None where it is too old to tell, and counts as used."""
    handle: Any = 1
    """An error: NVML cannot reach the board at all."""
    instances: list[Board] = field(default_factory=list)
    is_instance: bool = False

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if machine := getattr(self, "machine", None):
            machine.write()

    def lines(self):
        """What NVML answers, by attribute, but for the instances."""
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            if name in {"instances", "is_instance"} or value is None:
                continue
            if self.is_instance and name not in _OF_AN_INSTANCE:
                continue
            if name == "processes":
                if isinstance(value, list):
                    value = " ".join(f"{p.pid}:{_or_dash(p.bytes)}" for p in value) or "-"
                yield name, _text(value)
            else:
                answers = map(_text, value if isinstance(value, list) else [value])
                yield _FIELDS.get(name, name), ";".join(answers)


class Machine:
    """A machine with these boards, in the order of the PCI bus; `init` is NVML's first answer.

    Every answer takes `delay_ms`. All boards are lost after `lost_after` questions about them.
    """

    def __init__(self, *boards, driver="580.1", init=None, delay_ms=0, lost_after=None):
        self._boards, self._driver, self._init = boards, driver, init
        self._delay_ms, self._lost_after = delay_ms, lost_after
        self._file = Path(tempfile.mkstemp(dir=_folder(), suffix=".txt")[1])
        release = 580 if isinstance(driver, Exception) else int(driver.partition(".")[0])
        self.library = _library(release)
        for board in boards:
            for device in (board, *board.instances):
                object.__setattr__(device, "machine", self)
        self.write()

    @property
    def variables(self):
        """The environment in which another process finds these GPUs."""
        path = os.environ.get("LD_LIBRARY_PATH", "")
        folders = [str(self.library.parent), *filter(None, [path])]
        return {"LD_LIBRARY_PATH": os.pathsep.join(folders), "NVML_STUB": str(self._file)}

    def write(self):
        """Says anew what there is; in one stroke, as somebody may be reading."""
        every = [device for board in self._boards for device in (board, *board.instances)]
        places = {id(device): place for place, device in enumerate(every, 1)}
        lines = [(0, "driver", _text(self._driver))]
        lines += [(0, "init", _text(self._init) if self._init else "-")]
        lines += [(0, "delay_ms", str(self._delay_ms))]
        lines += [(0, "lost_after", str(self._lost_after))] if self._lost_after is not None else []
        lines += [(0, "boards", " ".join(str(places[id(b)]) for b in self._boards) or "-")]
        for device in every:
            lines += [(places[id(device)], name, text) for name, text in device.lines()]
            of_it = " ".join(str(places[id(instance)]) for instance in device.instances)
            lines += [(places[id(device)], "instances", of_it or "-")]
        fresh = self._file.with_suffix(".new")
        fresh.write_text("".join(f"{p} {n} {t}\n" for p, n, t in lines), encoding="utf-8")
        fresh.replace(self._file)


def install(monkeypatch, *boards, **machine):
    """Puts a machine with these boards under this process's pynvml."""
    made = Machine(*boards, **machine)
    monkeypatch.setenv("NVML_STUB", made.variables["NVML_STUB"])
    monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(made.library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return made


def own(used=3 * GIB):
    """This process, as NVML would list it outside a container."""
    return Process(os.getpid(), used)


def _or_dash(value):
    return "-" if value is None else str(value)


def _text(value):
    if value is None:
        return f"!{pynvml.NVML_ERROR_NOT_SUPPORTED}"
    if isinstance(value, pynvml.NVMLError):
        return f"!{value.value}"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


@functools.cache
def _folder():
    folder = tempfile.mkdtemp(prefix="nvml-stub-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def _library(release):
    """The stub as the library of this release of the driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) here to build the stub of NVIDIA's driver library with")
    folder = Path(_folder()) / str(release)
    folder.mkdir()
    library = folder / "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, f"-DDRIVER={release}", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread",
         "-o", str(library), str(_SOURCE)],
        check=True,
    )  # fmt: skip
    return library
