"""Snapshots without heads, small enough to be killed a hundred times while they travel."""

from trappm.learner.snapshots.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    entries,
    manifest_bytes,
    seal,
    write_folder,
)


def write_sample(
    registry, number=0, mape=5.0, size=1000, families=None, device="a100", phase="train",
    metrics=("memory_mib",),
):  # fmt: skip
    """A folder that a registry takes for a snapshot; returns its id."""
    errors = {metric: {"mape": mape} for metric in metrics}
    head = {"kind": "none", "label_count": 2, "label_settings": [], "metrics": list(metrics)}
    contents = {f"heads-a-{part}.safetensors": bytes([number, part]) * size for part in range(3)}
    manifest = seal(
        {
            "format": "trappm-snapshot",
            "format_version": FORMAT_VERSION,
            "created_at": f"2026-01-{number + 1:02}T00:00:00+00:00",
            "errors": {device: {phase: errors}},
            "heads": {device: {phase: head}},
            "source_device": device,
            "preset": {"name": "none", "encoder": {}, "head": {}},
            "training_labels": {"counts": {}, "sha256": "0" * 64},
            "units": {},
            "feature_schema": {},
            "versions": {},
            "number": number,
            "families": families,
            "files": entries(contents),
        }
    )
    contents[MANIFEST] = manifest_bytes(manifest)
    write_folder(registry / manifest["id"], contents)
    return manifest["id"]
