"""Uploaded files: kept in a folder of their own for as long as they are needed."""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import BinaryIO

from trappm.extensions.web.problems import TooLargeError
from trappm.extensions.web.tracing import Model
from trappm.prediction.models.subjects import file_key
from trappm.profiler.errors import ModelFileError

_CHUNK_BYTES = 1 << 20
_MAX_NAME = 128


class Upload:
    """A file on disk, which goes with the last reference to this."""

    def __init__(self, source: BinaryIO, max_bytes: int) -> None:
        """Copies what the caller sends.

        Raises:
            ModelFileError: nothing was sent.
            TooLargeError: it is larger than that.
        """
        folder = tempfile.mkdtemp(prefix="trappm-upload-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = Path(folder) / "model.onnx"
        digest, size = hashlib.sha256(), 0
        with self.path.open("wb") as file:
            while chunk := source.read(_CHUNK_BYTES):
                size += len(chunk)
                if size > max_bytes:
                    raise TooLargeError(f"the file has more than {max_bytes:,} bytes")
                digest.update(chunk)
                file.write(chunk)
        if size == 0:
            raise ModelFileError("the uploaded file is empty; send an ONNX file")
        self.digest = digest.hexdigest()

    def model(self, name: str | None, input_size: int | None) -> Model:
        """The model in it, under the name that the caller's file has."""
        return Model(
            name=shown_name(name),
            key=file_key(self.digest, input_size),
            input_size=input_size,
            upload=self,
            path=self.path,
        )


def shown_name(name: str | None) -> str:
    """A file's name without folders, and without what does not belong into an answer."""
    last = re.split(r"[/\\]", name or "")[-1]
    return re.sub(r"[^\w .+@()-]", "_", last)[:_MAX_NAME] or "model.onnx"
