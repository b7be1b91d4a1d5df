"""Users' modules by `package.module:function`: names, versions, and failures in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import trappm
from trappm.profiler.errors import InputError, MissingLibraryError
from trappm.profiler.models import own_modules
from trappm.profiler.models.families import family_of
from trappm.profiler.models.known_names import model_of, refuse_unknown
from trappm.profiler.models.own_modules import is_own_module, with_version
from trappm.profiler.models.pool import PoolGroup, PoolSpec, build_pool
from trappm.profiler.steps.step import make_step
from trappm.profiler.traced_step import TraceKey

EXAMPLES = Path(__file__).parents[3] / "examples"

FAILING = """
from torch import nn

def needs(width): return nn.Linear(width, width)
def number(): return 3
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes `shop/NAME.py` into a folder of modules, as another process would find it."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "shop"
    folder.mkdir()

    def write(name, text):
        (folder / f"{name}.py").write_text(text)
        own_modules._version_of.cache_clear()
        for module in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
            del sys.modules[module]

    write("__init__", "")
    yield write
    write("__init__", "")


def pool_of(*names, **changes):
    group = {"batch_sizes": (2,), "input_sizes": (32,)} | changes
    return build_pool(PoolSpec(groups=(PoolGroup(architectures=names, **group),)))


def test_a_pool_imports_no_code_and_has_a_name_per_version(package):
    package("net", "raise SystemExit('imported')")
    (before,) = pool_of("shop.net:make")
    assert before.architecture.startswith("shop.net:make@0+")
    package("other", "")
    (after,) = pool_of("shop.net:make")
    assert before.id != after.id  # the code of an uninstalled package may have changed
    (given,) = pool_of("absent.net:make@2.1")  # which only the workers have
    assert given.architecture == "absent.net:make@2.1"
    assert not {"shop", "shop.net", "absent"} & set(sys.modules)
    for names, changes, match in (
        (("absent.net:make",), {}, "no package 'absent' here"),
        (("shop.net:make",), {"input_sizes": ("native",)}, "no input size of its own"),
    ):
        with pytest.raises(InputError, match=match):
            pool_of(*names, **changes)


def test_an_installed_package_has_the_version_of_its_distribution(package, tmp_path):
    about = tmp_path / "my_shop-1.4.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my-shop\nVersion: 1.4\n")
    (about / "RECORD").write_text("shop/__init__.py,,\nmy_shop-1.4.dist-info/METADATA,,\n")
    (about / "top_level.txt").write_text("shop\n")
    package("net", "")
    assert with_version("shop.net:make") == "shop.net:make@1.4"
    (about / "RECORD").write_text("__editable__.my_shop.pth,,\n")
    package("net", "")
    assert with_version("shop.net:make").startswith("shop.net:make@1.4+")


def test_versions_of_a_model_are_held_out_together():
    names = ["shop.net:resnet_small@1.0", "shop.net:resnet_small@1.1+0a"]
    assert {model_of(name) for name in names} == {"shop.net:resnet_small"}
    assert {family_of(name) for name in names} == {"resnet"}
    for other in ("resnet50", "hf:org/a.b", "net:make", "./a.b:c"):
        assert not is_own_module(other)


@pytest.mark.parametrize(
    ("name", "reason", "is_final"),
    [
        ("shop.absent:make", "the import of shop.absent failed: ModuleNotFoundError", False),
        ("shop.net:make@0.9", "shop has version 0+", False),
        ("shop.net:neds", "has no function 'neds'; did you mean 'needs'?", True),
        ("shop.net:needs", "shop.net:needs failed: TypeError", False),
        ("shop.net:number", "returns a int; it must return an nn.Module", True),
    ],
)
def test_a_module_that_cannot_be_made_is_refused_in_one_line(package, name, reason, is_final):
    pytest.importorskip("ray")
    from trappm.cluster.trace_tasks import trace_of

    package("net", FAILING)
    traced = trace_of(TraceKey(with_version(name), 32))
    assert reason in traced.refusal
    assert "\n" not in traced.refusal
    assert traced.is_final == is_final


def test_the_example_is_measured_and_predicted_by_name(monkeypatch, module_home):
    monkeypatch.syspath_prepend(EXAMPLES)
    (configuration,) = pool_of("my_models.vision:Mixer")
    make_step(configuration, torch.device("cpu"))()
    asked = {"input_size": 32, "batch_size": 2, "device": "a100"}
    answer = trappm.predict("my_models.vision:Mixer", **asked)
    from my_models.vision import Mixer

    module = trappm.predict(Mixer(32), example_input=torch.empty(2, 3, 32, 32), device="a100")
    assert answer.model == configuration.architecture
    assert answer.memory_mib == pytest.approx(module.memory_mib, rel=0.01)
    with pytest.raises(MissingLibraryError, match="no package 'absent' here"):
        refuse_unknown("absent.vision:Mixer")
