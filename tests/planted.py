"""Functions of one rank's view as users write them: one that is right, and many with a mistake planted in them."""

import os
from pathlib import Path

import torch

from cp_returns import CPContext, reinforce_plus_plus, whiten
from cp_returns.check import Share, View

GAMMA, LAM, KL_COEF = 0.9, 0.8, 0.1


def zigzag_spans(view: View, i: int, rank: int, prompt_shift: int = 0) -> list[tuple[int, int]]:
    """The response tokens of sample i on a rank: slime's arithmetic."""
    total, response, cp = view.total_lengths[i], view.response_lengths[i], view.size
    chunk = -(-total // (2 * cp))
    first_logit = total - response - 1 + prompt_shift
    spans = []
    for c in (rank, 2 * cp - 1 - rank):
        low, high = (min(max(x - first_logit, 0), response) for x in (c * chunk, (c + 1) * chunk))
        spans.append((low, high))
    return spans


def cut(view: View, i: int, full: torch.Tensor) -> torch.Tensor:
    return torch.cat([full[low:high] for low, high in zigzag_spans(view, i, view.rank)])


def gathered(view: View, i: int, local: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tokens of sample i: one padded all-gather."""
    sizes = [sum(high - low for low, high in zigzag_spans(view, i, r)) for r in range(view.size)]
    padded = torch.zeros(max(sizes))
    padded[: len(local)] = local.detach()
    return [x[:n] for x, n in zip(view.all_gather.cp(padded), sizes, strict=True)]


def joined(view: View, i: int, local: torch.Tensor) -> torch.Tensor:
    """The whole response in the order of its tokens."""
    full = torch.zeros(view.response_lengths[i])
    for r, of_rank in enumerate(gathered(view, i, local)):
        for low, high in zigzag_spans(view, i, r):
            full[low:high], of_rank = of_rank[: high - low], of_rank[high - low :]
    return full


def to_go(r: torch.Tensor, decay: float = GAMMA) -> torch.Tensor:
    y, following = torch.zeros(len(r), dtype=torch.float64), 0.0
    for j in reversed(range(len(r))):
        following = float(r[j]) + decay * following
        y[j] = following
    return y.float()


def penalty(kl: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask.bool(), -KL_COEF * kl, 0.0)


def per_sample_gather(view: View):
    """Right: gather every sample, the whole recurrence, own slice."""
    out = []
    for i, kl in enumerate(view.kl):
        mask = view.loss_masks[i].bool()
        r = penalty(joined(view, i, kl), mask)
        if mask.any():
            r[mask.nonzero()[-1]] += view.rewards[i]
        out.append(cut(view, i, torch.where(mask, to_go(r), 0.0)))
    return out


def whitened_over_dp_only(view: View):
    cp = CPContext(view.layout, view.rank, view.all_gather.cp)
    mask = torch.cat(view.loss_masks)
    G = reinforce_plus_plus(torch.cat(view.kl), view.rewards, mask, cp=cp, gamma=GAMMA, kl_coef=KL_COEF)
    return whiten(G, cp.take(mask), all_gather=view.all_gather.dp)


def whitened_over_cp_only(view: View):
    cp = CPContext(view.layout, view.rank, view.all_gather.cp)
    mask = torch.cat(view.loss_masks)
    G = reinforce_plus_plus(torch.cat(view.kl), view.rewards, mask, cp=cp, gamma=GAMMA, kl_coef=KL_COEF)
    return whiten(G, cp.take(mask), all_gather=view.all_gather.cp)


def sample_means_of_own_tokens(view: View):
    """Minus the mean of the sample, of which this rank sees a part."""
    out = []
    for i, kl in enumerate(view.kl):
        mask = cut(view, i, view.loss_masks[i]).bool()
        mean = torch.where(mask, kl, 0.0).sum() / max(int(mask.sum()), 1)
        out.append(torch.where(mask, kl - mean, 0.0))
    return out


def reward_on_last_token_of_rank_0(view: View):
    out = []
    for i, kl in enumerate(view.kl):
        r = penalty(kl, cut(view, i, view.loss_masks[i]))
        if view.rank == 0 and len(r):
            r[-1] += view.rewards[i]
        out.append(cut(view, i, to_go(joined(view, i, r))))
    return {"returns": out}


def prompt_border_off_by_one(view: View):
    out = []
    for i, kl in enumerate(view.kl):
        full = to_go(penalty(joined(view, i, kl), view.loss_masks[i]))
        spans = zigzag_spans(view, i, view.rank)
        first = [max(low - 1, 0) for low, _ in spans]
        out.append(torch.cat([full[a : a + high - low] for a, (low, high) in zip(first, spans, strict=True)]))
    return out


def mask_off_by_one(view: View):
    out = []
    for i, kl in enumerate(view.kl):
        spans = zigzag_spans(view, i, view.rank)
        first = [max(low - 1, 0) for low, _ in spans]
        mask = torch.cat([view.loss_masks[i][a : a + high - low] for a, (low, high) in zip(first, spans, strict=True)])
        out.append(penalty(kl, mask))
    return out


def mask_multiplied(view: View):
    out = []
    for i, kl in enumerate(view.kl):
        r = -KL_COEF * kl * cut(view, i, view.loss_masks[i]).float()
        out.append(cut(view, i, to_go(joined(view, i, r))))
    return out


def zigzag_read_as_contiguous(view: View):
    out = []
    for i, kl in enumerate(view.kl):
        shards = gathered(view, i, kl)
        returns = to_go(penalty(torch.cat(shards), view.loss_masks[i]))
        start = sum(len(x) for x in shards[: view.rank])
        out.append(returns[start : start + len(kl)])
    return out


def zigzag_cut_as_contiguous(view: View):
    out = []
    for i, kl in enumerate(view.kl):
        full = to_go(penalty(joined(view, i, kl), view.loss_masks[i]))
        chunk, first_logit = (
            -(-view.total_lengths[i] // view.size),
            view.total_lengths[i] - view.response_lengths[i] - 1,
        )
        low, high = (max(x - first_logit, 0) for x in (view.rank * chunk, (view.rank + 1) * chunk))
        out.append(full[low:high])
    return out


def pieces_swapped(view: View):
    """A rank's two pieces joined back to front."""
    out = []
    for i, kl in enumerate(view.kl):
        full = to_go(penalty(joined(view, i, kl), view.loss_masks[i]))
        first, second = ((low, high) for low, high in zigzag_spans(view, i, view.rank))
        spans = (first, second) if view.size == 1 else (second, first)
        out.append(torch.cat([full[low:high] for low, high in spans]))
    return out


def wrong_where_a_shard_is_empty(view: View):
    """A default that stands in where some rank has nothing to say about a sample."""
    out = []
    for i, own in enumerate(per_sample_gather(view)):
        sizes = [sum(high - low for low, high in zigzag_spans(view, i, r)) for r in range(view.size)]
        out.append(own + 0.5 if min(sizes) == 0 else own)
    return out


def gae_without_look_ahead(view: View):
    out = []
    for i, kl in enumerate(view.kl):
        mask = cut(view, i, view.loss_masks[i]).bool()
        values = torch.where(mask, view.values[i], 0.0)
        following = torch.cat([values[1:], torch.zeros(1)])[: len(kl)]  # right on one rank only
        delta = penalty(kl, mask) + GAMMA * following - values
        out.append(cut(view, i, to_go(joined(view, i, delta), GAMMA * LAM)))
    return {"advantages": out}


def gae_of_pieces(view: View):
    """The same, piece by piece, also on one rank, which has two."""
    out = []
    for i, kl in enumerate(view.kl):
        mask = cut(view, i, view.loss_masks[i]).bool()
        values = torch.where(mask, view.values[i], 0.0)
        parts = values.split([high - low for low, high in zigzag_spans(view, i, view.rank)])
        following = torch.cat([torch.cat([v[1:], torch.zeros(1)])[: len(v)] for v in parts])
        delta = penalty(kl, mask) + GAMMA * following - values
        out.append(cut(view, i, to_go(joined(view, i, delta), GAMMA * LAM)))
    return {"advantages": out}


def scan_of_own_pieces_only(view: View):
    return [
        torch.where(m.bool(), to_go(penalty(kl, m)), 0.0)
        for kl, m in zip(view.kl, view.shards(view.loss_masks), strict=True)
    ]


def _loss_sum(view: View):
    total, count = torch.zeros(()), 0
    for i, log_probs in enumerate(view.log_probs):
        mask = cut(view, i, view.loss_masks[i]).bool()
        total = total - torch.where(mask, log_probs * view.rewards[i], 0.0).sum()
        count += int(mask.sum())
    return total, count


def _valid(view: View) -> int:
    own = sum(int(m.sum()) for m in view.loss_masks)
    return int(view.all_gather.dp(torch.tensor([own])).sum())


def loss_over_local_tokens(view: View):
    total, count = _loss_sum(view)
    return {"loss": Share(total / max(count, 1))}


def loss_right(view: View):
    total, _ = _loss_sum(view)
    return {"loss": Share(total / _valid(view))}


def gradient_times_cp(view: View):
    total, _ = _loss_sum(view)
    loss = total / _valid(view)
    return {"loss": Share(loss.detach() + view.size * (loss - loss.detach()))}


def skips_an_empty_shard(view: View):
    out = []
    for i, kl in enumerate(view.kl):
        if len(kl) == 0:
            out.append(kl)
            continue
        out.append(cut(view, i, to_go(joined(view, i, penalty(kl, cut(view, i, view.loss_masks[i]))))))
    return out


def skips_when_it_has_nothing(view: View):
    if sum(map(len, view.kl)) == 0:
        return {"kl": 0.0}
    own = torch.stack(
        [torch.where(cut(view, i, view.loss_masks[i]).bool(), k, 0.0).sum() for i, k in enumerate(view.kl)]
    )
    return {"kl": view.all_gather(own.sum()).sum()}


def metrics_summed_over_cp_twice(view: View):
    own = sum(torch.where(cut(view, i, view.loss_masks[i]).bool(), k, 0.0).sum() for i, k in enumerate(view.kl))
    kl_sum = view.all_gather(own.reshape(1)).sum()
    kl_sum = view.all_gather.cp(kl_sum.reshape(1)).sum()
    return {"kl_mean": kl_sum / _valid(view), "tokens": _valid(view)}


def environment() -> dict[str, str]:
    """For a Python started by a test: this package and these functions importable, one thread."""
    tests = Path(__file__).parent
    return os.environ | {"PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}", "OMP_NUM_THREADS": "1"}
