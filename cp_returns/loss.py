"""Policy, value and KL losses of a rank that holds only its slice of every response.

A `Loss` is this rank's share of a fraction: shares of `total` and of `count` ADD, over the ranks of DP x CP and over
the micro-batches, to the numerator and the denominator of the whole batch at CP 1, and so do the gradients.
Denominators come from the FULL masks, never from the tokens that a rank happens to hold. `megatron_loss` puts the
shares in the form that Megatron wants. With W = CP size, D = DP size, M = micro-batches of a rank, and sums over all
ranks and micro-batches, Megatron's schedule, DDP and finalize_model_grads make of a returned loss L (and token count
n):

| calculate_per_token_loss | form | Megatron-core | gradient | so we return |
|---|---|---|---|---|
| True | (L, n, report) | 0.13 and later | sum(dL) / sum(n), n summed over DP x CP | total, count |
| True | (L, n, report) | 0.12 | sum(dL) / sum(n), n summed over DP only | total, whole |
| False | (L, report) | all | sum(dL * W / M) / (D * W) | total * M * D / whole_batch |
| False | (L, n, report) | 0.13 and later | sum(dL / n / M) / (D * W): not CP-invariant with local n | never |
| False | (L, n, report) | 0.12 | sum(dL * W / n / M) / (D * W): the same trap | never |

`whole_batch` is `count_tokens` or `count_sequences` over the DP ranks, once a step. A value head, KL or auxiliary
term goes into the same fraction with `combine`.

Inputs of any float or int dtype; all is computed and returned in float32, or float64 if a per-token input is. Masked
slots may hold anything. The values of valid tokens are not looked at: NaN there is a loss of NaN, for to look would
wait for a GPU. For the same reason a `full_mask` is best bool: any other is read to see that it holds 0 and 1 only
(not with the context's agreement "off").

Of the losses and reductions only `gspo_loss`, `cp_masked_sum` and `cp_masked_mean` make a collective. There bad input
of one rank is raised by all, as is a mask, a layout or a clip that differs; elsewhere a rank raises alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from cp_returns.admission import zero_or_one
from cp_returns.agreement import Check, Facts, Problem, agree, refuse
from cp_returns.arrays import result_dtype
from cp_returns.collectives import AllGather, alone, call
from cp_returns.context import WHERE, CPContext
from cp_returns.errors import CPInputError
from cp_returns.groups import device_of
from cp_returns.kl import of_difference

LOG_RATIO_LIMIT = 20.0  # e^20 is finite in float32, so ratio * 0 is 0
COUNT_MESSAGE = 128  # bytes: header, sums, one count
SUM = "sum over ranks"  # the step that has the collective, in errors
Reduce = Callable[..., "Loss"]
"""token_mean or sequence_mean: (x, full_mask, *, cp, name) -> Loss."""


@dataclass(frozen=True)
class Loss:
    """A rank's share of sum(x) / count: shares add over the ranks of DP x CP and over micro-batches.

    `total` is differentiable and connected to its input on every rank, also where that holds no token. `whole` is
    `count` added over the CP ranks, known to each without a collective. `report` has detached pairs [total, count]
    for logging: add them over ranks and micro-batches, then divide.
    """

    total: Float[Tensor, ""]
    count: Shaped[Tensor, ""]
    whole: Shaped[Tensor, ""]
    report: dict[str, Tensor]
    per: str


# ---- reductions


def token_mean(x: Tensor, full_mask: Tensor, *, cp: CPContext, name: str = "loss") -> Loss:
    """Mean over the valid tokens of the whole batch: sum(m * x) / sum(m).

    Raises CPInputError for x that is not this rank's packed tokens, or a mask that is not 0 and 1 for all responses.
    """
    full, mask = _admit(cp, full_mask, x=x)
    (x,) = _select(mask, x)
    total, count = x.sum(), mask.sum()
    return Loss(total, count, full.sum(), {name: _pair(total, count)}, "token")


def sequence_mean(x: Tensor, full_mask: Tensor, *, cp: CPContext, name: str = "loss") -> Loss:
    """Mean over the samples that have a valid token of their mean over valid tokens: mean_i(sum_j(m x) / sum_j(m)).

    A sample is counted once, by CP rank 0. Errors as for `token_mean`.
    """
    full, mask = _admit(cp, full_mask, x=x)
    (x,) = _select(mask, x)
    tokens = _valid_tokens(full, cp)
    total = (x / tokens.clamp(min=1)[_local_samples(x, cp)].to(x.dtype)).sum()
    whole = (tokens > 0).sum()
    count = whole if cp.rank == 0 else torch.zeros_like(whole)
    return Loss(total, count, whole, {name: _pair(total, count)}, "sequence")


def cp_masked_sum(x: Shaped[Tensor, " local"], full_mask: Tensor, *, cp: CPContext) -> Shaped[Tensor, " samples"]:
    """sum_j(m * x) of each whole response, the same on every CP rank; one collective each way.

    The backward pass adds the gradients of all CP ranks, since their losses add: a rank's own share of the loss may
    use the sum as if it had the whole response. So x must require grad on all ranks or on none, also where it is empty.
    Accumulated in float64 in rank order.

    Raises CPInputError, on all ranks, for x that is not the rank's packed tokens, a mask that is not 0 and 1 for all
    responses, or a mask or layout that differs among the ranks.
    """
    _, mask, facts = _admit_together(cp, full_mask, {"x": x})
    (x,) = _select(mask, x)
    return _sum_of_whole(x, cp, facts).to(x.dtype)


def cp_masked_mean(x: Shaped[Tensor, " local"], full_mask: Tensor, *, cp: CPContext) -> Shaped[Tensor, " samples"]:
    """sum_j(m * x) / sum_j(m) of each whole response, 0 where nothing is valid. As `cp_masked_sum`."""
    full, mask, facts = _admit_together(cp, full_mask, {"x": x})
    (x,) = _select(mask, x)
    return (_sum_of_whole(x, cp, facts) / _valid_tokens(full, cp).clamp(min=1)).to(x.dtype)


# ---- losses


def policy_loss(
    log_probs: Float[Tensor, " local"],
    old_log_probs: Float[Tensor, " local"],
    advantages: Float[Tensor, " local"],
    full_mask: Shaped[Tensor, " full"],
    *,
    cp: CPContext,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
    reduce: Reduce = token_mean,
) -> Loss:
    """PPO's clipped loss (Schulman et al. 2017), with the upper clip of DAPO and the dual clip of Ye et al. 2020.

    l_j = max(-rho_j A_j, -clip(rho_j, 1 - eps_clip, 1 + eps_clip_high) A_j),   rho_j = exp(logp_j - old_j)
    l_j = min(l_j, -eps_clip_c A_j) where A_j < 0

    The log-ratio is held to +-20, where the gradient is 0 beyond it. `eps_clip_high` defaults to `eps_clip`;
    `eps_clip_c` > 1, None for none. Only `log_probs` are differentiated. Masked slots may hold anything; NaN at a valid
    token is a loss of NaN.

    Raises CPInputError for clips out of range, packed tensors of another length than this rank's, or a mask that is not
    0 and 1 for all responses.
    """
    clips = Clips.of(eps_clip, eps_clip_high, eps_clip_c)
    tokens = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
    full, mask = _admit(cp, full_mask, clips.problem(), **tokens)
    new, old, A = _select(mask, *tokens.values())
    log_ratio = (new - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    losses, clipped = _clip(log_ratio, A, clips)
    return _with_report(losses, clipped, log_ratio, full, cp, reduce, "policy_loss")


def gspo_loss(
    log_probs: Float[Tensor, " local"],
    old_log_probs: Float[Tensor, " local"],
    advantages: Float[Tensor, " local"],
    full_mask: Shaped[Tensor, " full"],
    *,
    cp: CPContext,
    eps_clip: float = 3e-4,
    eps_clip_high: float | None = 4e-4,
    eps_clip_c: float | None = None,
    reduce: Reduce | None = None,
) -> Loss:
    """GSPO (Zheng et al. 2025): `policy_loss` with one ratio per response, the geometric mean over its valid tokens.

    s_i = exp(sum_j m_ij (logp_ij - old_ij) / sum_j m_ij)

    Each rank sends one partial sum a sample, in both directions; no log-prob is gathered. The default reduction is
    `sequence_mean`. Arguments and errors as for `policy_loss`, but all ranks raise together, also for a mask, a layout
    or clips that differ among them.
    """
    clips = Clips.of(eps_clip, eps_clip_high, eps_clip_c)
    tokens = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
    full, mask, facts = _admit_together(cp, full_mask, tokens, clips)
    new, old, A = _select(mask, *tokens.values())
    if not len(new):
        new.requires_grad_()  # a rank that owns nothing joins the others' backward pass, whatever it was given
    mean = _sum_of_whole(new - old, cp, facts) / _valid_tokens(full, cp).clamp(min=1)
    # Spread before it is rounded: so the gradients of a sample's tokens are added up in float64.
    log_ratio = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[_local_samples(new, cp)].to(new.dtype)
    losses, clipped = _clip(log_ratio, A, clips)
    return _with_report(losses, clipped, log_ratio, full, cp, reduce or sequence_mean, "policy_loss")


def value_loss(
    values: Float[Tensor, " local"],
    old_values: Float[Tensor, " local"],
    returns: Float[Tensor, " local"],
    full_mask: Shaped[Tensor, " full"],
    *,
    cp: CPContext,
    eps_clip: float | None = None,
    reduce: Reduce = token_mean,
) -> Loss:
    """l_j = max((V_j - G_j)^2, (V^clip_j - G_j)^2) / 2, V^clip = old + clip(V - old, -eps_clip, eps_clip) (PPO).

    `eps_clip=None`: not clipped. Only `values` are differentiated. Masked slots may hold anything; NaN at a valid token
    is a loss of NaN.

    Raises CPInputError for a negative clip, packed tensors of another length than this rank's, or a mask that is not
    0 and 1 for all responses.
    """
    problem = None
    if eps_clip is not None and not (isinstance(eps_clip, Real) and eps_clip >= 0):
        problem = f"eps_clip is {eps_clip!r}; expected a number that is at least 0, or None"
    full, mask = _admit(cp, full_mask, problem, values=values, old_values=old_values, returns=returns)
    V, old, G = _select(mask, values, old_values, returns)
    losses = (V - G).square()
    clipped = torch.zeros_like(mask)
    if eps_clip is not None:
        held = (old + (V - old).clamp(-eps_clip, eps_clip) - G).square()
        clipped = held > losses
        losses = torch.maximum(losses, held)
    loss = reduce(losses / 2, full, cp=cp, name="value_loss")
    fraction = reduce(clipped.to(losses.dtype), full, cp=cp, name="value_clip_fraction")
    return _reporting(loss, fraction)


def kl_loss(
    log_probs: Float[Tensor, " local"],
    ref_log_probs: Float[Tensor, " local"],
    full_mask: Shaped[Tensor, " full"],
    *,
    cp: CPContext,
    kind: str = "k3",
    clamp: float | None = None,
    reduce: Reduce = token_mean,
) -> Loss:
    """The KL penalty as a loss, d = logp - ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman 2020).

    As in `approx_kl`, but differentiable in `log_probs`: k2 has the gradient of the KL, k1 on its own has mean
    gradient 0. `clamp=c` holds each to +-c. Charge the KL here or in the reward (`kl_coef`), not in both. Masked slots
    may hold anything; NaN at a valid token is a loss of NaN.

    Raises CPInputError for an unknown kind, a clamp that is not positive, packed tensors of another length than this
    rank's, or a mask that is not 0 and 1 for all responses.
    """
    full, mask = _admit(cp, full_mask, log_probs=log_probs, ref_log_probs=ref_log_probs)
    new, ref = _select(mask, log_probs, ref_log_probs)
    return reduce(of_difference(new - ref, kind=kind, clamp=clamp), full, cp=cp, name="kl_loss")


def combine(*terms: tuple[float, Loss]) -> Loss:
    """sum(coefficient * loss): combine((1.0, policy), (0.5, value)). Reports are kept apart, unscaled: where two have
    one name, the second is name_2, and so on.

    A coefficient of 0 takes a term out, whatever its loss is; it stays connected, for Megatron's overlapped reduction
    waits for a gradient of every parameter.

    Raises CPInputError without a term, and when the terms are not means over the same thing: tokens or sequences, of
    masks with one count (which is not compared on a GPU: it would have to be waited for).
    """
    if not terms:
        raise CPInputError("combine was given nothing; expected at least one (coefficient, loss)")
    first = terms[0][1]
    if any(loss.per != first.per for _, loss in terms):
        raise CPInputError(f"terms are means per {[loss.per for _, loss in terms]}; expected one reduction for all")
    if not any(loss.whole.is_cuda for _, loss in terms):
        counts = [int(loss.whole) for _, loss in terms]
        if len(set(counts)) > 1:
            raise CPInputError(f"terms are means over {counts} {first.per}s; expected one full_mask for all")
    total = sum(_scaled(coefficient, loss.total) for coefficient, loss in terms)
    report: dict[str, Tensor] = {}
    for _, loss in terms:
        for name, pair in loss.report.items():
            report[_unused(name, report)] = pair
    return Loss(total, first.count, first.whole, report, first.per)  # pyright: ignore[reportArgumentType]


def _scaled(coefficient: float, total: Tensor) -> Tensor:
    """coefficient * total, where 0 times infinity or NaN is 0."""
    return torch.where(torch.as_tensor(coefficient != 0, device=total.device), coefficient * total, 0)


def _unused(name: str, taken: Mapping[str, object]) -> str:
    names = [name, *(f"{name}_{n}" for n in range(2, len(taken) + 2))]
    return next(name for name in names if name not in taken)


# ---- Megatron


def megatron_loss(
    loss: Loss,
    *,
    calculate_per_token_loss: bool = True,
    num_microbatches: int = 1,
    data_parallel_size: int = 1,
    whole_batch: int | Tensor | None = None,
    counts_over_cp: bool | None = None,
) -> tuple:
    """What Megatron's loss function returns for this micro-batch, so that the gradient is that of the whole batch at
    CP 1.

    True (recommended): (total, count, report); the other arguments are not needed. False: (total scaled, report),
    with `whole_batch` (from `count_tokens` or `count_sequences`), this rank's `num_microbatches` and the DP size
    without CP. `counts_over_cp`: whether finalize_model_grads adds the counts over CP too; default from the version
    of Megatron-core that is installed. The module's docstring has the rule.

    Raises CPInputError when `whole_batch` is missing or negative, or `num_microbatches` or `data_parallel_size` is not
    positive.
    """
    if calculate_per_token_loss:
        if counts_over_cp is None:
            counts_over_cp = _megatron_counts_over_cp()
        return loss.total, (loss.count if counts_over_cp else loss.whole).int(), loss.report
    if whole_batch is None:
        raise CPInputError(
            "calculate_per_token_loss is False; expected whole_batch, the denominator of the whole batch"
        )
    if int(whole_batch) < 0 or not (num_microbatches > 0 and data_parallel_size > 0):
        raise CPInputError(
            f"whole_batch is {int(whole_batch)}, num_microbatches {num_microbatches} and data_parallel_size "
            f"{data_parallel_size}; expected at least 0, 1 and 1"
        )
    denominator = max(int(whole_batch), 1)
    return loss.total * (num_microbatches * data_parallel_size / denominator), loss.report


def count_tokens(full_masks: Sequence[Tensor], *, all_gather: AllGather = alone) -> int:
    """Valid tokens of the whole batch; `full_masks`: this rank's samples, `all_gather`: over DP, not CP.

    Raises CPInputError, on all ranks, for a mask that is not a tensor [response_length] of 0 and 1.
    """
    return _everywhere(Tensor.count_nonzero, full_masks, all_gather)


def count_sequences(full_masks: Sequence[Tensor], *, all_gather: AllGather = alone) -> int:
    """Samples of the whole batch that have a valid token; arguments and errors as for `count_tokens`."""
    return _everywhere(Tensor.any, full_masks, all_gather)


def _everywhere(count: Callable[[Tensor], Tensor], full_masks: Sequence[Tensor], all_gather: AllGather) -> int:
    """The counts of all masks of all ranks, added; joined also by a rank that has none, or none that can be counted."""
    problem = _count_problem(full_masks)
    where = {"step": "count", "where": "DP rank", "size": COUNT_MESSAGE}
    if problem is not None:
        refuse(all_gather, problem, device_of(all_gather), **where)
    own, checks = torch.zeros(1, dtype=torch.int64, device=device_of(all_gather)), []
    if len(full_masks):
        own = torch.stack([count(mask) for mask in full_masks]).sum().reshape(1)
        _, checks = zero_or_one("full_mask", torch.cat(list(full_masks)), [len(mask) for mask in full_masks])
    return int(agree(all_gather, Facts(checks=checks), own, **where).sum())


def _count_problem(full_masks: Sequence[Tensor]) -> Problem | None:
    if not isinstance(full_masks, Sequence | Tensor):
        return Problem("full_masks", f"a {type(full_masks).__name__}", "a list of tensors, one a sample")
    for i, mask in enumerate(full_masks):
        if not isinstance(mask, Tensor):
            return Problem("full_mask", f"a {type(mask).__name__}", "a tensor", i)
        if mask.dim() != 1:
            return Problem("shape of full_mask", list(mask.shape), "[response_length], one tensor a sample", i)
        if mask.device != full_masks[0].device:
            return Problem("device of full_mask", mask.device, f"{full_masks[0].device}, as of the others", i)
    return None


def _megatron_counts_over_cp() -> bool:
    from megatron.core import __version__

    return tuple(int(part) for part in __version__.split(".")[:2]) >= (0, 13)


# ---- inside


class _SumOverRanks(torch.autograd.Function):
    """x added over the ranks, the same on all; the gradient is added over the ranks too."""

    @staticmethod
    def forward(ctx, x: Tensor, cp: CPContext, facts: Facts) -> Tensor:
        ctx.all_gather, x = cp.all_gather, x.detach()
        if cp.layout.cp_size == 1 or cp.agreement == "off":
            return call(cp.all_gather, x, SUM).sum(0)
        return agree(cp.all_gather, facts, x, step=SUM, where=WHERE).sum(0)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return call(ctx.all_gather, grad, f"{SUM}, backward").sum(0), None, None


def _sum_of_whole(x: Tensor, cp: CPContext, facts: Facts) -> Tensor:
    """float64 [samples]: this rank's tokens, 0 at masked ones, added up for each sample and over the ranks, which agree
    on the facts in the same collective.
    """
    local = x.new_zeros(cp.layout.num_samples, dtype=torch.float64).index_add(0, _local_samples(x, cp), x.double())
    return _SumOverRanks.apply(local, cp, facts)


@dataclass(frozen=True)
class Clips:
    """The clips of a policy loss, `eps_clip_high` filled in."""

    eps_clip: float
    eps_clip_high: float
    eps_clip_c: float | None

    @staticmethod
    def of(eps_clip: float, eps_clip_high: float | None, eps_clip_c: float | None) -> "Clips":
        return Clips(eps_clip, eps_clip if eps_clip_high is None else eps_clip_high, eps_clip_c)

    def problem(self) -> str | None:
        low, high, c = self.eps_clip, self.eps_clip_high, self.eps_clip_c
        if not (isinstance(low, Real) and isinstance(high, Real) and 0 <= low <= 1 and high >= 0):
            return f"eps_clip is {low!r} and eps_clip_high {high!r}; expected 0 <= eps_clip <= 1 and 0 <= eps_clip_high"
        if c is not None and not (isinstance(c, Real) and c > 1):
            return f"eps_clip_c is {c!r}; expected above 1 (the dual clip), or None"
        return None


def _clip(log_ratio: Tensor, A: Tensor, clips: Clips) -> tuple[Tensor, Tensor]:
    """(losses, whether a clip took effect) per token."""
    ratio = log_ratio.exp()
    plain, held = -ratio * A, -ratio.clamp(1 - clips.eps_clip, 1 + clips.eps_clip_high) * A
    losses = torch.maximum(plain, held)
    clipped = held > plain
    if clips.eps_clip_c is not None:
        bound = -clips.eps_clip_c * A
        dual = (A < 0) & (losses > bound)
        losses, clipped = torch.where(dual, bound, losses), clipped | dual
    return losses, clipped


def _with_report(losses, clipped, log_ratio, full_mask, cp: CPContext, reduce: Reduce, name: str) -> Loss:
    loss = reduce(losses, full_mask, cp=cp, name=name)
    log_ratio = log_ratio.detach()
    return _reporting(
        loss,
        reduce(clipped.to(losses.dtype), full_mask, cp=cp, name="clip_fraction"),
        reduce(torch.expm1(log_ratio) - log_ratio, full_mask, cp=cp, name="old_kl"),  # k3 of old against new
    )


def _reporting(loss: Loss, *others: Loss) -> Loss:
    report = loss.report | {name: pair for other in others for name, pair in other.report.items()}
    return Loss(loss.total, loss.count, loss.whole, report, loss.per)


def _pair(total: Tensor, count: Tensor) -> Tensor:
    return torch.stack([total.detach(), count.to(total.dtype)])


# what comes in


def _admit(
    cp: CPContext, full_mask: Tensor, problem: str | None = None, /, **tokens: Tensor
) -> tuple[Shaped[Tensor, " full"], Shaped[Tensor, " local"]]:
    """The mask as bool, and this rank's part of it. Raises CPInputError on this rank alone."""
    found = problem or _misfit(cp, full_mask, tokens)
    if found is None:
        full, checks = _mask_of(cp, full_mask)
        found = Facts(checks=checks).first_problem()
        if found is None:
            return full, cp.take(full)
    raise CPInputError(_where(cp) + str(found))


