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
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from cp_returns.collectives import AllGather, alone
from cp_returns.context import CPContext
from cp_returns.errors import CPInputError
from cp_returns.kl import of_difference

LOG_RATIO_LIMIT = 20.0  # e^20 is finite in every dtype used here, so ratio * 0 is 0
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
    """Mean over the valid tokens of the whole batch: sum(m * x) / sum(m)."""
    mask = _local_mask(x, full_mask, cp)
    total, count = torch.where(mask, x, 0).sum(), mask.sum()
    return Loss(total, count, full_mask.bool().sum(), {name: _pair(total, count)}, "token")


def sequence_mean(x: Tensor, full_mask: Tensor, *, cp: CPContext, name: str = "loss") -> Loss:
    """Mean over the samples that have a valid token of their mean over valid tokens: mean_i(sum_j(m x) / sum_j(m)).

    A sample is counted once, by CP rank 0.
    """
    mask = _local_mask(x, full_mask, cp)
    tokens = _valid_tokens(full_mask, cp)
    total = torch.where(mask, x / tokens.clamp(min=1)[_local_samples(x, cp)].to(x.dtype), 0).sum()
    whole = (tokens > 0).sum()
    count = whole if cp.rank == 0 else torch.zeros_like(whole)
    return Loss(total, count, whole, {name: _pair(total, count)}, "sequence")


def cp_masked_sum(x: Shaped[Tensor, " local"], full_mask: Tensor, *, cp: CPContext) -> Shaped[Tensor, " samples"]:
    """sum_j(m * x) of each whole response, the same on every CP rank; one collective each way.

    The backward pass adds the gradients of all CP ranks, since their losses add: a rank's own share of the loss may
    use the sum as if it had the whole response. Accumulated in float64 in rank order.
    """
    mask = _local_mask(x, full_mask, cp)
    local = x.new_zeros(cp.layout.num_samples, dtype=torch.float64)
    local = local.index_add(0, _local_samples(x, cp), torch.where(mask, x, 0).double())
    return _SumOverRanks.apply(local, cp.all_gather).to(x.dtype)


def cp_masked_mean(x: Shaped[Tensor, " local"], full_mask: Tensor, *, cp: CPContext) -> Shaped[Tensor, " samples"]:
    """sum_j(m * x) / sum_j(m) of each whole response, 0 where nothing is valid. As `cp_masked_sum`."""
    return cp_masked_sum(x, full_mask, cp=cp) / _valid_tokens(full_mask, cp).clamp(min=1).to(x.dtype)


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
    `eps_clip_c` > 1, None for none. Only `log_probs` are differentiated. Masked slots may hold anything.

    Raises CPInputError for clips out of range or packed tensors of another length than this rank's.
    """
    clips = _check_clips(eps_clip, eps_clip_high, eps_clip_c)
    mask = _local_mask(log_probs, full_mask, cp, old_log_probs=old_log_probs, advantages=advantages)
    log_ratio = _log_ratio(log_probs, old_log_probs, mask)
    losses, clipped = _clip(log_ratio, torch.where(mask, advantages.detach(), 0), clips)
    return _with_report(losses, clipped, log_ratio, full_mask, cp, reduce, "policy_loss")


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
    `sequence_mean`. Arguments and errors as for `policy_loss`.
    """
    clips = _check_clips(eps_clip, eps_clip_high, eps_clip_c)
    mask = _local_mask(log_probs, full_mask, cp, old_log_probs=old_log_probs, advantages=advantages)
    log_ratio = cp_masked_mean(_difference(log_probs, old_log_probs, mask), full_mask, cp=cp)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[_local_samples(log_probs, cp)]
    losses, clipped = _clip(log_ratio, torch.where(mask, advantages.detach(), 0), clips)
    return _with_report(losses, clipped, log_ratio, full_mask, cp, reduce or sequence_mean, "policy_loss")


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

    `eps_clip=None`: not clipped. Only `values` are differentiated. Masked slots may hold anything.

    Raises CPInputError for a negative clip or packed tensors of another length than this rank's.
    """
    if eps_clip is not None and not eps_clip >= 0:
        raise CPInputError(f"eps_clip is {eps_clip}; expected at least 0, or None")
    mask = _local_mask(values, full_mask, cp, old_values=old_values, returns=returns)
    V, old, G = (torch.where(mask, t, 0) for t in (values, old_values.detach(), returns.detach()))
    losses = (V - G).square()
    clipped = torch.zeros_like(mask)
    if eps_clip is not None:
        held = (old + (V - old).clamp(-eps_clip, eps_clip) - G).square()
        clipped = held > losses
        losses = torch.maximum(losses, held)
    loss = reduce(losses / 2, full_mask, cp=cp, name="value_loss")
    fraction = reduce(clipped.to(losses.dtype), full_mask, cp=cp, name="value_clip_fraction")
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
    gradient 0. `clamp=c` holds each to +-c. Charge the KL here or in the reward (`kl_coef`), not in both.

    Raises CPInputError for an unknown kind or packed tensors of another length than this rank's.
    """
    mask = _local_mask(log_probs, full_mask, cp, ref_log_probs=ref_log_probs)
    kl = of_difference(_difference(log_probs, ref_log_probs, mask), kind=kind, clamp=clamp)
    return reduce(kl, full_mask, cp=cp, name="kl_loss")


