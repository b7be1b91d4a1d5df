"""What a fresh clone stands on: pinned versions, and a wheel that holds every file it needs."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("profiler", "store", "learner", "cluster", "trappm")


def build_wheel(folder):
    """Return the wheel of a copy of the sources, which lies in `source` next to it."""
    source = folder / "source"
    ignore = shutil.ignore_patterns("__pycache__")
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=ignore, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([sys.executable, "-m", "pip", *build, str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_contains_every_module_and_data_file(tmp_path):
    """Cluster nodes install the wheel, so what only an editable install finds would be missing."""
    source, wheel = tmp_path / "source", build_wheel(tmp_path)
    expected = {
        str(path.relative_to(source) if room == "trappm" else "trappm" / path.relative_to(source))
        for room in ROOMS
        for path in (source / room).rglob("*")
        if path.is_file()
    }
    held = set(zipfile.ZipFile(wheel).namelist())
    assert expected - held == set()
    assert {name.split("/")[0] for name in held if ".dist-info/" not in name} == {"trappm"}
    assert {f"trappm/{room}/py.typed" for room in ROOMS if room != "trappm"} <= held
    assert any(name.endswith("licenses/LICENSE") for name in held)
