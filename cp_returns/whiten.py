"""Whitening over the valid tokens of all ranks: one small collective, always joined, never NaN."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from cp_returns.agreement import Facts, Problem, agree, check_each, refuse
from cp_returns.arrays import copy, library, native, quiet, result_dtype, stack, tensor
from cp_returns.collectives import AllGather, call
from cp_returns.errors import CPInputError
from cp_returns.groups import device_of
from cp_returns.masks import as_bits, blank, select

EPS_MODES = ("add", "clamp")
MESSAGE = 512  # bytes: header, sums, three moments


def options(
    ddof: int = 1,
    eps: float = 1e-8,
    eps_mode: str = "add",
    center: bool = True,
    shift_mean: bool = True,
    scale: bool = True,
) -> dict[str, Any]:
    """The options of `whiten` by name."""
    return {
        "ddof": ddof,
        "eps": eps,
        "eps_mode": eps_mode,
        "center": center,
        "shift_mean": shift_mean,
        "scale": scale,
    }


@torch.no_grad()
@quiet
def whiten(
    x: Shaped[Tensor, " local"],
    mask: Shaped[Tensor, " local"],
    *,
    all_gather: AllGather,
    ddof: int = 1,
    eps: float = 1e-8,
    eps_mode: str = "add",
    center: bool = True,
    shift_mean: bool = True,
    scale: bool = True,
    weights: Shaped[Tensor, " local"] | None = None,
    agreement: str = "full",
) -> Shaped[Tensor, " local"]:
    """(x - mean) / sqrt(var + eps) over the valid tokens of every rank of `all_gather`, which should be DP x CP.

    x, mask: this rank's packed tokens, also when it has none: every rank must call. The population is this call: with
    micro-batches, call it once on all of them. mean and the centred second moment are float64, merged over ranks from
    (weight, mean, M2).

    agreement: "full" compares options and checks values on all ranks; "off" trusts the caller.

    ddof: 1 (slime, verl) or 0 (OpenRLHF, NeMo-RL). eps_mode: "add" (var + eps) or "clamp" (max(var, eps); OpenRLHF,
    NeMo-RL). center=False only scales; scale=False only centres. shift_mean=False gives (x - mean) / sqrt(var + eps) +
    mean (slime, verl, TRL). weights: one a token, with ddof 0; sequence weighting is `cp.spread(1 / valid counts)`.

    Masked tokens give 0. Constant input, one token or none give 0, never NaN. NaN at a valid token stays visible.
    Returns float32 (float64 for float64 x). Raises CPInputError, on all ranks, for a mask that is not 0 or 1, a
    weight that is negative or not finite, shapes that differ, or options that differ.
    """
    chosen = options(ddof, eps, eps_mode, center, shift_mean, scale)
    problem = _first_problem(x, mask, weights, chosen, agreement)
    if problem is not None:
        if agreement == "off":
            raise CPInputError(str(problem))
        refuse(all_gather, problem, device_of(all_gather, x), step="whiten", where="rank", size=MESSAGE)
    bits = as_bits(mask)
    local = moments(x, bits, weights)
    if agreement == "full":
        checks = (
            []
            if mask.dtype == torch.bool
            else [check_each("mask", mask, (mask != 0) & (mask != 1), "0 or 1", of="token")]
        )
        if weights is not None:
            bad = mask.bool() & ~((weights >= 0) & (weights < torch.inf))
            expected = "a finite number that is at least 0 at a valid token"
            checks.append(check_each("weights", weights, bad, expected, of="token"))
        facts = Facts({**chosen, "weights": weights is not None}, checks=checks)
        messages = agree(all_gather, facts, local, step="whiten", where="rank", size=MESSAGE)
    else:
        messages = call(all_gather, local, "whiten")
    return apply(x, bits, merge(messages), chosen)


def moments(x: Tensor, bits: Tensor, weights: Tensor | None = None) -> Float64[Tensor, "3"]:
    """(weight, mean, M2) of the valid tokens. Taken about one valid token, so a constant has M2 exactly 0 and an exact
    mean.
    """
    wide, d = native(bits), native(copy(x.detach(), torch.float64))
    lib, origin = library(d), 0.0
    if len(x):
        first = wide.argmin()  # a valid token's bits are -1
        origin = lib.where(wide[first] != 0, d[first], 0.0)
    d -= origin
    blank(d, wide)
    w = None if weights is None else native(select(weights.detach().double(), bits))
    total = lib.count_nonzero(wide) if w is None else w.sum()
    shift = (d if w is None else d * w).sum() / (total + (total == 0))
    d -= shift
    blank(d, wide)
    d *= d
    return tensor(stack(total, origin + shift, (d if w is None else d * w).sum()))


def merge(messages: Float64[Tensor, "ranks 3"]) -> Float64[Tensor, "3"]:
    """(weight, mean, M2) of all ranks (Chan et al.), about the mean of the heaviest rank: equal means merge to
    themselves.
    """
    x = native(messages)
    lib, (weight, mean, m2) = library(x), x.T
    total = weight.sum()
    origin = mean[weight.argmax()]
    d = lib.where(weight > 0, mean - origin, 0.0)
    shift = (weight * d).sum() / (total + (total == 0))
    return tensor(stack(total, origin + shift, m2.sum() + (weight * lib.square(d - shift)).sum()))


def apply(x: Tensor, bits: Tensor, merged: Float64[Tensor, "3"], options: Mapping[str, Any]) -> Tensor:
    """Whiten this rank's tokens by the moments of all."""
    x64 = copy(x.detach(), torch.float64)
    y, (weight, mean, m2) = native(x64), native(merged)
    lib = library(y)
    if options["center"]:
        y -= mean
    if options["scale"]:
        freedom = weight - options["ddof"]
        var = m2 / lib.where(freedom > 0, freedom, 1.0)
        var = var + options["eps"] if options["eps_mode"] == "add" else lib.clip(var, options["eps"], None)
        y *= (var != 0) / lib.sqrt(var + (var == 0))  # a constant gives 0, NaN stays NaN
    if not options["shift_mean"]:
        y += mean
    out = native(x64.to(result_dtype(x)))
    blank(out, native(bits) * (weight != 0))
    return tensor(out)


