"""Chunked log-probs against log-softmax in float64, whatever is kept and whatever is recomputed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from services.trainer.backends.megatron import head
from services.trainer.backends.megatron.head import Head, token_log_probs

COUNT, VOCAB, HIDDEN = 23, 101, 16


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator) for size in (COUNT, VOCAB))
    return hidden, weight, torch.randint(VOCAB, (COUNT,), generator=generator), torch.randn(COUNT, generator=generator)


@pytest.mark.parametrize(("chunk", "keep"), [(10**6, 10**6), (5 * VOCAB, 10**6), (5 * VOCAB, 7 * VOCAB), (1, 0)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("fused", [False, True])
def test_values_and_gradients(
    chunk: int, keep: int, temperature: float, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P-02, P-10"""
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(head, "KEEP_ELEMENTS", keep)
    hidden, weight, targets, grad = inputs()
    theirs = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    expected = (theirs[0] @ theirs[1].t() / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad(expected, theirs, grad.double())

    hidden.requires_grad_()
    parameter = torch.nn.Parameter(weight)
    parameter.main_grad = torch.ones(VOCAB, HIDDEN)  # type: ignore[attr-defined]
    result = token_log_probs(hidden, targets, Head(parameter, temperature, fused=fused))
    result.backward(grad)
    assert float((result - expected).abs().max()) <= 1e-5
    assert hidden.grad is not None
    assert float((hidden.grad - wanted[0]).abs().max()) <= 1e-5
    # Fused, the gradient is added to what the buffer holds already.
    ours = parameter.main_grad - 1 if fused else parameter.grad  # type: ignore[attr-defined]
    assert float((ours - wanted[1]).abs().max()) <= 1e-5
    assert (parameter.grad is None) == fused


def test_unlikely_words_do_not_underflow() -> None:
    """A probability of e^-300 is 0 in float32, its logarithm is not."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[300.0], [0.0]])
    assert float(token_log_probs(hidden, torch.tensor([1]), Head(weight, 1.0))) == pytest.approx(-300)


def test_a_vocabulary_in_two_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """M-03: the shards' reductions, played one after the other, give the whole vocabulary's log-probs and gradients."""
    hidden, weight, targets, grad = inputs()
    whole = hidden.clone().requires_grad_()
    token_log_probs(whole, targets, Head(weight, 0.7)).backward(grad)
    cut = 60
    shards = [Head(weight[:cut], 0.7, 0), Head(weight[cut:], 0.7, cut)]
    played = _Lockstep(monkeypatch)
    results, gradients = played.run(shards, hidden, targets, grad)
    expected = token_log_probs(hidden, targets, Head(weight, 0.7))
    for result, gradient in zip(results, gradients, strict=True):
        assert float((result - expected).abs().max()) <= 1e-5
        assert float((gradient - whole.grad).abs().max()) <= 1e-5


class _Lockstep:
    """Two threads as two ranks, with an all-reduce between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import threading

        self.barrier = threading.Barrier(2)
        self.slots: dict[int, Tensor] = {}
        monkeypatch.setattr(head.dist, "all_reduce", self._all_reduce)

    def _all_reduce(self, value: Tensor, op: object, group: _Group) -> None:
        self.slots[group.rank_] = value.clone()
        self.barrier.wait()
        both = torch.stack([self.slots[0], self.slots[1]])
        self.barrier.wait()
        value.copy_(both.amax(0) if op == head.dist.ReduceOp.MAX else both.sum(0))

    def run(
        self, shards: list[Head], hidden: Tensor, targets: Tensor, grad: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        from concurrent.futures import ThreadPoolExecutor

        def work(rank: int) -> tuple[Tensor, Tensor]:
            mine = hidden.clone().requires_grad_()
            result = token_log_probs(mine, targets, dataclasses.replace(shards[rank], group=_Group(rank)))
            result.backward(grad)
            assert mine.grad is not None
            return result.detach(), mine.grad

        with ThreadPoolExecutor(2) as pool:
            pairs = list(pool.map(work, range(2)))
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


class _Group:
    def __init__(self, rank: int) -> None:
        self.rank_ = rank

    def size(self) -> int:
        return 2
