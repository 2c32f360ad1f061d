"""Lists as trainers hold them, one entry a sample, to packed tensors. Each error names the sample and both lengths."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cp_returns.errors import CPInputError
from cp_returns.layout import Lengths


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
    if not all(isinstance(x, Tensor) for x in xs) or [x.shape for x in xs] != [(length,) for length in expected]:
        for i, (x, length) in enumerate(zip(xs, expected, strict=True)):
            if not isinstance(x, Tensor) or x.shape != (length,):
                given = f"has shape {list(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
                whole = "" if length == full[i] else f" (the whole response has {full[i]})"
                raise CPInputError(
                    f"sample {i}, {name} {given}; expected a tensor [{length}], the tokens this rank owns{whole}"
                )
    if {x.dtype for x in xs} != {xs[0].dtype} or {x.device for x in xs} != {device}:
        i = next(i for i, x in enumerate(xs) if (x.dtype, x.device) != (xs[0].dtype, device))
        raise CPInputError(
            f"sample {i}, {name} is {xs[i].dtype} on {xs[i].device}; expected {xs[0].dtype} on {device}, as the others"
        )
    return torch.cat(list(xs)).detach()


def per_sample(name: str, x: Sequence[float] | Tensor | None, samples: int, device: torch.device) -> Tensor | None:
    """One number a sample, from a list or a tensor, in float64 (ids in int64) where it was a list."""
    if x is None:
        return None
    dtype = torch.int64 if name == "group_ids" else torch.float64
    if isinstance(x, list | tuple) and dtype == torch.float64 and set(map(type, x)) <= {float, int}:
        x = torch.from_numpy(np.array(x, dtype=np.float64))  # without a look at each
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
