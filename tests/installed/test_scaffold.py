"""What a fresh clone stands on: pinned versions, and a wheel that holds every file it needs."""

import itertools
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
ROOMS = ("profiler", "store", "learner", "cluster", "trappm")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def test_constraints_are_exact_and_portable():
    for requirement in _pins().values():
        (pin,) = requirement.specifier
        assert pin.operator == "==", requirement
        assert requirement.url is None
        assert Version(pin.version).local is None, requirement
    assert not [name for name in _pins() if re.match(r"nvidia-(?!ml-py)|cuda-|triton", name)]


@pytest.mark.parametrize(
    "line",
    [
        line
        for line in itertools.chain(
            PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()
        )
        if Requirement(line).name != PROJECT["name"]  # an extra that takes another one in
    ],
    ids=str,
)
def test_every_dependency_is_pinned_to_an_allowed_version(line):
    requirement = Requirement(line)
    (pin,) = _pins()[canonicalize_name(requirement.name)].specifier
    assert pin.version in requirement.specifier


def test_installed_versions_are_the_pinned_ones():
    differing = {}
    for name, requirement in _pins().items():
        try:
            installed = Version(metadata.version(name)).public
        except metadata.PackageNotFoundError:
            continue  # pinned for another Python or platform
        if installed not in requirement.specifier:
            differing[name] = (installed, str(requirement.specifier))
    assert differing == {}, "run: make install"


def test_the_wheel_contains_every_module_and_data_file(tmp_path):
    """Cluster nodes install the wheel, so what only an editable install finds would be missing."""
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=ignore, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    expected = {
        str(path.relative_to(source) if room == "trappm" else "trappm" / path.relative_to(source))
        for room in ROOMS
        for path in (source / room).rglob("*")
        if path.is_file()
    }
    build = ["wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([sys.executable, "-m", "pip", *build, str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert expected - held == set()
    assert {name.split("/")[0] for name in held if ".dist-info/" not in name} == {"trappm"}
    assert {f"trappm/{room}/py.typed" for room in ROOMS if room != "trappm"} <= held
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_make_help_lists_every_command():
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    shown = subprocess.run(
        ["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    assert re.findall(r"^  make (\S+) ", shown, re.MULTILINE) == phony.split()


PIP_SAID = [
    "Collecting torch==2.8.0\n",
    "  Downloading torch-2.8.0.whl (184.0 MB)\n",
    *(f"Collecting package{number}\n" for number in range(103)),
    "WARNING: a package does not provide the extra 'x'\n",
    "Building wheels for collected packages: trappm\n",
    "  Building editable for trappm (pyproject.toml): started\n",
    f"Installing collected packages: {', '.join(f'package{n}' for n in range(104))}\n",
    f"Successfully installed {' '.join(f'package{n}-1.0' for n in range(104))}\n",
]


@pytest.mark.parametrize("status", [0, 1])
def test_installation_output_is_short_unless_it_fails(tmp_path, status):
    said = tmp_path / "said.txt"
    said.write_text("".join(PIP_SAID) + "ERROR: No matching distribution\n" * status)
    pip = [sys.executable, "-c", f"print(open({str(said)!r}).read()); raise SystemExit({status})"]
    ran = subprocess.run(
        [sys.executable, ROOT / "deploy/quiet_pip.py", *pip],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == status
    assert len(ran.stdout.splitlines()) < 10
    assert "installing 104 packages" in ran.stdout
    assert "104 packages installed" in ran.stdout
    assert ("ERROR: No matching distribution" in ran.stderr) == bool(status)
    assert ("Collecting torch" in ran.stderr) == bool(status)
