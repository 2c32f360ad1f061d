"""One source for two array libraries: numpy on the host, where a call costs a third of torch's, and torch on a GPU.

Code between `native` and `tensor` uses only what both write alike: operators, slices, `library(x).where` and the like.
"""

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = Any
"""A numpy array on the host, a tensor on a GPU."""


def native(x: Tensor) -> Array:
    """numpy's view of a host tensor, the tensor itself on a GPU."""
    return x if x.is_cuda else x.numpy()


def tensor(x: Array) -> Tensor:
    """The tensor of a native array, without a copy."""
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x


def library(x: Array) -> ModuleType:
    """The module whose functions take x."""
    return np if isinstance(x, np.ndarray) else torch


def like(index: np.ndarray, x: Array) -> Array:
    """Host numbers where x is."""
    return index if isinstance(x, np.ndarray) else torch.from_numpy(index).to(x.device)
