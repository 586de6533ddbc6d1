"""The weights in a Hugging Face folder, read one tensor at a time."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from trireme.config.model_weights import find_tensors


class Folder:
    """The safetensors files of a Hugging Face folder, read lazily. A context manager.

    Raises ValueError naming a file that is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._where = find_tensors(folder)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def names(self) -> set[str]:
        return set(self._where)

    def read(self, name: str) -> Tensor:
        """Raises ValueError naming the tensor when the folder has none of that name."""
        if name not in self._where:
            raise ValueError(f"{self.folder} has no tensor {name}")
        return self._open(self._where[name]).get_tensor(name)

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = self._stack.enter_context(safe_open(self.folder / file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{self.folder / file} cannot be read as safetensors: {error}") from error
        return self._files[file]
