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


def advice(error: ModuleNotFoundError) -> str | None:
    """One line about a module that an extra would bring; None of any other one."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    if extra is None:
        return None
    return f"this needs {module}, which is not installed: pip install 'trappm[{extra}]'"
