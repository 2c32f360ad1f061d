"""One source for two array libraries: numpy on the host, where a call costs a third of torch's, and torch on a GPU.

Code between `native` and `tensor` uses only what both write alike: operators, slices, `library(x).where` and the like.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable)
Array = Any
"""A numpy array on the host, a tensor on a GPU."""


def native(x: Tensor) -> Array:
    """numpy's view of a host tensor, the tensor itself on a GPU."""
    return x if x.is_cuda else x.numpy()


def tensor(x: Array) -> Tensor:
    """The tensor of a native array, without a copy."""
    if not isinstance(x, np.ndarray):
        return x
    of_numpy = torch.from_numpy(x)
    return of_numpy if x.size else of_numpy.new_empty(x.shape)  # an empty one has strides that `view` does not take


def library(x: Array) -> ModuleType:
    """The module whose functions take x."""
    return np if isinstance(x, np.ndarray) else torch


def like(index: np.ndarray, x: Array) -> Array:
    """Host numbers where x is."""
    return index if isinstance(x, np.ndarray) else torch.from_numpy(index).to(x.device)


def quiet(function: Function) -> Function:
    """The function without numpy's warnings: what is not finite is refused by admission, or was asked for.

    Each gets an `errstate` of its own: before numpy 2, one that is entered twice restores the wrong state.
    """
    return np.errstate(over="ignore", under="ignore", invalid="ignore")(function)


def zeros(n: int, x: Array) -> Array:
    """[n] zeros of x's library, dtype and device."""
    return np.zeros(n, x.dtype) if isinstance(x, np.ndarray) else x.new_zeros(n)


def repeat(x: Array, counts: np.ndarray) -> Array:
    """Each number of x as often as `counts` says."""
    if isinstance(x, np.ndarray):
        return np.repeat(x, counts)
    return x.repeat_interleave(torch.from_numpy(counts).to(x.device), output_size=int(counts.sum()))


def at_index(x: Any, index: Any) -> Any:
    """x[index]; a float is the same everywhere."""
    return x if isinstance(x, float) else x[index]


def times(x: Array, rate: Any, out: Array) -> Array:
    """rate * x in out, or x itself where that is the same."""
    return x if isinstance(rate, float) and rate == 1.0 else library(x).multiply(x, rate, out=out)


def countable(x: Tensor) -> Tensor:
    """x in a dtype that numpy has and that can be summed."""
    return x.float() if x.dtype in (torch.bfloat16, torch.bool) else x


def result_dtype(*inputs: Tensor) -> torch.dtype:
    """float64 if a per-token input is, else float32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in inputs) else torch.float32


def empty(n: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty; a large one on the host from numpy, which asks for huge pages: the faults of small ones can cost as
    much as the scan that writes there.
    """
    if device.type == "cuda" or n < 2**18 or dtype == torch.bfloat16:
        return torch.empty(n, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(n, dtype=torch.zeros((), dtype=dtype).numpy().dtype))


def copy(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x.to(dtype, copy=True), for a large one as `empty`."""
    return empty(len(x), dtype=dtype or x.dtype, device=x.device).copy_(x)


def stack(*values: Any) -> Array:
    """Numbers that live where the data do, on the host or a GPU, as one float64 array there."""
    device = next((value.device for value in values if isinstance(value, Tensor) and value.is_cuda), None)
    if device is None:
        return np.array([float(value) for value in values])
    return torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])
