"""The oracle: every formula of this library as a serial loop over whole responses, in Python floats (float64).

A sample is a list of numbers, one a token, and a mask of the same length; nothing here knows of ranks or tensors, and
nothing is imported from the rest of the package. It is written to be compared with the page, and is slow on purpose.
"""

import math
from collections.abc import Sequence

Floats = Sequence[float]


def clock_of(mask: Floats, clock: str) -> tuple[list[bool], list[int]]:
    """(step, tick) of every token: is it a step of the process, and does the discount apply between it and the next?

    token: every token is a step, tick 1. trainable: the valid tokens, tick 1. turn: the valid tokens, tick 1 on the
    last token of a run of valid tokens, else 0.
    """
    step, tick = [], []
    for j in range(len(mask)):
        valid = mask[j] == 1
        ends_run = j + 1 == len(mask) or mask[j + 1] != 1
        if clock == "token":
            step.append(True)
            tick.append(1)
        elif clock == "trainable":
            step.append(valid)
            tick.append(1)
        elif clock == "turn":
            step.append(valid)
            tick.append(1 if ends_run else 0)
        else:
            raise ValueError(f"clock is {clock!r}; expected 'token', 'trainable' or 'turn'")
    return step, tick


def token_rewards_of(
    kl: Floats, reward: float, mask: Floats, *, kl_coef: float, token_rewards: Floats | None = None
) -> list[float]:
    """r_j = -kl_coef * k_j + token_reward_j at valid tokens, the scalar reward added at the last one; 0 elsewhere."""
    r = [0.0] * len(mask)
    last_valid = None
    for j in range(len(mask)):
        if mask[j] == 1:
            r[j] = -kl_coef * kl[j] if kl_coef != 0 else 0.0
            if token_rewards is not None:
                r[j] += token_rewards[j]
            last_valid = j
    if last_valid is not None:
        r[last_valid] += reward
    return r


def is_empty(reward: float, mask: Floats, sample_mask: float = 1) -> bool:
    """Does this sample count as fully masked: no valid token, sample_mask 0 or a missing (NaN) reward?"""
    return sample_mask != 1 or math.isnan(reward) or not any(m == 1 for m in mask)


def discounted(x: Floats, decay: float, step: Sequence[bool], tick: Sequence[int]) -> list[float]:
    """y_j = x_j + decay^tick_j * y_next over the steps of a clock; 0 at tokens that are no step."""
    y = [0.0] * len(x)
    y_next = 0.0
    for j in reversed(range(len(x))):
        if step[j]:
            y_next = x[j] + decay ** tick[j] * y_next
            y[j] = y_next
    return y


def reinforce_plus_plus(
    kl: Floats,
    reward: float,
    mask: Floats,
    *,
    gamma: float,
    kl_coef: float,
    clock: str = "token",
    token_rewards: Floats | None = None,
    sample_mask: float = 1,
) -> list[float]:
    """G_j = r_j + gamma^tick_j * G_next at valid tokens of one sample (REINFORCE++)."""
    if is_empty(reward, mask, sample_mask):
        return [0.0] * len(mask)
    r = token_rewards_of(kl, reward, mask, kl_coef=kl_coef, token_rewards=token_rewards)
    g = discounted(r, gamma, *clock_of(mask, clock))
    return [g[j] if mask[j] == 1 else 0.0 for j in range(len(mask))]


def gae(
    kl: Floats,
    reward: float,
    values: Floats,
    mask: Floats,
    *,
    gamma: float,
    lam: float,
    kl_coef: float = 0.0,
    clock: str = "trainable",
    lam_value: float | None = None,
    bootstrap: float = 0.0,
    token_rewards: Floats | None = None,
    masked_values: str = "zero",
    sample_mask: float = 1,
) -> tuple[list[float], list[float]]:
    """(A, returns) of one sample (GAE).

    delta_j = r_j + gamma^tick_j * V_next - V_j;  A_j = delta_j + (gamma*lam)^tick_j * A_next

    V_next after the last step is `bootstrap`. returns = A + V, where A is taken with `lam_value` if that is given.
    """
    if is_empty(reward, mask, sample_mask):
        return [0.0] * len(mask), [0.0] * len(mask)
    r = token_rewards_of(kl, reward, mask, kl_coef=kl_coef, token_rewards=token_rewards)
    step, tick = clock_of(mask, clock)
    v = [values[j] if mask[j] == 1 or masked_values == "use" else 0.0 for j in range(len(mask))]
    delta = [0.0] * len(mask)
    v_next = bootstrap
    for j in reversed(range(len(mask))):
        if step[j]:
            delta[j] = r[j] + gamma ** tick[j] * v_next - v[j]
            v_next = v[j]
    advantages = discounted(delta, gamma * lam, step, tick)
    for_returns = advantages if lam_value is None else discounted(delta, gamma * lam_value, step, tick)
    return (
        [advantages[j] if mask[j] == 1 else 0.0 for j in range(len(mask))],
        [for_returns[j] + v[j] if mask[j] == 1 else 0.0 for j in range(len(mask))],
    )


