"""KL estimators a token."""

import torch
from jaxtyping import Shaped
from torch import Tensor

from cp_returns.errors import CPInputError


def approx_kl(
    log_probs: Shaped[Tensor, "*tokens"],
    ref_log_probs: Shaped[Tensor, "*tokens"],
    mask: Shaped[Tensor, "*tokens"],
    *,
    kind: str = "k1",
    clamp: float | None = None,
) -> Shaped[Tensor, "*tokens"]:
    """The KL of each valid token from its own log-probs in nats; exactly 0 at masked tokens, whatever they hold.

    With d = log_probs - ref_log_probs:  k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d
    (Schulman, "Approximating KL Divergence", 2020). k3 keeps its exponent within +-20, so nothing overflows.
    `clamp=c` limits the result to +-c (slime's low_var_kl, OpenRLHF and verl: 10).

    Computed in float32, or float64 if an input is; without autograd.
    Raises CPInputError: shapes that differ, an unknown `kind`, a `clamp` that is not positive, a mask not of 0 and 1.
    """
    if not log_probs.shape == ref_log_probs.shape == mask.shape:
        shapes = [list(x.shape) for x in (log_probs, ref_log_probs, mask)]
        raise CPInputError(f"log_probs, ref_log_probs and mask have shapes {shapes}; expected three equal ones")
    # A bool mask needs no look at its values, which on a GPU would wait for them.
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise CPInputError("mask holds a value other than 0 and 1")

    d = torch.where(mask.bool(), difference(log_probs, ref_log_probs), 0.0)
    return of_difference(d, kind=kind, clamp=clamp)


def difference(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """log_probs - ref_log_probs in float32, or float64 if one is; a new tensor without autograd."""
    dtype = torch.promote_types(torch.promote_types(log_probs.dtype, ref_log_probs.dtype), torch.float32)
    return log_probs.detach().to(dtype) - ref_log_probs.detach().to(dtype)


def of_difference(d: Tensor, *, kind: str, clamp: float | None = None) -> Tensor:
    """k1, k2 or k3 of d = log_probs - ref_log_probs; differentiable.

    Raises CPInputError for another kind or a clamp that is not positive.
    """
    if clamp is not None and not clamp > 0:
        raise CPInputError(f"clamp is {clamp}; expected a positive number or None")
    if kind == "k1":
        k = d
    elif kind == "k2":
        k = d * d / 2
    elif kind == "k3":
        k = torch.expm1((-d).clamp(-20.0, 20.0)) + d  # exp(-d) - 1 would lose a small d in float32
    else:
        raise CPInputError(f"kind is {kind!r}; expected 'k1', 'k2' or 'k3'")
    return k if clamp is None else k.clamp(-clamp, clamp)
