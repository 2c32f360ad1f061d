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

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from cp_returns.admission import admit
from cp_returns.agreement import ENVELOPE, Facts, agree, check_each, refuse
from cp_returns.arrays import quiet
from cp_returns.collectives import AllGather, alone, call
from cp_returns.context import WHERE, CPContext
from cp_returns.errors import CPCollectiveError, CPInputError, text_of
from cp_returns.estimators import gae
from cp_returns.groups import context_parallel, data_and_context_parallel, device_of, given, rank_and_size
from cp_returns.layout import Integers, Layout, zigzag
from cp_returns.lists import per_sample
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
    reinforce_plus_plus, reinforce_plus_plus_baseline), gamma, lambd, kl_coef, kl_loss_type, normalize_advantages,
    qkv_format. A padded batch ("bshd") under context parallelism also needs rollout_data["max_seq_lens"], its widths.

    The numbers are slime's where slime's are sound: rewards go to the last valid token, on whichever rank it is, the KL
    of masked tokens does not count, and masked tokens come out 0. With `normalize_advantages` slime whitens what this
    function sets. Then the mean over DP x CP is taken away here, which whitening does not notice, but slime's
    single-pass variance no longer cancels: equal advantages end as 0, not NaN.

    Raises CPInputError on all ranks, also for an unknown estimator or KL.
    """
    cp = context_parallel(None, None, None)
    with ExitStack() as together:  # a problem is told to the CP group first: the order in which the module meets them
        if getattr(args, "normalize_advantages", False):
            dp_cp = data_and_context_parallel(None, None, cp)
            together.enter_context(_together(dp_cp, step="whiten", where="DP x CP rank", size=MESSAGE))
        together.enter_context(_together(cp))
        config, inputs = _config_and_inputs(args, rollout_data, rank_and_size(cp)[1])
    out = ContextParallelReturns(config)(**inputs)
    rollout_data["advantages"], rollout_data["returns"] = out.advantages, out.returns


def _config_and_inputs(args: Any, rollout_data: dict[str, Any], cp_size: int) -> tuple[ReturnsConfig, dict[str, Any]]:
    log_probs = rollout_data.get("rollout_log_probs" if getattr(args, "use_rollout_logprobs", False) else "log_probs")
    with_kl = args.kl_coef != 0 and log_probs is not None and args.advantage_estimator not in _WITHOUT_KL
    inputs: dict[str, Any] = {
        key: rollout_data.get(key) for key in ("rewards", "loss_masks", "response_lengths", "total_lengths")
    }
    absent = [key for key, value in inputs.items() if value is None]
    if absent:
        raise CPInputError(f"rollout_data has no {absent[0]}; expected {', '.join(inputs)}")
    if getattr(args, "qkv_format", "thd") != "thd" and cp_size > 1:
        widths = rollout_data.get("max_seq_lens")
        if widths is None:
            raise CPInputError(
                f"qkv_format is {args.qkv_format!r} and rollout_data has no max_seq_lens; expected there the padded "
                "width of each sample, by which such a batch is cut"
            )
        inputs["padded_lengths"] = [_padded(width, cp_size) for width in widths]
    if with_kl:
        inputs |= {"log_probs": log_probs, "ref_log_probs": rollout_data.get("ref_log_probs")}
    if args.advantage_estimator == "ppo":
        inputs["values"] = rollout_data.get("values")
    elif args.advantage_estimator != "reinforce_plus_plus":
        inputs["group_ids"] = range(len(inputs["rewards"]))
    return _config(args, with_kl), inputs


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
    """`chunked_gae`, which slime also has as a serial loop."""
    return chunked_gae(rewards, values, gamma, lambd)


@torch.no_grad()
def get_grpo_returns(rewards: Tensor, kl: list[Tensor]) -> list[Tensor]:
    """Each sample's scalar at every local token, in the dtype of its `kl`; a NaN reward gives zeros."""
    scalars = _scalars(rewards, len(kl), _device(kl))
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
    if not isinstance(coef, Real) and not (isinstance(coef, Tensor) and coef.dim() == 0):
        raise TypeError("get_reinforce_plus_plus_baseline_advantages() is missing kl_coef")
    scalars = _scalars(rewards, len(kl), _device(kl))
    rows = [r - float(coef) * k.double() for k, r in zip(kl, scalars, strict=True)]
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
    all_gather = context_parallel(None, None, None)
    with _together(all_gather):
        cp = _context(all_gather, kl, response_lengths, total_lengths)
        device = _device(kl, all_gather)
        batch = admit(
            cp,
            _packed("loss_masks", loss_masks, cp.layout.response_lengths, device),
            _scalars(rewards, cp.layout.num_samples, device),
            tokens={"kl": _packed("kl", kl, cp.layout.lengths(cp.rank), device)},
            numbers={"gamma": gamma, "kl_coef": kl_coef},
        )

    def formula(cp: CPContext, kl: Tensor) -> tuple[Tensor]:
        # Rewards go by the mask; every token gives an output.
        return (cp.scan(batch.reward(cp, kl, None), batch.numbers["gamma"], batch.clock, None, dtype=batch.dtype),)

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
    all_gather = context_parallel(None, None, None)
    with _together(all_gather):
        cp = _context(all_gather, values_list, response_lengths, total_lengths)
        device = _device(values_list, all_gather)
        counts = cp.layout.lengths(cp.rank)
        values = _packed("values_list", values_list, counts, device)
        rewards = _packed("rewards_list", rewards_list, counts, device)
        every_token = torch.ones(cp.layout.num_tokens, dtype=torch.bool, device=device)
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

    Raises CPInputError, on all ranks, for a mask that is not 0 or 1 or not of the shape of `values`, for an epsilon
    that is not at least 0, and for options that differ.
    """
    if process_group is None:
        all_gather = data_and_context_parallel(None, None, context_parallel(None, None, None))
    else:
        all_gather = given(process_group)
    with _together(all_gather, step="whiten", where="rank", size=MESSAGE):
        for name, one in (("values", values), ("mask", mask)):
            if not isinstance(one, Tensor):
                raise CPInputError(f"{name} is a {type(one).__name__}; expected a tensor")
        if mask.shape != values.shape:
            raise CPInputError(f"shape of mask is {list(mask.shape)}; expected {list(values.shape)}, that of values")
        if not isinstance(epsilon, Real) or not epsilon >= 0:
            raise CPInputError(f"epsilon is {epsilon!r}; expected a number that is at least 0")
        x, flat = values.reshape(-1), mask.reshape(-1)
        valid = flat != 0
        check = check_each("mask", flat, valid & (flat != 1), "0 or 1", of="token")
        facts = Facts({"shift_mean": shift_mean, "epsilon": epsilon}, checks=[check])
        local = moments(x, as_bits(valid))
    merged = merge(agree(all_gather, facts, local, step="whiten", where="rank", size=MESSAGE))
    options = {"ddof": 1, "eps": epsilon, "eps_mode": "add", "center": True, "shift_mean": shift_mean, "scale": True}
    white = apply(x, as_bits(torch.ones_like(valid)), merged, options)
    return torch.where(merged[0] > 0, white, 0.0).to(values.dtype).view_as(values)


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
    chunk = int(layout.piece[0])
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

    One collective, and a second one for a part of more than 16 KiB. Raises CPInputError, on all ranks, for a part that
    is not the rank's tokens, and for lengths, a dtype or a shape of a token that differ.
    """
    all_gather = context_parallel(None, None, None)
    rank, size = rank_and_size(all_gather)
    if size == 1:
        return tensor.clone()
    with _together(all_gather):
        layout = _layout(total_length, response_length, size)
        expected = int(layout.lengths(rank)[0])
        if len(tensor) != expected:
            raise CPInputError(f"tensor has {len(tensor)} tokens; expected the {expected} that this rank owns")
        if torch.is_grad_enabled() and tensor.is_floating_point() and not tensor.requires_grad:
            tensor = tensor.detach().requires_grad_()
    return _Gather.apply(tensor, layout, rank, all_gather)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, layout: Layout, rank: int, all_gather: AllGather) -> Tensor:
        ctx.place = torch.from_numpy(layout.index(rank)).to(tensor.device)
        ctx.all_gather = all_gather
        room = max(int(layout.lengths(r)[0]) for r in range(layout.cp_size))
        padded = torch.cat([tensor, tensor.new_zeros(room - len(tensor), *tensor.shape[1:])])
        facts = Facts(
            {"dtype of tensor": tensor.dtype, "shape of a token": list(tensor.shape[1:])},
            {"response_length": layout.response_lengths, "total_length": layout.total_lengths},
        )
        message = padded.reshape(-1).view(torch.uint8)  # one that rides with the agreement where it is short
        messages = agree(all_gather, facts, message, step="gather", where=WHERE)
        parts = messages.reshape(-1).view(tensor.dtype).view(layout.cp_size, *padded.shape)
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
    return zigzag([total_length], [response_length], cp_size, padded_lengths=[_padded(width, cp_size)])


