"""Functions that this extension adds to `import trappm`."""

from trappm.extensions.advice.advising import advise
from trappm.extensions.advice.guard import check

__all__ = ["advise", "check"]
