"""The estimators of six frameworks as serial loops, written from their formulas: the oracle of the presets.

Every loop takes whole responses, works on Python floats (float64) and gives `(advantages, returns)`, one list a sample.
A loop says what its framework computes. Its keyword switches are what that framework does and this library does not, on
purpose: all off, the loop is this library's definition under the framework's preset; one on, it is the framework as it
stands. Frameworks also leave numbers at masked tokens; these are compared nowhere, because no loss reads them.

Formulas: the published sources named in configs/presets/README.md. No code of any framework is used.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

Rows = list[list[float]]


@dataclass(frozen=True)
class Batch:
    """Whole responses: per token `[sample][token]`, per sample `[sample]`."""

    log_probs: Rows
    ref_log_probs: Rows
    masks: list[list[int]]
    values: Rows
    rewards: list[float]
    group_ids: list[int]
    baseline_rewards: list[float]  # ReMax: the reward of the greedy response


# ---------------------------------------------------------------------------------------------------- shared equations


def kl_rows(batch: Batch, kind: str = "k1", clamp: float | None = None, *, unclamped_exp: bool = False) -> Rows:
    """k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d with d = logp - ref; the exponent stays within +-20 (or: switch)."""

    def one(logp: float, ref: float) -> float:
        d = logp - ref
        x = -d if unclamped_exp else min(max(-d, -20.0), 20.0)
        k = {"k1": d, "k2": d * d / 2, "k3": math.expm1(x) + d}[kind]
        return k if clamp is None else min(max(k, -clamp), clamp)

    return [
        [one(a, b) for a, b in zip(p, q, strict=True)]
        for p, q in zip(batch.log_probs, batch.ref_log_probs, strict=True)
    ]


def last_valid(mask: list[int]) -> int | None:
    return max((j for j, m in enumerate(mask) if m), default=None)


def token_rewards(
    kl: Rows,
    masks: list[list[int]],
    rewards: list[float],
    kl_coef: float,
    *,
    unmasked_kl: bool = False,
    reward_on_last_token: bool = False,
) -> Rows:
    """r_j = -kl_coef * kl_j on valid tokens; the scalar reward at the last valid one."""
    out = []
    for k, m, s in zip(kl, masks, rewards, strict=True):
        row = [-kl_coef * x if valid or unmasked_kl else 0.0 for x, valid in zip(k, m, strict=True)]
        at = len(m) - 1 if reward_on_last_token else last_valid(m)
        if at is not None:
            row[at] += s
        out.append(row)
    return out


def every_token(rewards: list[float], gamma: float) -> list[float]:
    """G_j = r_j + gamma * G_{j+1} over every token."""
    g, out = 0.0, []
    for r in reversed(rewards):
        g = r + gamma * g
        out.append(g)
    return out[::-1]


def trained_tokens(rewards: list[float], mask: list[int], gamma: float, *, reset_at_gaps: bool = False) -> list[float]:
    """The same over valid tokens only: a gap passes the running return on (or, with the switch, sets it to 0)."""
    g, out = 0.0, []
    for r, m in zip(reversed(rewards), reversed(mask), strict=True):
        if reset_at_gaps:
            out.append(r + gamma * g)
            g = out[-1] if m else 0.0
        else:
            g = r + gamma * g if m else g
            out.append(g if m else 0.0)
    return out[::-1]


def gae_every_token(r: list[float], v: list[float], gamma: float, lam: float) -> list[float]:
    """A_j = r_j + gamma * V_{j+1} - V_j + gamma * lam * A_{j+1} over every token."""
    following = [*v[1:], 0.0][: len(v)]
    return every_token([x + gamma * n - y for x, n, y in zip(r, following, v, strict=True)], gamma * lam)


def gae_trained_tokens(r: list[float], v: list[float], mask: list[int], gamma: float, lam: float) -> list[float]:
    """The same over valid tokens only: the next value is the next valid token's."""
    kept = [j for j, m in enumerate(mask) if m]
    kept_advantages = gae_every_token([r[j] for j in kept], [v[j] for j in kept], gamma, lam)
    out = [0.0] * len(mask)
    for j, a in zip(kept, kept_advantages, strict=True):
        out[j] = a
    return out


