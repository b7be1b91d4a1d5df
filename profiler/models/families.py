"""Family of an architecture by its name: the eleven of the TraPPM paper (Table I), or others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from trappm.profiler.errors import InputError, nearest
from trappm.profiler.models.known_names import is_prefixed, model_of
from trappm.profiler.models.own_modules import is_own_module

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "convnext": ("convnext*",),
    "densenet": ("densenet*",),
    "efficientnet": ("efficientnet*",),
    "mnasnet": ("mnasnet*", "semnasnet*"),
    "mobilenet": ("mobilenet*",),
    "poolformer": ("poolformer*",),
    "resnet": ("resnet*", "wide_resnet*"),
    "swin": ("swin*",),
    "vgg": ("vgg*",),
    "visformer": ("visformer*",),
    "vit": ("vit", "vit_*", "vit[0-9]*"),
}
"""The paper's families and the name patterns of their members."""

# Marks of origin in timm's names that say nothing about the architecture.
_ORIGIN = re.compile(r"^(?:legacy|test|tf)_")
_FOLDER = re.compile(r"^\w+:(?:.*/)?")


@lru_cache(maxsize=10_000)
def family_of(architecture: str) -> str:
    """Return the paper's family of this architecture, or the leading letters of its name.

    Transformers keep the number in their name, as `gpt2` and `t5`. Of a user's module, the name is
    that of its function.
    """
    if is_own_module(architecture):
        architecture = model_of(architecture).rpartition(":")[2]
    if is_prefixed(architecture):
        name = _FOLDER.sub("", model_of(architecture))
        begins = re.match(r"[A-Za-z]+\d*", name)
        return begins.group().lower() if begins else name or architecture
    name = _ORIGIN.sub("", architecture)
    for family, patterns in FAMILIES.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return family
    letters = re.match(r"[A-Za-z]+", name)
    return letters.group().lower() if letters else name or architecture


def in_families(families: Iterable[str], architectures: Iterable[str]) -> set[str]:
    """Return the architectures that belong to one of these families.

    Raises:
        InputError: None belongs to one of the families.
    """
    members: dict[str, set[str]] = {}
    for architecture in architectures:
        members.setdefault(family_of(architecture), set()).add(architecture)
    names: set[str] = set()
    for family in families:
        if family not in members:
            hint = nearest(family, members, otherwise=f"such as {', '.join(FAMILIES)}")
            raise InputError(f"no architecture is of the family {family!r}; {hint}")
        names |= members[family]
    return names
