"""What an installation without extras lacks, and which extra brings it."""

from __future__ import annotations

EXTRAS = {
    "campaign": (
        "alembic", "pandas", "pyarrow", "ray", "sqlalchemy", "tenacity", "torch_geometric",
    ),
    "evaluate": ("matplotlib", "optuna", "sklearn"),
    "postgresql": ("psycopg",),
    "serve": ("fastapi", "multipart", "prometheus_client", "python_multipart", "uvicorn"),
    "integrations": ("kubernetes", "lightning", "sky"),
    "transformers": ("accelerate", "peft", "transformers"),
}  # fmt: skip
"""Top-level modules by the extra of pyproject.toml that brings them."""

OF_COMMANDS = {"serve": "serve"}
"""Commands that an extra is for, which takes `campaign` in: whatever they lack, it brings."""


def advice(error: ModuleNotFoundError, command: str) -> str | None:
    """One line about a module that an extra would bring to a command; None of any other one."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    if extra is None:
        return None
    if extra == "campaign":
        extra = OF_COMMANDS.get(command, extra)
    return f"this needs {module}, which is not installed: pip install 'trappm[{extra}]'"
