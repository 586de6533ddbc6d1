"""Everything Megatron-Core needs in order to run without CUDA, in this one module.

Inert when CUDA is present. Nothing happens at import: `install()` is called once, by `distributed.initialize`, and
`device_literals()` is entered around the parts of Megatron that spell the device "cuda" out.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What was replaced, so that it can be put back: (owner, attribute, original).
_replaced: list[tuple[Any, str, Any]] = []


def active() -> bool:
    """Whether this process trains on a CPU."""
    return not torch.cuda.is_available()


def install() -> None:
    """Give Megatron CPU stand-ins for the CUDA runtime. Does nothing with CUDA, or when called again."""
    if _replaced or not active():
        return
    _replace_runtime()
    _replace_rng()
    _replace_wgrad_accumulation()
    _replace_collectives()
    _replace_experts()


def uninstall() -> None:
    """Put everything back."""
    while _replaced:
        setattr(*_replaced.pop())


def _replace(owner: Any, name: str, stand_in: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name, None)))
    setattr(owner, name, stand_in)


def device_literals() -> contextlib.AbstractContextManager[Any]:
    """Inside, device="cuda" means the CPU and CPU tensors report CUDA type names. Does nothing with CUDA."""
    return _DeviceLiterals() if active() else contextlib.nullcontext()


def tune_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Switch torch's Adam, the one Megatron falls back to on a CPU, to its fused kernel: many times its speed."""
    if active() and isinstance(optimizer, torch.optim.Adam):
        for group in optimizer.param_groups:
            group.update(fused=True, foreach=False)


def clip_in_step(optimizer: torch.optim.Optimizer, coefficient: float) -> bool:
    """Have torch's fused Adam multiply gradients by `coefficient` as it reads them, which spares a pass over all of
    them, in its next step. False when this optimizer cannot. It is how torch's GradScaler talks to it."""
    if not (active() and isinstance(optimizer, torch.optim.Adam)):
        return False
    optimizer.grad_scale = torch.tensor(1 / coefficient) if coefficient < 1 else None  # type: ignore[attr-defined]
    return True


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """Torch's Adam counts steps per parameter, the fused Adams that Megatron knows in their parameter groups."""
    counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    counts |= {int(group["step"]) for group in optimizer.param_groups if "step" in group and not active()}
    return max(counts, default=0)


def set_steps_taken(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Give every parameter a count of its own: a shared one would grow once per parameter."""
    for group in optimizer.param_groups:
        if not active():
            group["step"] = steps
            continue
        group.pop("step", None)
        for parameter in group["params"]:
            optimizer.state[parameter]["step"] = torch.tensor(float(steps))


def hide_steps_taken(optimizer: torch.optim.Optimizer) -> None:
    """Take torch's counts away where Megatron would look for them in a checkpoint; `set_steps_taken` follows."""
    if active():
        for state in optimizer.state.values():
            state.pop("step", None)


class _DeviceLiterals(TorchFunctionMode):
    def __torch_function__(self, func: Callable, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda or (func is Tensor.copy_ and _same_memory(*args[:2])):
            return args[0]
        result = func(*args, **kwargs)
        if func is Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or getattr(device, "type", "") == "cuda"


def _same_memory(first: Tensor, second: Tensor) -> bool:
    """Of float32 weights the optimizer's masters are views, which Megatron copies onto themselves."""
    return first.data_ptr() == second.data_ptr() and first.dtype == second.dtype and first.shape == second.shape


class _Nothing:
    """A stream or an event where work is done by the time the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _Nothing]:
        return lambda *args, **kwargs: _Nothing()

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *error: object) -> None: ...


def _replace_runtime() -> None:
    stand_ins: dict[str, Any] = {
        "current_device": lambda: "cpu",
        "synchronize": lambda *args: None,
        "empty_cache": lambda: None,
        "Stream": _Nothing,
        "Event": _Nothing,
        "stream": _Nothing,
        "current_stream": _Nothing,
        "default_stream": _Nothing,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
    }
    for name, stand_in in stand_ins.items():
        _replace(torch.cuda, name, stand_in)


class CpuRngTracker:
    """Megatron's tracker of named random states, on the one generator that a CPU has."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.states_: dict[str, Tensor] = {}

    def is_initialized(self) -> bool:
        return bool(self.states_)

    def get_states(self) -> dict[str, Tensor]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        if name in self.states_:
            raise ValueError(f"random state {name!r} exists already")
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)


def _replace_rng() -> None:
    from megatron.core.tensor_parallel import random

    _replace(random, "_CUDA_RNG_STATE_TRACKER", CpuRngTracker())
    _replace(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    _replace(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state())
    _replace(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state))


def _accumulate_wgrad(inputs: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    if inputs.dtype == main_grad.dtype:
        main_grad.addmm_(grad_output.t(), inputs)
    else:
        main_grad.add_(grad_output.t() @ inputs)


def _replace_wgrad_accumulation() -> None:
    """Weight gradients go straight into Megatron's buffer, as Apex's CUDA kernel does it: no copy, no extra pass."""
    from megatron.core.tensor_parallel import layers

    kernels = types.SimpleNamespace(wgrad_gemm_accum_fp32=_accumulate_wgrad, wgrad_gemm_accum_fp16=_accumulate_wgrad)
    _replace(layers, "fused_weight_gradient_mlp_cuda", kernels)
    _replace(layers, "_grad_accum_fusion_available", True)


def _replace_collectives() -> None:
    """A rank that is alone needs no collective, but gloo would copy every gradient and weight for it."""
    from megatron.core.distributed import param_and_grad_buffer

    for name in ("dist_reduce_scatter_func", "dist_all_gather_func"):
        _replace(param_and_grad_buffer, name, _unless_alone(getattr(param_and_grad_buffer, name)))


def _unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(output: Tensor, source: Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is not None and group.size() == 1 and not kwargs.get("async_op"):
            return None if output.data_ptr() == source.data_ptr() else output.copy_(source)
        return collective(output, source, *args, group=group, **kwargs)

    return call


def _replace_experts() -> None:
    """Of a mixture of experts: what moves counts to the CPU leaves those alone that are there, though an all-to-all
    takes plain numbers only; and a name is missing without Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    _replace(token_dispatcher, "maybe_move_tensor_to_cpu", numbers)
    _replace(moe_utils, "te_general_gemm", None)
    _replace_uneven_collectives()


def _replace_uneven_collectives() -> None:
    """gloo gathers and scatters equal shares only; with sharded experts, ranks have as many tokens as were routed."""
    from megatron.core.tensor_parallel import mappings

    even_gather, even_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(source: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(source, group, None, use_global_buffer)
        most = max(output_split_sizes)
        padded = torch.cat([source, source.new_zeros(most - len(source), *source.shape[1:])])
        parts = even_gather(padded, group).unflatten(0, (group.size(), most))  # unlike a split, where nothing came too
        return torch.cat([part[:count] for part, count in zip(parts, output_split_sizes, strict=True)])

    def scatter(source: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(source, group, None, use_global_buffer)
        summed = source.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(summed, group=group)
        return summed.split(list(input_split_sizes))[group.rank()]

    _replace(mappings, "_gather_along_first_dim", gather)
    _replace(mappings, "_reduce_scatter_along_first_dim", scatter)
