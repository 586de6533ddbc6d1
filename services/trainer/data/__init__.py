"""Prompts: datasets by kind, and the sampler that deals them."""

from services.trainer.data.base import SPLITS, DataError, Dataset, Item, Task
from services.trainer.data.loading import load_dataset, load_tokenizer
from services.trainer.data.sampler import PreparedPrompt, PromptSampler

__all__ = [
    "SPLITS",
    "DataError",
    "Dataset",
    "Item",
    "PreparedPrompt",
    "PromptSampler",
    "Task",
    "load_dataset",
    "load_tokenizer",
]
