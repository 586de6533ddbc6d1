"""Seconds of an optimizer step on ragged sequences, packed and padded, on the same backend in the same run.

    python tests/bench/packing.py

Lengths are log-normal with a mean of a quarter of the limit. Padded is the same batch with each sequence filled up to
the limit, as many to a micro-batch as the token budget holds; the gradients are the same. The last line is JSON: the
ratio, and how evenly four ranks would share the packed batch.
"""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from services.trainer.backends.megatron import distributed, micro_batches
from services.trainer.backends.megatron.backend import MegatronBackend
from services.trainer.backends.megatron.settings import MicroBatching, Parallelism
from services.trainer.batch import Batch
from tests.integration.megatron.support import (
    PLAIN_GRADIENT,
    make_batch,
    make_config,
    make_model,
    policy_gradient,
    relative,
)

LIMIT, SEQUENCES, BUDGET, ROUNDS = 1024, 32, 4096, 3
# The output layer has the share of the compute that it has in SmolLM2-135M: packing saves nothing there, because
# only trained tokens reach it.
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
}
KEYS = {
    "policy.max_total_sequence_length": LIMIT,
    "data.max_input_seq_length": LIMIT // 2,
    "policy.sequence_packing.enabled": True,
    "policy.sequence_packing.train_mb_tokens": BUDGET,
}


@dataclass(frozen=True)
class Padded(Parallelism):
    """Each sequence takes the whole limit."""

    @property
    def sequence_multiple(self) -> int:
        return LIMIT


def log_normal(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    # The mean of exp(N(m, s)) is exp(m + s^2 / 2).
    lengths = (torch.randn(count, generator=generator) * 0.6 - 0.18).exp() * LIMIT / 4
    return lengths.round().int().clamp(4, LIMIT).tolist()


def step(folder: Path, batch: Batch, padded: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Median seconds of a step, and the weights after the first."""
    backend = MegatronBackend(make_config(folder, {**KEYS, **PLAIN_GRADIENT}), folder)
    if padded:
        object.__setattr__(backend.settings, "parallel", Padded())
    backend.step(batch, policy_gradient)
    weights = {name: tensor.clone() for name, tensor in backend.tensors()}
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        backend.step(batch, policy_gradient)
        seconds.append(time.perf_counter() - started)
    return median(seconds), weights


def main() -> None:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    lengths = log_normal(SEQUENCES)
    batch = make_batch([(2, [length - 2]) for length in lengths], holes=False)
    with TemporaryDirectory() as folder:
        model = make_model(Path(folder), max_position_embeddings=LIMIT, **MODEL)
        distributed.initialize(make_config(model, KEYS))
        packed_s, packed = step(model, batch, padded=False)
        padded_s, padded = step(model, batch, padded=True)
        distributed.shutdown()
    many = make_batch([(2, [length - 2]) for length in log_normal(512)], holes=False)
    dealt = micro_batches.split(many, MicroBatching(1, tokens=BUDGET), 4, share_prefix=False)
    found = micro_batches.evenness(many, dealt, 1)
    figures = {
        "packed_speedup": round(padded_s / packed_s, 2),
        "packed_s": round(packed_s, 3),
        "padded_s": round(padded_s, 3),
        "largest_weight_difference": max(relative(packed[name], padded[name]) for name in packed),
        "padding_fraction": found["packing_padding_fraction"],
        "padding_fraction_padded": round(1 - sum(lengths) / (LIMIT * SEQUENCES), 3),
        "token_imbalance": round(found["packing_token_imbalance"], 5),
        "attention_imbalance": round(found["packing_attention_imbalance"], 5),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
