"""The estimators of REINFORCE++, ReMax and GAE: each says what is summed and with what decay, in the words of its
equation.

kl, values, token_rewards: this rank's packed tokens (`cp.layout.lengths(rank)` of each sample). full_mask: packed whole
responses, 0/1, equal on all ranks; values are selected by it, so masked slots may hold anything. rewards: one scalar a
sample, placed on its last valid token; NaN means missing and makes the sample count as fully masked. gamma, lam,
kl_coef: a float or one per sample.

Outputs are this rank's packed tokens, float32 (float64 if a per-token input is), 0 at masked tokens, without autograd.
Every rank of `cp` must make the call, also one that owns no token. Bad input on any rank raises the same CPInputError
on all.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int, Shaped
from torch import Tensor

from cp_returns.admission import Batch, admit
from cp_returns.agreement import refuse
from cp_returns.arrays import copy, countable, native
from cp_returns.baselines import group_advantage
from cp_returns.collectives import AllGather, alone
from cp_returns.context import CPContext, PerSample
from cp_returns.errors import CPInputError
from cp_returns.masks import select, select_in_place

MASKED_VALUES = ("zero", "use")


@torch.no_grad()
def reinforce_plus_plus(
    kl: Shaped[Tensor, " local"] | None,
    rewards: Shaped[Tensor, " samples"] | None,
    full_mask: Shaped[Tensor, " full"],
    *,
    cp: CPContext,
    gamma: float | Tensor,
    kl_coef: float | Tensor,
    clock: str = "token",
    token_rewards: Shaped[Tensor, " local"] | None = None,
    sample_mask: Shaped[Tensor, " samples"] | None = None,
    nonfinite: str = "error",
) -> Shaped[Tensor, " local"]:
    """REINFORCE++ returns: the discounted reward to go, with the KL penalty in the reward (Hu et al., 2025; slime,
    OpenRLHF).

        r_j = -kl_coef * kl_j + token_reward_j (+ reward at the last valid token)
        G_j = r_j + gamma^tick_j * G_{j+1}

    Raises CPInputError on every rank: see the module. `nonfinite="propagate"` lets NaN and inf spoil their own sample
    instead.
    """
    batch = admit(
        cp,
        full_mask,
        rewards,
        tokens={"kl": kl, "token_rewards": token_rewards},
        numbers={"gamma": gamma, "kl_coef": kl_coef},
        clock=clock,
        sample_mask=sample_mask,
        nonfinite=nonfinite,
    )

    return discounted_returns(batch, cp)


def discounted_returns(batch: Batch, cp: CPContext) -> Shaped[Tensor, " local"]:
    """G_j = r_j + gamma^tick_j * G_{j+1} of an admitted batch of kl and token_rewards."""

    def formula(cp: CPContext, kl, token_rewards):
        reward = batch.reward(cp, kl, token_rewards)
        return (cp.scan(reward, batch.numbers["gamma"], batch.clock, batch.output(cp), dtype=batch.dtype),)

    (returns,) = batch.run(cp, formula)
    return returns


@torch.no_grad()
def remax(
    kl: Shaped[Tensor, " local"] | None,
    rewards: Shaped[Tensor, " samples"],
    baselines: Shaped[Tensor, " samples"],
    full_mask: Shaped[Tensor, " full"],
    *,
    cp: CPContext,
    kl_coef: float | Tensor,
    token_rewards: Shaped[Tensor, " local"] | None = None,
    sample_mask: Shaped[Tensor, " samples"] | None = None,
    nonfinite: str = "error",
) -> Shaped[Tensor, " local"]:
    """ReMax advantages: the reward to go minus the reward of the greedy response (Li et al., 2024; verl).

        A_j = sum over s >= j of r_s - baseline

    baselines: one scalar a sample. It is the same for every token, so it is taken from the terminal reward. Errors: see
    the module.
    """
    given = [x for x in (rewards, baselines) if x is not None]
    fits = baselines is not None and all(isinstance(x, Tensor) and x.shape == given[0].shape for x in given)
    batch = admit(
        cp,
        full_mask,
        less_baseline(rewards, baselines) if fits else rewards,
        tokens={"kl": kl, "token_rewards": token_rewards},
        numbers={"gamma": 1.0, "kl_coef": kl_coef},
        samples={"baselines": baselines},
        required=("baselines",),
        sample_mask=sample_mask,
        nonfinite=nonfinite,
    )
    return discounted_returns(batch, cp)


def less_baseline(rewards: Tensor | None, baselines: Tensor) -> Float64[Tensor, " samples"]:
    """rewards - baselines, where an infinite reward stays one and is refused: inf - inf would pass as a missing one."""
    rewards = torch.zeros_like(baselines) if rewards is None else rewards
    return torch.where(rewards.isinf(), rewards.double(), rewards.double() - baselines.double())


@dataclass(frozen=True)
class GAE:
    """Generalised advantage estimates and the returns that a value function learns, of this rank's tokens."""

    advantages: Shaped[Tensor, " local"]
    returns: Shaped[Tensor, " local"]


