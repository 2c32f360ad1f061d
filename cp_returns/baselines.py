"""Group baselines: one advantage a sample, from the rewards of the members of its group on all ranks."""

import torch
from jaxtyping import Bool, Float64, Int, Int64, Shaped
from torch import Tensor

from cp_returns.agreement import Facts, Problem, agree_ragged, check_each, refuse
from cp_returns.collectives import AllGather, alone
from cp_returns.groups import device_of

CENTERS = ("mean", "loo", "opo")
SCALES = ("none", "std", "loo_std")
SINGLETONS = ("zero", "raw")


def group_advantage(
    rewards: Shaped[Tensor, " samples"],
    group_ids: Int[Tensor, " samples"],
    *,
    center: str = "mean",
    scale: str = "none",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
    sample_mask: Shaped[Tensor, " samples"] | None = None,
    lengths: Int[Tensor, " samples"] | None = None,
    all_gather: AllGather = alone,
) -> Shaped[Tensor, " samples"]:
    """One advantage a sample among the members of its group, which may lie in any order, in any number, on any rank.

        a_i = (x_i - center) / (scale + eps)

    center: "mean" (GRPO, DeepSeekMath; with no scale Dr. GRPO), "loo" the mean of the others (RLOO) or "opo" the mean
    weighted by `lengths`, the valid tokens of a sample (OPO). scale: "none" divides by nothing, "std" has n - ddof, and
    "loo_std" is that of the others, which divides only where they differ (NeMo-RL). Equal rewards give exactly 0. A
    group of one gives 0, or its reward with singleton="raw".
    A NaN reward is missing: like a sample with `sample_mask` 0 or length 0 it is no member of its group and gets 0.

    Statistics are float64; returns float32, or float64 for float64 rewards, on their device. Permuting samples, also
    over ranks, permutes the bits. `all_gather` is over the data-parallel ranks that share groups, which may hold
    different numbers of samples; it is called once (a second time when 32 bytes a sample do not fit in 16 KiB).

    Raises CPInputError, on all ranks alike: settings that are unknown or differ, shapes, an infinite reward, a length
    that is negative or infinite, a sample_mask value other than 0 and 1.
    """
    settings = {"center": center, "scale": scale, "ddof": ddof, "eps": eps, "singleton": singleton}
    problem = _first_problem(rewards, group_ids, sample_mask, lengths, settings)
    if problem is not None:
        refuse(all_gather, problem, device_of(all_gather, rewards), step="group baseline", where="rank")
    x = rewards.detach().double()
    given = torch.ones_like(x) if sample_mask is None else sample_mask.detach().to(x)
    weight = torch.ones_like(x) if lengths is None else lengths.detach().to(x)
    counted = (given == 1) & ~x.isnan() & (weight > 0)
    facts = Facts(
        settings=settings,
        checks=[
            check_each("sample_mask", given, (given != 0) & (given != 1), "0 or 1"),
            check_each("lengths", weight, ~((weight >= 0) & (weight < torch.inf)), "a number that is at least 0"),
            check_each("reward", x, x.isinf() & (given != 0), "a finite number, or NaN where it is missing"),
        ],
    )
    # As words, so that an id keeps all its bits.
    rows = torch.stack([x.view(torch.int64), group_ids.long(), counted.long(), weight.view(torch.int64)], dim=1)
    shards = agree_ragged(all_gather, facts, rows, step="group baseline", where="rank")
    union = torch.cat(shards)
    x, weight = (union[:, column].contiguous().view(torch.float64) for column in (0, 3))
    advantages = _advantage(
        x, union[:, 1], union[:, 2] == 1, weight, center=center, scale=scale, ddof=ddof, eps=eps, singleton=singleton
    )
    # Which shard is this rank's? Any that holds what it sent: equal samples have equal advantages.
    mine = next(rank for rank, shard in enumerate(shards) if torch.equal(shard, rows))
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    return torch.split(advantages, [len(shard) for shard in shards])[mine].to(dtype, copy=True)


