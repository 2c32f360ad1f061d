"""slime's advantage functions: its names, argument names and list types, computed by this library.

No line of slime edited:    --custom-advantage-function-path cp_returns.compat.slime.advantages
or function by function:    from cp_returns.compat.slime import get_reinforce_plus_plus_returns, ...

Layout and lists are slime's: zigzag with ceil(total / 2W) tokens a piece, one tensor a sample, `kl[i]` this rank's
tokens and `loss_masks[i]` the whole response's. The context-parallel group is Megatron's, looked up in every call; in a
single process without Megatron there is one rank.

Where the functions differ from slime's (THUDM/slime, August 2026): a batch is one data collective, not one or two a
sample; a fully masked sample, or one whose reward is NaN, gives zeros where slime asserts; what a masked token holds
reaches no other token; bad input raises the same CPInputError on all ranks; sums are float64 and are rounded to the
input's dtype once; nothing carries an autograd graph but `all_gather_with_cp` and `slice_log_prob_with_cp`, through
which slime trains. At masked tokens they keep slime's own values.
"""

from typing import Any

import torch
from torch import Tensor

from cp_returns.admission import admit
from cp_returns.agreement import Check, Facts, Problem, agree, refuse
from cp_returns.arrays import quiet
from cp_returns.collectives import AllGather, call
from cp_returns.context import CPContext
from cp_returns.errors import CPInputError
from cp_returns.estimators import gae
from cp_returns.groups import context_parallel, data_and_context_parallel, device_of, given, rank_and_size
from cp_returns.layout import Layout, zigzag
from cp_returns.masks import as_bits
from cp_returns.module import ContextParallelReturns, ReturnsConfig
from cp_returns.scan import reverse_scan
from cp_returns.whiten import MESSAGE, apply, merge, moments

Window = tuple[int, int]

# --custom-advantage-function-path

_KL = {"k1": ("k1", None), "k2": ("k2", None), "k3": ("k3", None), "low_var_kl": ("k3", 10.0)}
_WITHOUT_KL = ("grpo", "gspo", "cispo")
ESTIMATORS = ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", *_WITHOUT_KL)


def advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """Set rollout_data["advantages"] and ["returns"], this rank's shards.

    Reads slime's lists log_probs (rollout_log_probs with `use_rollout_logprobs`), ref_log_probs, values, rewards,
    loss_masks, response_lengths, total_lengths, and of args advantage_estimator (grpo, gspo, cispo, ppo,
    reinforce_plus_plus, reinforce_plus_plus_baseline), gamma, lambd, kl_coef, kl_loss_type, normalize_advantages.

    The numbers are slime's where slime's are sound: rewards go to the last valid token, on whichever rank it is, the KL
    of masked tokens does not count, and masked tokens come out 0. With `normalize_advantages` slime whitens what this
    function sets. Then the mean over DP x CP is taken away here, which whitening does not notice, but slime's
    single-pass variance no longer cancels: equal advantages end as 0, not NaN.

    Raises CPInputError on all ranks, also for an unknown estimator or KL.
    """
    log_probs = rollout_data.get("rollout_log_probs" if getattr(args, "use_rollout_logprobs", False) else "log_probs")
    with_kl = args.kl_coef != 0 and log_probs is not None and args.advantage_estimator not in _WITHOUT_KL
    inputs = {key: rollout_data[key] for key in ("rewards", "loss_masks", "response_lengths", "total_lengths")}
    if with_kl:
        inputs |= {"log_probs": log_probs, "ref_log_probs": rollout_data.get("ref_log_probs") or []}
    if args.advantage_estimator == "ppo":
        inputs["values"] = rollout_data.get("values")
    elif args.advantage_estimator != "reinforce_plus_plus":
        inputs["group_ids"] = range(len(inputs["rewards"]))
    out = ContextParallelReturns(_config(args, with_kl))(**inputs)
    rollout_data["advantages"], rollout_data["returns"] = out.advantages, out.returns