def _padded(width: int, cp_size: int) -> int:
    """A padded batch's width, in pieces of ceil(width / 2W)."""
    return -(-width // (2 * cp_size)) * 2 * cp_size


@contextmanager
def _together(
    all_gather: AllGather, *, step: str = "agreement", where: str = WHERE, size: int = ENVELOPE
) -> Iterator[None]:
    """What this rank trips over before its first collective, all ranks raise as one CPInputError: nobody waits.

    step, where and size are those of that first collective, in which the others are.
    """
    try:
        yield
    except CPCollectiveError:  # of a `_together` inside this one: a peer is gone
        raise
    except Exception as error:
        refuse(all_gather, text_of(error), device_of(all_gather), step=step, where=where, size=size)
        raise


def _context(
    all_gather: AllGather, local: list[Tensor], response_lengths: list[int], total_lengths: list[int]
) -> CPContext:
    rank, size = rank_and_size(all_gather)
    if size == 1:  # where slime goes by the tensors alone
        lengths = [len(x) for x in local]
        return CPContext(zigzag([n + 1 for n in lengths], lengths, 1))
    return CPContext(zigzag(total_lengths, response_lengths, size), rank, all_gather)


def _device(tensors: list[Tensor], all_gather: AllGather = alone) -> torch.device:
    """Where the batch lives, also an empty one."""
    return device_of(all_gather, *tensors)


def _packed(name: str, tensors: list[Tensor], counts: Integers, device: torch.device) -> Tensor:
    """One pack of a list of tensors. Raises CPInputError where they do not have `counts` tokens."""
    if len(tensors) != len(counts):
        raise CPInputError(f"number of {name} is {len(tensors)}; expected {len(counts)}, one a sample")
    for i, (x, n) in enumerate(zip(tensors, counts.tolist(), strict=True)):
        if not isinstance(x, Tensor):
            raise CPInputError(f"sample {i}, {name} is a {type(x).__name__}; expected a tensor [{n}]")
        if tuple(x.shape) != (n,):
            raise CPInputError(f"sample {i}, shape of {name} is {list(x.shape)}; expected [{n}]")
    return torch.cat([x.detach().to(device) for x in tensors]) if len(tensors) else torch.zeros(0, device=device)


def _scalars(rewards: Tensor | list[float], samples: int, device: torch.device) -> Tensor:
    """[samples] rewards in float64. Raises CPInputError where there is not one number a sample."""
    scalars = per_sample("rewards", rewards, samples, device)
    if scalars is None:
        raise CPInputError("rewards is absent; expected one number a sample")
    return scalars.double()


def _like(tensors: list[Tensor], packed: Tensor) -> list[Tensor]:
    """A pack as a list of new tensors with the lengths and dtypes of another list."""
    parts = packed.split([len(x) for x in tensors])
    return [part.to(x.dtype, copy=True) for part, x in zip(parts, tensors, strict=True)]