def combine(*terms: tuple[float, Loss]) -> Loss:
    """sum(coefficient * loss): combine((1.0, policy), (0.5, value)). Reports are kept apart, unscaled.

    Raises CPInputError when the terms are not means over the same thing (tokens or sequences).
    """
    first = terms[0][1]
    if any(loss.per != first.per for _, loss in terms):
        raise CPInputError(f"terms are means per {[loss.per for _, loss in terms]}; expected one reduction for all")
    total = sum(coefficient * loss.total for coefficient, loss in terms)
    report = {name: pair for _, loss in terms for name, pair in loss.report.items()}
    return Loss(total, first.count, first.whole, report, first.per)  # pyright: ignore[reportArgumentType]


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

    Raises CPInputError when `whole_batch` is missing.
    """
    if calculate_per_token_loss:
        if counts_over_cp is None:
            counts_over_cp = _megatron_counts_over_cp()
        return loss.total, (loss.count if counts_over_cp else loss.whole).int(), loss.report
    if whole_batch is None:
        raise CPInputError(
            "calculate_per_token_loss is False; expected whole_batch, the denominator of the whole batch"
        )
    denominator = max(int(whole_batch), 1)
    return loss.total * (num_microbatches * data_parallel_size / denominator), loss.report


def count_tokens(full_masks: Sequence[Tensor], *, all_gather: AllGather = alone) -> int:
    """Valid tokens of the whole batch; `full_masks`: this rank's samples, `all_gather`: over DP, not CP."""
    return _everywhere(sum(int(m.bool().sum()) for m in full_masks), full_masks, all_gather)


def count_sequences(full_masks: Sequence[Tensor], *, all_gather: AllGather = alone) -> int:
    """Samples of the whole batch that have a valid token; arguments as for `count_tokens`."""
    return _everywhere(sum(bool(m.any()) for m in full_masks), full_masks, all_gather)


def _everywhere(count: int, like: Sequence[Tensor], all_gather: AllGather) -> int:
    device = like[0].device if len(like) else None
    return int(all_gather(torch.tensor([count], dtype=torch.int64, device=device)).sum())


def _megatron_counts_over_cp() -> bool:
    from megatron.core import __version__

    return tuple(int(part) for part in __version__.split(".")[:2]) >= (0, 13)


# ---- inside


class _SumOverRanks(torch.autograd.Function):
    """x added over the ranks, the same on all; the gradient is added over the ranks too."""

    @staticmethod
    def forward(ctx, x: Tensor, all_gather: AllGather) -> Tensor:
        ctx.all_gather = all_gather
        return all_gather(x).sum(0)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.all_gather(grad).sum(0), None


Clips = tuple[float, float, float | None]


def _check_clips(eps_clip: float, eps_clip_high: float | None, eps_clip_c: float | None) -> Clips:
    high = eps_clip if eps_clip_high is None else eps_clip_high
    if not 0 <= eps_clip <= 1 or not high >= 0:
        raise CPInputError(
            f"eps_clip is {eps_clip} and eps_clip_high {high}; expected 0 <= eps_clip <= 1 and 0 <= eps_clip_high"
        )
    if eps_clip_c is not None and not eps_clip_c > 1:
        raise CPInputError(f"eps_clip_c is {eps_clip_c}; expected above 1 (the dual clip), or None")
    return eps_clip, high, eps_clip_c


def _clip(log_ratio: Tensor, A: Tensor, clips: Clips) -> tuple[Tensor, Tensor]:
    """(losses, whether a clip took effect) per token."""
    eps_clip, eps_clip_high, eps_clip_c = clips
    ratio = log_ratio.exp()
    plain, held = -ratio * A, -ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * A
    losses = torch.maximum(plain, held)
    clipped = held > plain
    if eps_clip_c is not None:
        bound = -eps_clip_c * A
        dual = (A < 0) & (losses > bound)
        losses, clipped = torch.where(dual, bound, losses), clipped | dual
    return losses, clipped


def _difference(log_probs: Tensor, other: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, log_probs, 0) - torch.where(mask, other.detach(), 0)


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    return _difference(log_probs, old_log_probs, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


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


def _local_mask(x: Tensor, full_mask: Tensor, cp: CPContext, **others: Tensor) -> Tensor:
    local = cp.layout.sizes[cp.rank]
    for what, tensor in {"the input": x, **others}.items():
        if tuple(tensor.shape) != (local,):
            raise CPInputError(
                f"rank {cp.rank}: {what} has shape {list(tensor.shape)}; expected [{local}], its packed tokens"
            )
    return cp.take(full_mask).bool()


def _local_samples(x: Tensor, cp: CPContext) -> Tensor:
    """[local] the sample of each of this rank's tokens."""
    return _samples(cp.layout.lengths(cp.rank), x.device)


def _valid_tokens(full_mask: Tensor, cp: CPContext) -> Tensor:
    """[samples] valid tokens of the whole responses."""
    samples = _samples(cp.layout.response_lengths, full_mask.device)
    zeros = torch.zeros(cp.layout.num_samples, dtype=torch.int64, device=full_mask.device)
    return zeros.index_add(0, samples, full_mask.bool().long())


def _samples(lengths, device) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.as_tensor(lengths)).to(device)