def _config(args: Any, with_kl: bool) -> ReturnsConfig:
    name, kind = args.advantage_estimator, getattr(args, "kl_loss_type", "k1")
    for what, value, known in (("advantage_estimator", name, ESTIMATORS), ("kl_loss_type", kind, _KL)):
        if value not in known:
            raise CPInputError(f"{what} is {value!r}; expected one of {', '.join(map(repr, known))}")
    if name == "reinforce_plus_plus":
        settings: dict[str, Any] = {"estimator": name, "gamma": args.gamma, "clock": "token"}
    elif name == "ppo":
        settings = {
            "estimator": "gae",
            "gamma": args.gamma,
            "lam": args.lambd,
            "clock": "token",
            "masked_values": "use",
        }
    else:  # slime's controller has centred and scaled the rewards already: groups of one, which keep their reward
        settings = {"estimator": "reinforce_plus_plus_baseline", "singleton": "raw"}
    if with_kl:
        settings |= {"kl_coef": args.kl_coef, "kl": _KL[kind][0], "kl_clamp": _KL[kind][1]}
    if getattr(args, "normalize_advantages", False):
        settings |= {"whiten": True, "whiten_scale": False}
    return ReturnsConfig(**settings)


# slime.utils.ppo_utils


@torch.no_grad()
def chunked_discounted_returns(rewards: Tensor, discount: float, chunk_size: int = 128) -> Tensor:
    """[B, T] discounted returns: G_t = r_t + discount * G_{t+1}. Zeros at the right end of a row stay zeros.

    `chunk_size` is accepted and has no effect: the blocks of this library are its own.
    """
    rows, columns = _rectangle(rewards)
    return reverse_scan(rewards.reshape(-1), [columns] * rows, float(discount)).view(rows, columns).to(rewards.dtype)


