"""Lists as trainers hold them, one entry a sample, to packed tensors. Each error names the sample and both lengths."""

from collections.abc import Sequence
from numbers import Integral, Real
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_returns.errors import CPInputError
from cp_returns.layout import Lengths

_DTYPE = attrgetter("dtype")


def padded_lengths(given: Lengths | None, packed_seq_params: Any) -> Lengths | None:
    """The given padded lengths, else those of packed_seq_params.cu_seqlens_q_padded, else None."""
    cu_seqlens = getattr(packed_seq_params, "cu_seqlens_q_padded", None)
    if given is not None or cu_seqlens is None:
        return given
    return np.diff(cu_seqlens.detach().cpu().numpy())


def pack(
    name: str, xs: Sequence[Tensor] | None, lengths: np.ndarray, full: np.ndarray, device: torch.device
) -> Tensor | None:
    """A list of one tensor a sample -> packed; each must have the length that its sample has here."""
    if xs is None:
        return None
    if not isinstance(xs, Sequence) or len(xs) != len(lengths):
        what = f"a list of {len(xs)}" if isinstance(xs, Sequence) else f"a {type(xs).__name__}"
        raise CPInputError(f"{name} is {what}; expected a list of {len(lengths)} tensors, one a sample")
    if not len(xs):
        return torch.zeros(0, device=device)
    expected = lengths.tolist()
    try:
        packed = torch.cat(list(xs)).detach()  # refuses what is no tensor, another dimension and another device
        fits = packed.dim() == 1 and packed.device == device and [*map(Tensor.numel, xs)] == expected
    except (TypeError, RuntimeError):
        _name_misfit(name, xs, expected, full, device)
        raise
    if not fits or len({*map(_DTYPE, xs)}) > 1:
        _name_misfit(name, xs, expected, full, device)
    return packed


def _name_misfit(name: str, xs: Sequence[Tensor], lengths: list[int], full: np.ndarray, device: torch.device) -> None:
    """Raises CPInputError for the first sample whose tensor has another shape, else another dtype or device."""
    for i, (x, length) in enumerate(zip(xs, lengths, strict=True)):
        if not isinstance(x, Tensor) or x.shape != (length,):
            given = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
            whole = "" if length == full[i] else f" (the whole response has {full[i]})"
            what = "the whole response" if name == "loss_masks" else f"the tokens this rank owns{whole}"
            raise CPInputError(f"sample {i}, {name} {given}; expected a tensor [{length}], {what}")
    for i, x in enumerate(xs):
        if (x.dtype, x.device) != (xs[0].dtype, device):
            raise CPInputError(
                f"sample {i}, {name} is {x.dtype} on {x.device}; expected {xs[0].dtype} on {device}, as the others"
            )


def per_sample(name: str, x: Sequence[float] | Tensor | None, samples: int, device: torch.device) -> Tensor | None:
    """One number a sample, from a list or a tensor, in float64 (ids in int64) where it was a list."""
    if x is None:
        return None
    dtype = torch.int64 if name == "group_ids" else torch.float64
    if isinstance(x, list | tuple) and dtype == torch.float64 and set(map(type, x)) <= {float, int}:
        x = torch.from_numpy(np.array(x, dtype=np.float64))  # without a look at each
    if not isinstance(x, Tensor | Sequence):
        raise CPInputError(f"{name} is a {type(x).__name__}; expected a list or a tensor of one number a sample")
    if not isinstance(x, Tensor):
        shapes = [list(y.shape) for y in x if isinstance(y, Tensor) and y.dim()]
        if shapes:
            raise CPInputError(f"{name} holds a tensor of shape {shapes[0]}; expected one number a sample")
        numbers = [y.item() if isinstance(y, Tensor) else y for y in x]
        kind, words = (Integral, "an integer") if name == "group_ids" else (Real, "a number")
        for i, number in enumerate(numbers):
            if not isinstance(number, kind):
                raise CPInputError(f"sample {i}, {name} is {number!r}; expected {words}")
        x = torch.tensor(numbers, dtype=dtype)
    if tuple(x.shape) != (samples,):
        raise CPInputError(f"{name} has shape {list(x.shape)}; expected [{samples}], one number a sample")
    return x.detach().to(device)