@torch.no_grad()
def gae(
    kl: Shaped[Tensor, " local"] | None,
    rewards: Shaped[Tensor, " samples"] | None,
    values: Shaped[Tensor, " local"],
    full_mask: Shaped[Tensor, " full"],
    *,
    cp: CPContext,
    gamma: float | Tensor,
    lam: float | Tensor,
    kl_coef: float | Tensor = 0.0,
    clock: str = "trainable",
    lam_value: float | Tensor | None = None,
    lam_alpha: float | None = None,
    bootstrap: Shaped[Tensor, " samples"] | None = None,
    token_rewards: Shaped[Tensor, " local"] | None = None,
    masked_values: str = "zero",
    sample_mask: Shaped[Tensor, " samples"] | None = None,
    nonfinite: str = "error",
) -> GAE:
    """Generalised advantage estimation (Schulman et al., 2016) over the steps of the clock.

        delta_j = r_j + gamma^tick_j * V_next - V_j
        A_j = delta_j + (gamma * lam)^tick_j * A_next      returns = A + V

    V_next: the value of the next step; after the last one `bootstrap` (default, and where it is NaN, 0).

    lam_value: the returns come from a second recurrence with this lambda (VC-PPO, VAPO). lam_alpha: length-adaptive
    lambda in place of `lam`, 1 - 1 / (lam_alpha * valid tokens) within [0, 1] (VAPO). masked_values, for the token
    clock: values of masked tokens count as 0 ("zero", OpenRLHF) or are used and must be finite ("use", slime). Errors:
    see the module.
    """
    batch = admit(
        cp,
        full_mask,
        rewards,
        tokens={"kl": kl, "values": values, "token_rewards": token_rewards},
        numbers={"gamma": gamma, "lam": lam, "kl_coef": kl_coef}
        | ({} if lam_value is None else {"lam_value": lam_value})
        | ({} if lam_alpha is None else {"lam_alpha": lam_alpha}),
        clock=clock,
        choices={"masked_values": (masked_values, MASKED_VALUES)},
        samples={"bootstrap": bootstrap},
        required=("values",),
        sample_mask=sample_mask,
        unselected=("values",) if masked_values == "use" and clock == "token" else (),
        nonfinite=nonfinite,
    )

    return advantage_estimates(batch, cp)


def advantage_estimates(batch: Batch, cp: CPContext) -> GAE:
    """A_j = delta_j + (gamma * lam)^tick_j * A_next of an admitted batch of kl, values and token_rewards."""

    def formula(cp: CPContext, kl, values, token_rewards):
        keep, gamma = batch.output(cp), batch.numbers["gamma"]
        reward = batch.reward(cp, kl, token_rewards).tokens(cp, keep)
        decays = [gamma * lam for lam in _lambdas(batch)]
        a, *second = cp.scan_ahead(reward, values, decays, gamma, batch.clock, batch.bootstrap, keep)
        advantages = copy(a, batch.dtype)
        returns = (second or [a])[0]
        g = native(returns)
        g += native(countable(values))
        return advantages, select_in_place(returns, keep).to(batch.dtype)

    return GAE(*batch.run(cp, formula))


