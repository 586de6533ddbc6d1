"""The weights in a Hugging Face folder, read one tensor at a time."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor


class Folder:
    """The safetensors files of a Hugging Face folder, read lazily. A context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._where = self._index()

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

    def _index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{self.folder} holds no .safetensors file")
        return {name: file for file in files for name in self._open(file).keys()}  # noqa: SIM118 (no mapping)

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._files:
            try:
                self._files[file] = self._stack.enter_context(safe_open(self.folder / file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{self.folder / file} cannot be read as safetensors: {error}") from error
        return self._files[file]