def plus(a: Rows, b: Rows) -> Rows:
    return [[x + y for x, y in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]


def spread(scalars: list[float], masks: list[list[int]]) -> Rows:
    return [[s] * len(m) for s, m in zip(scalars, masks, strict=True)]


def whiten(
    rows: Rows,
    masks: list[list[int]],
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    clamp: bool = False,
    part: Callable[[int, int], int] = lambda i, j: 0,
    single_pass_float32: bool = False,
    unguarded: bool = False,
) -> Rows:
    """(x - mean) / sqrt(var + eps), or / sqrt(max(var, eps)), over the valid tokens of each `part(sample, token)`."""
    pools: dict[int, list[float]] = {}
    for i, m in enumerate(masks):
        for j, valid in enumerate(m):
            if valid:
                pools.setdefault(part(i, j), []).append(rows[i][j])
    moments = {key: _moments(x, ddof, single_pass_float32, unguarded) for key, x in pools.items()}

    def one(i: int, j: int) -> float:
        mean, var = moments.get(part(i, j), (0.0, 1.0))
        scale = max(var, eps) if clamp else var + eps
        return (rows[i][j] - mean) / math.sqrt(scale) if scale > 0 else math.nan

    return [[one(i, j) for j in range(len(row))] for i, row in enumerate(rows)]


def _moments(x: list[float], ddof: int, single_pass_float32: bool, unguarded: bool) -> tuple[float, float]:
    n = len(x)
    if single_pass_float32:
        t = torch.tensor(x, dtype=torch.float32)
        mean, square = t.sum() / n, (t * t).sum() / n
        var = square - mean * mean
        return float(mean), float(var * n / (n - ddof) if n > ddof else var)
    mean = math.fsum(x) / n
    if n <= ddof:
        return mean, math.nan if unguarded else 0.0
    return mean, math.fsum((y - mean) ** 2 for y in x) / (n - ddof)


def by_group(
    batch: Batch,
    score: Callable[[list[float], list[int]], list[float]],
    *,
    one: str = "zero",
    fully_masked_vote: bool = False,
) -> list[float]:
    """`score(rewards, valid lengths)` of each group's members; a fully masked sample is no member and gets 0."""
    groups: dict[int, list[int]] = {}
    for i, key in enumerate(batch.group_ids):
        if fully_masked_vote or any(batch.masks[i]):
            groups.setdefault(key, []).append(i)
    out = [0.0] * len(batch.rewards)
    for members in groups.values():
        x = [batch.rewards[i] for i in members]
        alone = [x[0] if one == "raw" else 0.0]
        for i, a in zip(
            members, alone if len(x) == 1 else score(x, [sum(batch.masks[i]) for i in members]), strict=True
        ):
            out[i] = a
    return out


def centred(x: list[float], lengths: list[int]) -> list[float]:
    mean = math.fsum(x) / len(x)
    return [y - mean for y in x]


def standardised(eps: float, *, float32: bool = False) -> Callable[[list[float], list[int]], list[float]]:
    """(x - mean) / (sample std + eps)."""

    def score(x: list[float], lengths: list[int]) -> list[float]:
        if float32:
            t = torch.tensor(x, dtype=torch.float32)
            return ((t - t.mean()) / (t.std() + eps)).tolist()
        c = centred(x, lengths)
        return [y / (math.sqrt(math.fsum(z * z for z in c) / (len(x) - 1)) + eps) for y in c]

    return score


def leave_one_out(x: list[float], lengths: list[int]) -> list[float]:
    return [y - (math.fsum(x) - y) / (len(x) - 1) for y in x]


def length_weighted(x: list[float], lengths: list[int]) -> list[float]:
    base = math.fsum(n * y for n, y in zip(lengths, x, strict=True)) / sum(lengths)
    return [y - base for y in x]


def leave_one_out_standardised(x: list[float], lengths: list[int]) -> list[float]:
    """(x - mean of the others) / (std of the others + 1e-6), divided only where that std is positive."""
    out = []
    for i, y in enumerate(x):
        others = x[:i] + x[i + 1 :]
        mean, var = _moments(others, 1, False, False)
        std = math.sqrt(var) if max(others) > min(others) else 0.0
        out.append((y - mean) / (std + 1e-6) if std > 0 else y - mean)
    return out


def zigzag_rank(total: int, response: int, cp_size: int, j: int) -> int:
    """The CP rank whose zigzag slice holds response token j."""
    chunk = -(-total // (2 * cp_size))
    piece = (total - response - 1 + j) // chunk
    return piece if piece < cp_size else 2 * cp_size - 1 - piece


# --------------------------------------------------------------------------------------------------------------- slime


def slime_reinforce_plus_plus(
    batch: Batch,
    *,
    gamma: float,
    kl_coef: float,
    kl: str = "k1",
    fully_masked_asserts: bool = False,
    multiplied_masks: bool = False,
    single_pass_float32: bool = False,
    unclamped_exp: bool = False,
) -> tuple[Rows, Rows]:
    k = kl_rows(
        batch, "k3" if kl == "low_var_kl" else kl, 10.0 if kl == "low_var_kl" else None, unclamped_exp=unclamped_exp
    )
    assert not fully_masked_asserts or all(any(m) for m in batch.masks)
    r = token_rewards(k, batch.masks, batch.rewards, kl_coef)
    if multiplied_masks:  # 0 * inf and 0 * nan are nan
        r = [
            [a + m * -kl_coef * x if not m else a for a, m, x in zip(row, mask, kk, strict=True)]
            for row, mask, kk in zip(r, batch.masks, k, strict=True)
        ]
    g = [every_token(row, gamma) for row in r]
    return whiten(g, batch.masks, single_pass_float32=single_pass_float32), g


def slime_reinforce_plus_plus_baseline(
    batch: Batch, *, kl_coef: float, fully_masked_vote: bool = False
) -> tuple[Rows, Rows]:
    base = spread(by_group(batch, centred, fully_masked_vote=fully_masked_vote), batch.masks)
    a = plus(base, [[-kl_coef * x for x in row] for row in kl_rows(batch)])
    return whiten(a, batch.masks), a


def slime_grpo(batch: Batch, *, fully_masked_vote: bool = False) -> tuple[Rows, Rows]:
    a = spread(by_group(batch, standardised(1e-6), fully_masked_vote=fully_masked_vote), batch.masks)
    return a, a


def slime_gae(
    batch: Batch,
    *,
    gamma: float,
    lam: float,
    kl_coef: float,
    unmasked_kl: bool = False,
    reward_on_last_token: bool = False,
    reward_on_tail_of_rank_0: int = 0,
    prompt: int = 1,
) -> tuple[Rows, Rows]:
    """`reward_on_tail_of_rank_0=W`: the reward goes to the last token of CP rank 0 of W (`prompt` prompt tokens)."""
    rewards = [0.0] * len(batch.rewards) if reward_on_tail_of_rank_0 else batch.rewards
    r = token_rewards(
        kl_rows(batch),
        batch.masks,
        rewards,
        kl_coef,
        unmasked_kl=unmasked_kl,
        reward_on_last_token=reward_on_last_token,
    )
    if reward_on_tail_of_rank_0:
        for row, s in zip(r, batch.rewards, strict=True):
            n = len(row)
            row[max(j for j in range(n) if zigzag_rank(prompt + n, n, reward_on_tail_of_rank_0, j) == 0)] += s
    a = [gae_every_token(x, v, gamma, lam) for x, v in zip(r, batch.values, strict=True)]
    return whiten(a, batch.masks), plus(a, batch.values)


# --------------------------------------------------------------------------------------------------------------- miles


def miles_reinforce_plus_plus(
    batch: Batch,
    *,
    gamma: float,
    kl_coef: float,
    unmasked_kl: bool = False,
    whiten_without_cp: int = 0,
    prompt: int = 1,
) -> tuple[Rows, Rows]:
    """`whiten_without_cp=W`: every CP rank of W whitens its own zigzag slice, after `prompt` prompt tokens."""
    r = token_rewards(kl_rows(batch), batch.masks, batch.rewards, kl_coef, unmasked_kl=unmasked_kl)
    g = [every_token(row, gamma) for row in r]
    lengths = [len(m) for m in batch.masks]

    def part(i: int, j: int) -> int:
        return zigzag_rank(prompt + lengths[i], lengths[i], whiten_without_cp, j) if whiten_without_cp else 0

    return whiten(g, batch.masks, part=part), g


def miles_gae(batch: Batch, *, gamma: float, lam: float, kl_coef: float) -> tuple[Rows, Rows]:
    r = token_rewards(kl_rows(batch), batch.masks, batch.rewards, kl_coef)
    a = [gae_trained_tokens(x, v, m, gamma, lam) for x, v, m in zip(r, batch.values, batch.masks, strict=True)]
    return whiten(a, batch.masks), plus(a, batch.values)


# ---------------------------------------------------------------------------------------------------------------- verl


def verl_reinforce_plus_plus(
    batch: Batch, *, gamma: float, kl_coef: float, reward_on_last_token: bool = False, reset_at_gaps: bool = False
) -> tuple[Rows, Rows]:
    r = token_rewards(kl_rows(batch), batch.masks, batch.rewards, kl_coef, reward_on_last_token=reward_on_last_token)
    g = [trained_tokens(x, m, gamma, reset_at_gaps=reset_at_gaps) for x, m in zip(r, batch.masks, strict=True)]
    return whiten(g, batch.masks), g


def verl_gae(
    batch: Batch, *, gamma: float, lam: float, kl_coef: float, reward_on_last_token: bool = False
) -> tuple[Rows, Rows]:
    r = token_rewards(kl_rows(batch), batch.masks, batch.rewards, kl_coef, reward_on_last_token=reward_on_last_token)
    a = [gae_trained_tokens(x, v, m, gamma, lam) for x, v, m in zip(r, batch.values, batch.masks, strict=True)]
    return whiten(a, batch.masks), plus(a, batch.values)


def verl_reinforce_plus_plus_baseline(
    batch: Batch, *, kl_coef: float, kl_in_scalar: bool = False, fully_masked_vote: bool = False
) -> tuple[Rows, Rows]:
    """With the switch, the summed KL joins the scalar reward before the group mean is taken, as in verl."""
    kl = kl_rows(batch)
    scored = kl_summed(batch, kl, kl_coef) if kl_in_scalar else batch
    a = spread(by_group(scored, centred, one="raw", fully_masked_vote=fully_masked_vote), batch.masks)
    if not kl_in_scalar:
        a = plus(a, [[-kl_coef * x for x in row] for row in kl])
    return whiten(a, batch.masks), a


def kl_summed(batch: Batch, kl: Rows, kl_coef: float) -> Batch:
    """The batch with kl_coef times the summed masked KL taken from each scalar reward."""
    sums = [math.fsum(x for x, m in zip(k, mask, strict=True) if m) for k, mask in zip(kl, batch.masks, strict=True)]
    return Batch(**{**vars(batch), "rewards": [s - kl_coef * x for s, x in zip(batch.rewards, sums, strict=True)]})


def verl_grpo(
    batch: Batch, *, float32: bool = False, singleton_divided: bool = False, fully_masked_vote: bool = False
) -> tuple[Rows, Rows]:
    """`singleton_divided`: the reward of a group of one is divided by 1 + 1e-6: its standard deviation counts as 1."""
    score = standardised(1e-6, float32=float32)
    scalars = by_group(batch, score, one="raw", fully_masked_vote=fully_masked_vote)
    if singleton_divided:
        scalars = [
            x / (1 + 1e-6) if batch.group_ids.count(i) == 1 else x
            for x, i in zip(scalars, batch.group_ids, strict=True)
        ]
    a = spread(scalars, batch.masks)
    return a, a


def verl_dr_grpo(batch: Batch) -> tuple[Rows, Rows]:
    a = spread(by_group(batch, centred, one="raw"), batch.masks)
    return a, a


def verl_rloo(batch: Batch, *, vectorised: bool = False) -> tuple[Rows, Rows]:
    a = spread(by_group(batch, leave_one_out, one="zero" if vectorised else "raw"), batch.masks)
    return a, a


def verl_opo(batch: Batch) -> tuple[Rows, Rows]:
    a = spread(by_group(batch, length_weighted, one="raw"), batch.masks)
    return a, a


def verl_remax(batch: Batch, *, kl_coef: float, returns_without_baseline: bool = False) -> tuple[Rows, Rows]:
    """Reward to go minus the greedy response's reward; returns are the advantages, as for groups (or: switch)."""
    r = token_rewards(kl_rows(batch), batch.masks, batch.rewards, kl_coef)
    g = [every_token(row, 1.0) for row in r]
    a = [[x - b for x in row] for row, b in zip(g, batch.baseline_rewards, strict=True)]
    return a, g if returns_without_baseline else a


# ------------------------------------------------------------------------------------------------------------ OpenRLHF


def openrlhf_kl(batch: Batch) -> Rows:
    return kl_rows(batch, "k1", 10.0)


def openrlhf_reinforce(
    batch: Batch, *, gamma: float, kl_coef: float, clipped_reward: bool = False
) -> tuple[Rows, Rows]:
    rewards = [min(max(s, -10.0), 10.0) for s in batch.rewards] if clipped_reward else batch.rewards
    g = [every_token(row, gamma) for row in token_rewards(openrlhf_kl(batch), batch.masks, rewards, kl_coef)]
    return whiten(g, batch.masks, ddof=0, clamp=True), g


def openrlhf_gae(
    batch: Batch, *, gamma: float, lam: float, kl_coef: float, phantom_values: bool = True
) -> tuple[Rows, Rows]:
    """Values are 0 at masked tokens, and these are steps: the gap costs discount, and V = 0 there makes TD errors."""
    r = token_rewards(openrlhf_kl(batch), batch.masks, batch.rewards, kl_coef)
    v = [
        [x if m else 0.0 for x, m in zip(row, mask, strict=True)]
        for row, mask in zip(batch.values, batch.masks, strict=True)
    ]
    if phantom_values:
        a = [gae_every_token(x, y, gamma, lam) for x, y in zip(r, v, strict=True)]
    else:
        a = [gae_trained_tokens(x, y, m, gamma, lam) for x, y, m in zip(r, v, batch.masks, strict=True)]
    return whiten(a, batch.masks, ddof=0, clamp=True), plus(a, v)


def openrlhf_group(
    batch: Batch,
    score: Callable[[list[float], list[int]], list[float]],
    *,
    kl_coef: float,
    normalise: bool,
    fully_masked_vote: bool = False,
) -> tuple[Rows, Rows]:
    """The group scalar is the reward of an undiscounted REINFORCE: reinforce_baseline, rloo, group_norm, dr_grpo."""
    scalars = by_group(batch, score, fully_masked_vote=fully_masked_vote)
    g = [every_token(row, 1.0) for row in token_rewards(openrlhf_kl(batch), batch.masks, scalars, kl_coef)]
    return (whiten(g, batch.masks, ddof=0, clamp=True) if normalise else g), g


# ------------------------------------------------------------------------------------------------------------- NeMo-RL


def nemo_rl_gae(
    batch: Batch,
    *,
    gamma: float,
    lam: float,
    kl_coef: float,
    lam_value: float | None = None,
    lam_alpha: float | None = None,
    unguarded: bool = False,
) -> tuple[Rows, Rows]:
    """`lam_value`: the returns' own lambda; `lam_alpha`: a sample's lam is 1 - 1 / (alpha * valid length) in [0, 1]."""
    r = token_rewards(kl_rows(batch, "k3", 10.0), batch.masks, batch.rewards, kl_coef)

    def advantages(lams: list[float]) -> Rows:
        rows = zip(r, batch.values, batch.masks, lams, strict=True)
        return [gae_trained_tokens(x, v, m, gamma, one) for x, v, m, one in rows]

    lams = [lam] * len(r)
    if lam_alpha is not None:
        lams = [min(max(1 - 1 / max(lam_alpha * sum(m), 1.0), 0.0), 1.0) for m in batch.masks]
    a = advantages(lams)
    target = a if lam_value is None else advantages([lam_value] * len(r))
    return whiten(a, batch.masks, unguarded=unguarded), plus(target, batch.values)


def nemo_rl_reinforce_plus_plus(batch: Batch, *, kl_coef: float, fully_masked_vote: bool = False) -> tuple[Rows, Rows]:
    """Reward minus group mean minus the token's own KL: no discount and no sum over later tokens."""
    base = spread(by_group(batch, centred, fully_masked_vote=fully_masked_vote), batch.masks)
    a = plus(base, [[-kl_coef * x for x in row] for row in kl_rows(batch, "k3", 10.0)])
    return whiten(a, batch.masks, ddof=0, clamp=True), a


def nemo_rl_grpo(batch: Batch) -> tuple[Rows, Rows]:
    a = spread(by_group(batch, leave_one_out_standardised), batch.masks)
    return a, a


# ----------------------------------------------------------------------------------------------------------------- TRL


def trl_gae(
    batch: Batch,
    *,
    gamma: float,
    lam: float,
    kl_coef: float,
    reward_after_eos: bool = False,
    processes: int = 1,
) -> tuple[Rows, Rows]:
    """TRL knows no gaps; values end with the response.

    `reward_after_eos`: the reward, and one more value, sit on the token after the last valid one where there is one.
    `processes=n`: sample i is on process i % n, and every process whitens alone.
    """
    r = token_rewards(kl_rows(batch), batch.masks, batch.rewards, kl_coef)
    kept = [list(m) for m in batch.masks]
    for row, m, s in zip(r, kept, batch.rewards, strict=True):
        e = last_valid(m)
        if reward_after_eos and e is not None and e + 1 < len(m):
            row[e], row[e + 1], m[e + 1] = row[e] - s, s, 1
    v = [
        [x if m else 0.0 for x, m in zip(row, mask, strict=True)] for row, mask in zip(batch.values, kept, strict=True)
    ]
    a = [gae_every_token(x, y, gamma, lam) for x, y in zip(r, v, strict=True)]
    return whiten(a, batch.masks, part=lambda i, j: i % processes), plus(a, v)


def trl_grpo(batch: Batch) -> tuple[Rows, Rows]:
    a = spread(by_group(batch, standardised(1e-4)), batch.masks)
    return a, a


def trl_dr_grpo(batch: Batch) -> tuple[Rows, Rows]:
    a = spread(by_group(batch, centred), batch.masks)
    return a, a


def trl_rloo(batch: Batch, *, kl_coef: float = 0.0, kl_in_scalar: bool = False) -> tuple[Rows, Rows]:
    """With the switch, kl_coef times the summed KL is taken from the scalar reward first, as in TRL."""
    scored = kl_summed(batch, kl_rows(batch), kl_coef) if kl_in_scalar else batch
    a = spread(by_group(scored, leave_one_out), batch.masks)
    return a, a
