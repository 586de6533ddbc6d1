"""M-12: gloo has what tensor, expert and data parallelism need of it, with the right values."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.backends.megatron import distributed
from tests.integration.megatron.support import make_config, run_ranks

RANKS = 3


def rows(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` rows that say whose they are."""
    return (100 * rank + torch.arange(count, dtype=torch.float32))[:, None].expand(count, 2).to(dtype).contiguous()


def check(rank: int, folder: str) -> None:
    from megatron.core.tensor_parallel import mappings

    distributed.initialize(make_config(folder, {"trainer.nproc": RANKS}))
    group = dist.group.WORLD
    for dtype in (torch.float32, torch.bfloat16):
        # Rank r sends its next r + 1 rows to each rank in turn: shares of different sizes.
        sent, counts = rows(rank, RANKS * (rank + 1), dtype), [each + 1 for each in range(RANKS)]
        received = mappings.all_to_all(group, sent, counts, [rank + 1] * RANKS)
        expected = [rows(each, RANKS * (each + 1), dtype)[rank * (each + 1) :][: each + 1] for each in range(RANKS)]
        assert torch.equal(received, torch.cat(expected))
        uneven = mappings._gather_along_first_dim(rows(rank, rank + 1, dtype), group, counts)
        assert torch.equal(uneven, torch.cat([rows(each, each + 1, dtype) for each in range(RANKS)]))
        nothing = mappings._gather_along_first_dim(rows(rank, 0, dtype), group, [0] * RANKS)
        assert nothing.shape == (0, 2)
        whole = sum(rows(each, 6, torch.float32) for each in range(RANKS))
        scattered = mappings._reduce_scatter_along_first_dim(rows(rank, 6, dtype), group, counts)
        assert torch.allclose(scattered.float(), whole.split(counts)[rank], rtol=1e-2)
        even = mappings._reduce_scatter_along_first_dim(rows(rank, 6, dtype), group)
        assert torch.allclose(even.float(), whole.chunk(RANKS)[rank], rtol=1e-2)
        gathered = mappings._gather_along_first_dim(rows(rank, 2, dtype), group)
        assert torch.equal(gathered, torch.cat([rows(each, 2, dtype) for each in range(RANKS)]))


def test_collectives_have_the_right_values(tiny: str) -> None:
    run_ranks(RANKS, check, tiny)