def _advantage(
    rewards: Float64[Tensor, " samples"],
    ids: Int64[Tensor, " samples"],
    counted: Bool[Tensor, " samples"],
    lengths: Float64[Tensor, " samples"],
    *,
    center: str,
    scale: str,
    ddof: int,
    eps: float,
    singleton: str,
) -> Float64[Tensor, " samples"]:
    """`group_advantage` over the samples of all ranks: pure, with no loop over samples and no wait for the device.

    The samples are sorted by group, then reward, then length, so that a group is a run and no sum depends on their
    order; those not counted are runs of their own.
    """
    x = torch.where(counted, rewards, 0.0)  # equal: what is not counted comes out 0
    order = torch.arange(len(x), device=x.device)
    for key in (lengths, x, counted, ids):
        order = order[key[order].argsort(stable=True)]
    x, ids, counted, lengths = x[order], ids[order], counted[order], lengths[order]
    first, last = _runs(ids, counted)
    n = (last - first + 1).double()

    mean = _sum(x, first, last) / n
    if center == "mean":
        a = x - mean
    elif center == "loo":
        a = (x - mean) * (n / (n - 1))
    else:
        a = x - _sum(lengths * x, first, last) / _sum(lengths, first, last)
    if scale == "std":
        a = a / (torch.sqrt(_sum((x - mean).square(), first, last) / (n - ddof)) + eps)
    elif scale == "loo_std":
        differ, deviation = _std_of_others(x, first, last, ddof)
        deviation = deviation[_runs(ids, counted, x)[0]]  # of equal rewards all take the first one's bits
        a = torch.where(differ, a / (deviation + eps), a)
    a = torch.where(x[first] == x[last], 0.0, a)
    if singleton == "raw":
        a = torch.where(first == last, x, a)
    return torch.empty_like(a).scatter(0, order, a)


def _runs(*keys: Tensor) -> tuple[Tensor, Tensor]:
    """(first, last) index of the run of equal keys that each element is in."""
    index = torch.arange(len(keys[0]), device=keys[0].device)
    opens = torch.ones_like(index, dtype=torch.bool)
    for i, key in enumerate(keys):
        changes = key[1:] != key[:-1]
        opens[1:] = changes if i == 0 else opens[1:] | changes
    closes = torch.cat([opens[1:], opens[:1]])
    first = torch.where(opens, index, 0).cummax(0).values
    last = torch.where(closes, index, len(index)).flip(0).cummin(0).values.flip(0)
    return first, last


def _running_sum(x: Tensor, first: Tensor) -> Tensor:
    """The sum of a run up to and with each element, by doubling: its bits depend on that run alone, on any device."""
    place = torch.arange(len(x), device=x.device) - first
    reach = 1
    while reach < len(x):
        before = torch.cat([x.new_zeros(reach), x[:-reach]])
        x = x + torch.where(place >= reach, before, 0.0)
        reach *= 2
    return x


def _sum(x: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """The sum of the run that each element is in."""
    return _running_sum(x, first)[last]


def _std_of_others(x: Tensor, first: Tensor, last: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """Of the other members of each sorted run: do they differ, and their standard deviation.

    The sums leave an element out by adding what lies before and after it: subtracting an outlier would leave only its
    rounding. They are taken about the run's median, near which most of the others are.
    """
    index = torch.arange(len(x), device=x.device)
    end = len(x) - 1

    def others(v: Tensor) -> Tensor:
        before = torch.where(index > first, _running_sum(v, first).roll(1), 0.0)
        after = torch.where(index < last, _running_sum(v.flip(0), (end - last).flip(0)).flip(0).roll(-1), 0.0)
        return before + after

    d = x - x[(first + last) // 2]
    n = (last - first).double()
    squares = (others(d.square()) - others(d).square() / n).clamp(min=0.0)
    lowest = torch.where(index == first, x[(first + 1).clamp(max=end)], x[first])
    highest = torch.where(index == last, x[(last - 1).clamp(min=0)], x[last])
    return lowest != highest, torch.sqrt(squares / (n - ddof))


def _first_problem(rewards, group_ids, sample_mask, lengths, settings: dict) -> Problem | None:
    for name, allowed in (("center", CENTERS), ("scale", SCALES), ("singleton", SINGLETONS), ("ddof", (0, 1))):
        if settings[name] not in allowed:
            return Problem(name, repr(settings[name]), f"one of {', '.join(map(repr, allowed))}")
    eps = settings["eps"]
    if not isinstance(eps, int | float) or not 0 <= eps < float("inf"):
        return Problem("eps", repr(eps), "a number that is at least 0")
    if settings["center"] == "opo" and lengths is None:
        return Problem("lengths", None, "the valid tokens of each sample: center 'opo' weighs rewards by them")
    optional = {name: x for name, x in (("sample_mask", sample_mask), ("lengths", lengths)) if x is not None}
    for name, x in {"rewards": rewards, "group_ids": group_ids, **optional}.items():
        if not isinstance(x, Tensor):
            return Problem(name, f"a {type(x).__name__}", "a tensor, one number a sample")
        if x.is_complex() or (name == "group_ids" and x.is_floating_point()):
            return Problem(f"dtype of {name}", x.dtype, "int64" if name == "group_ids" else "a real dtype")
        if tuple(x.shape) != (rewards.numel(),):
            return Problem(f"shape of {name}", list(x.shape), f"[{rewards.numel()}], one a sample")
    return None