def adaptive_lam(mask: Floats, lam_alpha: float) -> float:
    """1 - 1 / (lam_alpha * valid length), clipped to [0, 1]: VAPO's length-adaptive lambda."""
    valid = sum(1 for m in mask if m == 1)
    if lam_alpha * valid == 0:
        return 0.0
    return min(max(1 - 1 / (lam_alpha * valid), 0.0), 1.0)


def remax(
    kl: Floats,
    reward: float,
    baseline: float,
    mask: Floats,
    *,
    kl_coef: float,
    token_rewards: Floats | None = None,
    sample_mask: float = 1,
) -> list[float]:
    """Sum over s >= j of r_s, minus the baseline reward of the sample, at valid tokens (ReMax)."""
    if is_empty(reward, mask, sample_mask):
        return [0.0] * len(mask)
    r = token_rewards_of(kl, reward, mask, kl_coef=kl_coef, token_rewards=token_rewards)
    out, to_go = [0.0] * len(mask), 0.0
    for j in reversed(range(len(mask))):
        to_go += r[j]
        out[j] = to_go - baseline if mask[j] == 1 else 0.0
    return out


def group_advantage(
    rewards: Floats,
    group_ids: Sequence[int],
    *,
    center: str = "mean",
    scale: str = "none",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
    sample_mask: Floats | None = None,
    lengths: Sequence[int] | None = None,
) -> list[float]:
    """One advantage a sample: (x - center) / (scale + eps) among the counted members of its group; 0 for the others."""

    def counted(i: int) -> bool:
        masked = sample_mask is not None and sample_mask[i] != 1
        return not masked and not math.isnan(rewards[i]) and (lengths is None or lengths[i] > 0)

    out = []
    for i in range(len(rewards)):
        group = [j for j in range(len(rewards)) if group_ids[j] == group_ids[i] and counted(j)]
        others = [rewards[j] for j in group if j != i]
        x = [rewards[j] for j in group]
        if not counted(i):
            out.append(0.0)
        elif not others:
            out.append(rewards[i] if singleton == "raw" else 0.0)
        elif max(x) == min(x):
            out.append(0.0)
        else:
            if center == "mean":
                a = rewards[i] - math.fsum(x) / len(x)
            elif center == "loo":
                a = rewards[i] - math.fsum(others) / len(others)
            elif center == "opo":
                assert lengths is not None, "opo needs lengths"
                weighted = math.fsum(lengths[j] * rewards[j] for j in group)
                a = rewards[i] - weighted / math.fsum(lengths[j] for j in group)
            else:
                raise ValueError(f"center is {center!r}; expected 'mean', 'loo' or 'opo'")
            if scale == "std":
                a /= std(x, ddof) + eps
            elif scale == "loo_std":
                if std(others, ddof) > 0:
                    a /= std(others, ddof) + eps
            elif scale != "none":
                raise ValueError(f"scale is {scale!r}; expected 'none', 'std' or 'loo_std'")
            out.append(a)
    return out


def std(x: Floats, ddof: int) -> float:
    """sqrt(sum (x - mean)^2 / (n - ddof)); 0 where all are equal or n <= ddof."""
    if len(x) <= ddof or max(x) == min(x):
        return 0.0
    mean = math.fsum(x) / len(x)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in x) / (len(x) - ddof))