def _admit_together(
    cp: CPContext, full_mask: Tensor, tokens: dict[str, Tensor], clips: Clips | None = None
) -> tuple[Shaped[Tensor, " full"], Shaped[Tensor, " local"], Facts]:
    """As `_admit`, but what is wrong is raised by all ranks: in `refuse`, which joins the others' `_SumOverRanks`, or
    there, by the facts that are returned for it.
    """
    problem = clips.problem() if clips else None
    if cp.layout.cp_size == 1 or cp.agreement == "off":
        return *_admit(cp, full_mask, problem, **tokens), Facts()
    problem = problem or _misfit(cp, full_mask, tokens)
    if problem is not None:
        refuse(cp.all_gather, problem, device_of(cp.all_gather, *tokens.values(), full_mask), step=SUM, where=WHERE)
    full, checks = _mask_of(cp, full_mask)
    facts = Facts(
        {**cp.settings, **(vars(clips) if clips else {})},
        {"response_length": cp.layout.response_lengths, "length of its pieces": cp.layout.piece},
        {"loss_mask": full},
        checks=checks,
    )
    return full, cp.take(full), facts


def _misfit(cp: CPContext, full_mask: Tensor, tokens: Mapping[str, Tensor]) -> str | None:
    """The first input that is no tensor, or has another shape or device than expected."""
    local, first = cp.layout.sizes[cp.rank], next(iter(tokens.values()))
    expected = dict.fromkeys(tokens, f"[{local}], its packed tokens")
    expected["full_mask"] = f"[{cp.layout.num_tokens}], the tokens of all whole responses"
    shapes = dict.fromkeys(tokens, (local,)) | {"full_mask": (cp.layout.num_tokens,)}
    for name, x in {**tokens, "full_mask": full_mask}.items():
        if not isinstance(x, Tensor):
            return f"{name} is a {type(x).__name__}; expected a tensor {expected[name]}"
        if tuple(x.shape) != shapes[name]:
            return f"{name} has shape {list(x.shape)}; expected {expected[name]}"
        if x.device != first.device:
            return f"{name} is on {x.device}; expected {first.device}, as the others"
    return None