@torch.no_grad()
def chunked_gae(
    rewards: Tensor, values: Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[Tensor, Tensor]:
    """[B, T] advantages A_t = r_t + gamma * V_{t+1} - V_t + gamma * lambd * A_{t+1} with V_T = 0, and returns A + V."""
    rows, columns = _rectangle(rewards, values)
    deltas = _deltas(rewards, values, gamma).reshape(-1)
    a = reverse_scan(deltas, [columns] * rows, gamma * lambd).view(rows, columns)
    return a.to(rewards.dtype), (a + values).to(values.dtype)


@torch.no_grad()
def vanilla_gae(rewards: Tensor, values: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """`chunked_gae` as a loop over T: the serial one."""
    _rectangle(rewards, values)
    a = _deltas(rewards, values, gamma)
    for t in range(rewards.shape[1] - 2, -1, -1):
        a[:, t] += gamma * lambd * a[:, t + 1]
    return a.to(rewards.dtype), (a + values).to(values.dtype)


@torch.no_grad()
def get_grpo_returns(rewards: Tensor, kl: list[Tensor]) -> list[Tensor]:
    """Each sample's scalar at every local token, in the dtype of its `kl`; a NaN reward gives zeros."""
    scalars = _scalars(rewards, kl)
    return [torch.where(r.isnan(), 0.0, r).to(k.dtype).repeat(len(k)) for k, r in zip(kl, scalars, strict=True)]


@torch.no_grad()
def get_reinforce_plus_plus_baseline_advantages(
    rewards: Tensor,
    kl: list[Tensor],
    loss_masks: list[Tensor] | float | None = None,
    kl_coef: float | None = None,
) -> list[Tensor]:
    """A_t = reward - kl_coef * kl_t at every local token; the group mean is already out of `rewards`.

    Both of slime's signatures: (rewards, kl, kl_coef), and the older (rewards, kl, loss_masks, kl_coef), which never
    looks at the masks.
    """
    coef = loss_masks if kl_coef is None else kl_coef
    if not isinstance(coef, int | float):
        raise TypeError("get_reinforce_plus_plus_baseline_advantages() is missing kl_coef")
    scalars = _scalars(rewards, kl)
    rows = [r - coef * k.double() for k, r in zip(kl, scalars, strict=True)]
    return [torch.where(r.isnan(), 0.0, a).to(k.dtype) for k, r, a in zip(kl, scalars, rows, strict=True)]


@torch.no_grad()
def get_reinforce_plus_plus_returns(
    rewards: Tensor,
    kl: list[Tensor],
    loss_masks: list[Tensor],
    response_lengths: list[int],
    total_lengths: list[int],
    kl_coef: float,
    gamma: float,
) -> list[Tensor]:
    """REINFORCE++ (Hu et al., 2025) at this rank's tokens, masked ones too: G_t = r_t + gamma * G_{t+1}.

    r_t = -kl_coef * kl_t on valid tokens and 0 on masked ones, plus the sample's reward at its last valid token.
    """
    if not kl:
        return []
    cp = _context(kl, response_lengths, total_lengths)
    masks = [m.to(kl[0].device) for m in loss_masks]
    mask = _packed(cp, "loss_masks", masks, cp.layout.response_lengths)
    local = _packed(cp, "kl", kl, cp.layout.lengths(cp.rank))
    batch = admit(
        cp,
        mask,
        torch.stack(_scalars(rewards, kl)),
        tokens={"kl": local},
        numbers={"gamma": gamma, "kl_coef": kl_coef},
    )

    def formula(cp: CPContext, kl: Tensor) -> tuple[Tensor]:
        # Rewards go by the mask; every token gives an output.
        return (cp.scan(batch.reward(cp, kl, None), float(gamma), batch.clock, None, dtype=batch.dtype),)

    (returns,) = batch.run(cp, formula)
    return _like(kl, returns)


@torch.no_grad()
def get_advantages_and_returns_batch(
    total_lengths: list[int],
    response_lengths: list[int],
    values_list: list[Tensor],
    rewards_list: list[Tensor],
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[list[Tensor], list[Tensor]]:
    """GAE at this rank's tokens, advantages and returns, over every token of a response: no mask, as in slime's PPO.

    `rewards_list` are token rewards, KL and terminal reward included. `chunked` is accepted and has no effect.
    """
    if not values_list:
        return [], []
    cp = _context(values_list, response_lengths, total_lengths)
    counts = cp.layout.lengths(cp.rank)
    values = _packed(cp, "values_list", values_list, counts)
    rewards = _packed(cp, "rewards_list", rewards_list, counts)
    every_token = torch.ones(cp.layout.num_tokens, dtype=torch.bool, device=values.device)
    out = gae(None, None, values, every_token, cp=cp, gamma=gamma, lam=lambd, clock="token", token_rewards=rewards)
    return _like(values_list, out.advantages), _like(values_list, out.returns)


# slime.utils.distributed_utils


@torch.no_grad()
@quiet
def distributed_masked_whiten(
    values: Tensor,
    mask: Tensor,
    process_group=None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> Tensor:
    """(values - mean) * rsqrt(var + epsilon), unbiased var, over the valid tokens of all ranks of `process_group`.

    Masked tokens are shifted and scaled like the others, as in slime. No valid token anywhere gives zeros, where slime
    raises. process_group=None is Megatron's data-parallel group with context parallel; slime's own default, the whole
    world, would wait for pipeline stages that never call. `shift_mean=False` adds the mean again.
    """
    if process_group is None:
        all_gather = data_and_context_parallel(None, None, context_parallel(None, None, None))
    else:
        all_gather = given(process_group)
    x, valid = values.reshape(-1), mask.reshape(-1) != 0
    fits = len(x) == len(valid)
    facts = Facts(
        settings={"shift_mean": shift_mean, "epsilon": epsilon},
        problem=None if fits else Problem("shape of mask", list(mask.shape), f"{list(values.shape)}, that of values"),
        checks=[_binary(mask.reshape(-1))],
    )
    local = moments(x, as_bits(valid)) if fits else torch.zeros(3, dtype=torch.float64, device=values.device)
    merged = merge(agree(all_gather, facts, local, step="whiten", where="rank", size=MESSAGE))
    options = {"ddof": 1, "eps": epsilon, "eps_mode": "add", "center": True, "shift_mean": shift_mean, "scale": True}
    white = apply(x, as_bits(torch.ones_like(valid)), merged, options)
    return torch.where(merged[0] > 0, white, 0.0).to(values.dtype).view_as(values)


def _binary(mask: Tensor) -> Check:
    odd = (mask != 0) & (mask != 1)

    def find() -> Problem | None:
        first = odd.nonzero()
        return Problem("mask", mask[first[0]].item(), "0 or 1", token=int(first[0])) if len(first) else None

    return Check(odd.any(), find)


# slime.backends.megatron_utils.cp_utils


def get_logits_and_tokens_offset_with_cp(
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_seq_len: int | None = None,
    *,
    cp_rank: int | None = None,
    cp_size: int | None = None,
) -> tuple[int, tuple[Window, Window], tuple[Window, Window], tuple[Window, Window]]:
    """(chunk size, chunks, logits, tokens) of a rank's two pieces: [start, end) from the prompt's first token.

    `chunks` are the padded pieces, `logits` the positions in them that predict response tokens, `tokens` those tokens
    (logits + 1). An empty one is (0, 0).
    """
    rank, size = rank_and_size(context_parallel(None, None, None)) if cp_rank is None or cp_size is None else (0, 1)
    rank, size = rank if cp_rank is None else cp_rank, size if cp_size is None else cp_size
    layout = _layout(total_length, response_length, size, qkv_format, max_seq_len)
    width = total_length if qkv_format == "thd" or max_seq_len is None else max_seq_len
    chunk = -(-width // (2 * size))
    first, second = (int(p) for p in layout.pieces(rank))
    prompt = total_length - response_length

    def response(piece: int, shift: int) -> Window:
        start, end = layout.cuts[0, piece : piece + 2].tolist()
        return (start + shift, end + shift) if start < end else (0, 0)

    chunks = (first * chunk, (first + 1) * chunk), (second * chunk, (second + 1) * chunk)
    logits = response(first, prompt - 1), response(second, prompt - 1)
    return chunk, chunks, logits, (response(first, prompt), response(second, prompt))


def slice_log_prob_with_cp(
    log_prob: list[float] | Tensor,
    total_length: int,
    response_length: int,
    qkv_format: str = "thd",
    max_token_len: int | None = None,
) -> list[float] | Tensor:
    """This rank's part of a whole response, a [R, ..] tensor or a list: a copy.

    It is indexing and keeps the graph, because slime slices the log-probs that it trains on (`--allgather-cp`).
    """
    if len(log_prob) != response_length:
        raise CPInputError(f"log_prob has {len(log_prob)} tokens; expected response_length = {response_length}")
    rank, size = rank_and_size(context_parallel(None, None, None))
    if size == 1:
        return list(log_prob) if isinstance(log_prob, list) else log_prob.clone()
    index = _layout(total_length, response_length, size, qkv_format, max_token_len).index(rank)
    if isinstance(log_prob, list):
        return [log_prob[j] for j in index.tolist()]
    return log_prob[torch.from_numpy(index).to(log_prob.device)]


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int) -> Tensor:
    """The whole response [R, ..] from every rank's part of it, on every rank; differentiable.

    The gradient of a rank's part is its slice of the sum of all ranks' gradients. While autograd is on, the result of a
    float tensor requires grad on every rank, also where a rank owns no token of the response: each must join the
    collective of the backward pass. For data, call it under `torch.no_grad()`.
    """
    all_gather = context_parallel(None, None, None)
    rank, size = rank_and_size(all_gather)
    if size == 1:
        return tensor.clone()
    layout = _layout(total_length, response_length, size)
    expected = int(layout.lengths(rank)[0])
    if len(tensor) != expected:
        raise CPInputError(f"CP rank {rank} was given {len(tensor)} tokens; expected the {expected} that it owns")
    if torch.is_grad_enabled() and tensor.is_floating_point() and not tensor.requires_grad:
        tensor = tensor.detach().requires_grad_()
    return _Gather.apply(tensor, layout, rank, all_gather)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, layout: Layout, rank: int, all_gather: AllGather) -> Tensor:
        ctx.place = torch.from_numpy(layout.index(rank)).to(tensor.device)
        ctx.all_gather = all_gather
        room = max(int(layout.lengths(r)[0]) for r in range(layout.cp_size))
        parts = call(all_gather, torch.cat([tensor, tensor.new_zeros(room - len(tensor), *tensor.shape[1:])]), "gather")
        whole = tensor.new_empty(int(layout.response_lengths[0]), *tensor.shape[1:])
        for r in range(layout.cp_size):
            index = torch.from_numpy(layout.index(r)).to(tensor.device)
            whole[index] = parts[r, : len(index)]
        return whole

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        return call(ctx.all_gather, grad_outputs[0], "gather, backward").sum(0)[ctx.place], None, None, None


# what they share


def _deltas(rewards: Tensor, values: Tensor, gamma: float) -> Tensor:
    v = values.double()
    following = torch.cat([v[:, 1:], v.new_zeros(len(v), 1)], dim=1)[:, : v.shape[1]]
    return rewards.double() + gamma * following - v


def _rectangle(*inputs: Tensor) -> torch.Size:
    shapes = [list(x.shape) for x in inputs]
    if len(shapes[0]) != 2 or any(shape != shapes[0] for shape in shapes):
        raise CPInputError(f"shapes are {', '.join(map(str, shapes))}; expected [batch, tokens], the same for all")
    return inputs[0].shape


def _layout(
    total_length: int, response_length: int, cp_size: int, qkv_format: str = "thd", width: int | None = None
) -> Layout:
    """slime's zigzag of one sample: by its own length (thd), or by the batch's width (bshd)."""
    if qkv_format == "thd":
        return zigzag([total_length], [response_length], cp_size)
    if width is None:
        raise CPInputError(f"qkv_format {qkv_format!r} needs the batch's width, max_seq_len")
    return zigzag([total_length], [response_length], cp_size, padded_lengths=[-(-width // (2 * cp_size)) * 2 * cp_size])


def _context(local: list[Tensor], response_lengths: list[int], total_lengths: list[int]) -> CPContext:
    all_gather = context_parallel(None, None, None)
    rank, size = rank_and_size(all_gather)
    if size == 1:  # where slime goes by the tensors alone
        lengths = [len(x) for x in local]
        return CPContext(zigzag([n + 1 for n in lengths], lengths, 1))
    try:
        layout = zigzag(total_lengths, response_lengths, size)
    except CPInputError as error:
        refuse(all_gather, str(error), device_of(all_gather), step="agreement", where="CP rank")
        raise
    return CPContext(layout, rank, all_gather)


def _packed(cp: CPContext, name: str, tensors: list[Tensor], counts) -> Tensor:
    """One pack of a list of tensors, or the same error on all ranks when they do not have `counts` tokens."""
    problem = None
    if len(tensors) != len(counts):
        problem = Problem(f"number of {name}", len(tensors), f"{len(counts)}, one a sample")
    else:
        for i, (x, n) in enumerate(zip(tensors, counts.tolist(), strict=True)):
            if tuple(x.shape) != (n,):
                problem = problem or Problem(f"shape of {name}", list(x.shape), f"[{n}]", sample=i)
    if problem is not None:
        cp.agree(Facts(problem=problem))
    return torch.cat([x.detach() for x in tensors])


def _scalars(rewards: Tensor | list[float], like: list[Tensor]) -> list[Tensor]:
    """Rewards as float64 0-dim tensors on the device of the batch."""
    if not like:
        return []
    return list(torch.as_tensor(rewards, dtype=torch.float64, device=like[0].device).detach().unbind())


def _like(tensors: list[Tensor], packed: Tensor) -> list[Tensor]:
    """A pack as a list of new tensors with the lengths and dtypes of another list."""
    parts = packed.split([len(x) for x in tensors])
    return [part.to(x.dtype, copy=True) for part, x in zip(parts, tensors, strict=True)]