def reinforce_plus_plus_baseline(
    kl: Sequence[Floats],
    rewards: Floats,
    group_ids: Sequence[int],
    masks: Sequence[Floats],
    *,
    kl_coef: float,
    sample_mask: Floats | None = None,
) -> list[list[float]]:
    """(x - group mean) - kl_coef * k_j at the valid tokens of each sample, no discounting; not yet whitened."""
    given = [1] * len(kl) if sample_mask is None else sample_mask
    alive = [0 if is_empty(rewards[i], masks[i], given[i]) else 1 for i in range(len(kl))]
    scalar = group_advantage(rewards, group_ids, sample_mask=alive)
    return [
        [
            scalar[i] - (kl_coef * kl[i][j] if kl_coef != 0 else 0.0) if alive[i] and masks[i][j] == 1 else 0.0
            for j in range(len(masks[i]))
        ]
        for i in range(len(kl))
    ]


def approx_kl(
    log_probs: Floats, ref_log_probs: Floats, mask: Floats, *, kind: str = "k1", clamp: float | None = None
) -> list[float]:
    """With d = logp - ref at valid tokens: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (exponent within +-20)."""
    out = []
    for j in range(len(mask)):
        d = log_probs[j] - ref_log_probs[j] if mask[j] == 1 else 0.0
        if kind == "k1":
            k = d
        elif kind == "k2":
            k = d * d / 2
        elif kind == "k3":
            k = math.expm1(min(max(-d, -20.0), 20.0)) + d
        else:
            raise ValueError(f"kind is {kind!r}; expected 'k1', 'k2' or 'k3'")
        out.append(k if clamp is None else min(max(k, -clamp), clamp))
    return out


def whiten(
    x: Floats,
    mask: Floats,
    *,
    ddof: int = 1,
    eps: float = 1e-8,
    eps_mode: str = "add",
    center: bool = True,
    shift_mean: bool = True,
    scale: bool = True,
    weights: Floats | None = None,
) -> list[float]:
    """(x - mean) / sqrt(var + eps) over the valid tokens given, which are those of all ranks; 0 at the others.

    eps_mode "clamp": sqrt(max(var, eps)). center=False: the mean is not subtracted. shift_mean=False: it is added back
    after scaling. scale=False: no division. weights (ddof 0 only): mean = sum w x / sum w,
    var = sum w (x - mean)^2 / sum w.
    """
    valid = [j for j in range(len(x)) if mask[j] == 1]
    out = [0.0] * len(x)
    w = [1.0 if weights is None else weights[j] for j in range(len(x))]
    total = math.fsum(w[j] for j in valid)
    if total == 0:
        return out
    values = [x[j] for j in valid]
    mean = math.fsum(w[j] * x[j] for j in valid) / total
    if max(values) == min(values):
        mean = values[0]  # the mean of equal numbers is that number, whatever the rounding of their sum
    m2 = math.fsum(w[j] * (x[j] - mean) ** 2 for j in valid)
    var = m2 / (total - ddof) if total > ddof else 0.0
    root = math.sqrt(max(var, eps) if eps_mode == "clamp" else var + eps)
    for j in valid:
        out[j] = x[j] - mean if center else x[j]
        if scale:
            out[j] /= root
        if center and not shift_mean:
            out[j] += mean
    return out


def owners(
    kind: str,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    cp_size: int,
    *,
    multiple: int = 1,
    padded_lengths: Sequence[int] | None = None,
    stream_length: int = 0,
) -> list[list[int]]:
    """owners[i][j]: the rank that holds position prompt - 1 + j of sample i, whose logit predicts response token j.

    kind is "zigzag", "contiguous" or "contiguous_pack" (samples one after the other in a stream of `stream_length`).
    Found by walking over the positions of the padded sample, or of the stream.
    """
    owned = []
    begin = 0
    for i in range(len(total_lengths)):
        total, response = total_lengths[i], response_lengths[i]
        width = total
        if padded_lengths is not None:
            width = padded_lengths[i]
        elif kind != "contiguous_pack":
            while width % (2 * cp_size * multiple if kind == "zigzag" else cp_size * multiple) != 0:
                width += 1
        holder = []
        for position in range(width):
            if kind == "zigzag":
                piece = position // (width // (2 * cp_size))
                holder.append(piece if piece < cp_size else 2 * cp_size - 1 - piece)
            elif kind == "contiguous":
                holder.append(position // (width // cp_size))
            elif kind == "contiguous_pack":
                holder.append((begin + position) // (stream_length // cp_size))
            else:
                raise ValueError(f"kind is {kind!r}; expected 'zigzag', 'contiguous' or 'contiguous_pack'")
        begin += width
        owned.append([holder[total - response - 1 + j] for j in range(response)])
    return owned