def _mask_of(cp: CPContext, full_mask: Tensor) -> tuple[Shaped[Tensor, " full"], list[Check]]:
    if cp.agreement == "off":
        return full_mask.bool(), []
    return zero_or_one("full_mask", full_mask, cp.layout.response_lengths)


def _where(cp: CPContext) -> str:
    return f"{WHERE} {cp.rank} of {cp.layout.cp_size}: " if cp.layout.cp_size > 1 else ""


def _select(mask: Tensor, *tokens: Tensor) -> list[Tensor]:
    """Tokens in one dtype, float32 or better, 0 where the mask does not hold; only the first is differentiated."""
    dtype = result_dtype(*tokens)
    first, *others = tokens
    return [torch.where(mask, x.to(dtype), 0) for x in (first, *(y.detach() for y in others))]


def _local_samples(x: Tensor, cp: CPContext) -> Tensor:
    """[local] the sample of each of this rank's tokens."""
    return _samples(cp.layout.lengths(cp.rank), x.device)


def _valid_tokens(full_mask: Tensor, cp: CPContext) -> Tensor:
    """[samples] valid tokens of the whole responses, of a bool mask."""
    samples = _samples(cp.layout.response_lengths, full_mask.device)
    zeros = torch.zeros(cp.layout.num_samples, dtype=torch.int64, device=full_mask.device)
    return zeros.index_add(0, samples, full_mask.long())


def _samples(lengths, device) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.as_tensor(lengths)).to(device)