def _lambdas(batch: Batch) -> list[PerSample]:
    """The lambda of the advantages and, only where it differs, that of the returns."""
    numbers = batch.numbers
    lam = numbers["lam"]
    if "lam_alpha" in numbers:
        lam = (1 - 1 / (numbers["lam_alpha"] * batch.valid_counts.double())).clamp(0.0, 1.0)
    lam_value = numbers.get("lam_value", lam)
    equal = lam_value is lam or (isinstance(lam, float) and isinstance(lam_value, float) and lam == lam_value)
    return [lam] if equal else [lam, lam_value]


@torch.no_grad()
def reinforce_plus_plus_baseline(
    kl: Shaped[Tensor, " local"] | None,
    rewards: Shaped[Tensor, " samples"],
    group_ids: Int[Tensor, " samples"],
    full_mask: Shaped[Tensor, " full"],
    *,
    cp: CPContext,
    kl_coef: float | Tensor,
    all_gather: AllGather = alone,
    sample_mask: Shaped[Tensor, " samples"] | None = None,
    nonfinite: str = "error",
) -> Shaped[Tensor, " local"]:
    """REINFORCE++-baseline advantages before whitening: no discounting, the KL is not summed (slime, NeMo-RL).

        A_j = (reward - mean reward of its group) - kl_coef * kl_j        on valid tokens

    `all_gather` is over the data-parallel ranks that share groups; default this rank's samples only. Errors: see the
    module; where `all_gather` is given, its ranks raise too.
    """
    batch = admit(
        cp,
        full_mask,
        rewards,
        tokens={"kl": kl},
        numbers={"kl_coef": kl_coef},
        samples={"group_ids": group_ids},
        sample_mask=sample_mask,
        nonfinite=nonfinite,
    )
    return baseline_advantages(batch, cp, group_ids, all_gather=all_gather)


def baseline_advantages(
    batch: Batch, cp: CPContext, group_ids: Int[Tensor, " samples"], *, all_gather: AllGather, **baseline
) -> Shaped[Tensor, " local"]:
    """A_j = group_advantage(rewards) - kl_coef * kl_j on valid tokens, of an admitted batch of kl.

    With no KL these are GRPO, Dr. GRPO, RLOO and OPO: `baseline` are the settings of `group_advantage`. Each rank
    computes its own tokens.
    """
    (kl,) = batch.inputs or (None,)
    a = cp.spread(group_scalars(batch, cp, group_ids, all_gather=all_gather, **baseline))
    if kl is not None:
        coef = batch.numbers["kl_coef"]
        a = a - (cp.spread(coef) if isinstance(coef, Tensor) else coef) * kl.double()
    return select(a.to(batch.dtype), batch.keep)


def group_scalars(
    batch: Batch, cp: CPContext, group_ids: Int[Tensor, " samples"], *, all_gather: AllGather, **baseline
) -> Float64[Tensor, " samples"]:
    """One advantage a sample, after the ranks of `cp` have agreed; a problem of theirs reaches the ranks of
    `all_gather` too.
    """
    try:
        cp.agree(batch.facts)
    except CPInputError as error:
        if all_gather is not alone:
            refuse(all_gather, str(error), cp.device(batch.facts, batch.inputs), step="group baseline", where="rank")
        raise
    return group_advantage(
        torch.where(batch.missing, torch.nan, batch.rewards),
        group_ids,
        sample_mask=batch.counted,
        lengths=batch.valid_counts,
        all_gather=all_gather,
        **baseline,
    )