def _first_problem(x: Any, mask: Any, weights: Any, options: Mapping[str, Any], agreement: str) -> Problem | None:
    for name, y in (("x", x), ("mask", mask), *([] if weights is None else [("weights", weights)])):
        if not isinstance(y, Tensor):
            return Problem(name, f"a {type(y).__name__}", "a tensor")
        if y.is_complex():
            return Problem(f"dtype of {name}", y.dtype, "a float, int or bool dtype")
        if y.dim() != 1 or y.shape != x.shape:
            return Problem(f"shape of {name}", list(y.shape), f"[{len(x) if x.dim() else 1}], one a token of this rank")
    if agreement not in ("full", "off"):
        return Problem("agreement", repr(agreement), "'full' or 'off'")
    for name in ("center", "shift_mean", "scale"):
        if not isinstance(options[name], bool):
            return Problem(name, repr(options[name]), "True or False")
    ddof = options["ddof"]
    if not isinstance(ddof, int) or ddof not in ((0, 1) if weights is None else (0,)):
        return Problem("ddof", ddof, "0 or 1, and 0 with weights")
    if options["eps_mode"] not in EPS_MODES:
        return Problem("eps_mode", repr(options["eps_mode"]), f"one of {EPS_MODES}")
    if not isinstance(options["eps"], (int, float)) or not options["eps"] >= 0:
        return Problem("eps", options["eps"], "a number that is at least 0")
    if not options["center"] and not options["shift_mean"]:
        return Problem("shift_mean", False, "True with center=False, which does not take the mean away")
    return None
