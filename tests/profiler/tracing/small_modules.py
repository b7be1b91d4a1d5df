"""Modules of a few layers, for tests."""

from torch import nn


class Parts(nn.Module):
    """A module whose layers and parameters are given by name; a subclass has the forward pass."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


class Function(Parts):
    """A module whose forward pass is a function of itself and its inputs."""

    def __init__(self, body, **parts):
        super().__init__(**parts)
        self.body = body

    def forward(self, *inputs):
        return self.body(self, *inputs)
