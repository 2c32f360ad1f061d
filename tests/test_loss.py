"""Losses of a rank's shard against the same formula over the whole batch, token by token in plain Python."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from cp_returns.collectives import alone
from cp_returns.context import CPContext
from cp_returns.errors import CPInputError
from cp_returns.layout import contiguous, zigzag
from cp_returns.loss import (
    combine,
    count_sequences,
    count_tokens,
    cp_masked_mean,
    cp_masked_sum,
    gspo_loss,
    kl_loss,
    megatron_loss,
    policy_loss,
    sequence_mean,
    token_mean,
    value_loss,
)
from cp_returns.simulate import in_threads

# One response of one token, one prompt-heavy (ranks without a token), gaps, a masked tail, none valid, none at all.
TOTAL = [10, 13, 5, 33, 4, 6, 9]
MASKS = [[1, 1, 0, 0, 1, 1, 1, 0, 1], [1, 1, 1], [1, 0], [0, 1, 1, 1], [1], [], [0] * 8]
RESPONSE = [len(m) for m in MASKS]
FULL_MASK = torch.tensor([v for m in MASKS for v in m])


def packed(seed, scale=1.0):
    """float64 [full] with NaN wherever the mask is 0."""
    x = scale * torch.randn(sum(RESPONSE), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.where(FULL_MASK.bool(), x, math.nan)


OLD, REF, A, VALUES, RETURNS = packed(1) - 2, packed(2) - 2, packed(3), packed(4), packed(5)
LOG_PROBS = OLD + packed(6, 0.5)  # ratios from about 0.4 to 2.5: every clip acts


# ---- the same losses, whole batch, one token after the other


def clipped(ratio, a, low, high, c):
    held = min(max(ratio, 1 - low), 1 + high)
    loss = max(-ratio * a, -held * a)
    return min(loss, -c * a) if c is not None and a < 0 else loss


def serial(per_token, x, *, per):
    """(loss, its gradient) of mean(per_token(token index, sample index, x)) with x [full] as a leaf."""
    x = x.clone().requires_grad_()
    samples, start = [], 0
    for i, mask in enumerate(MASKS):
        samples.append([per_token(start + j, i, x) for j, m in enumerate(mask) if m])
        start += len(mask)
    if per == "token":
        terms = [t for sample in samples for t in sample]
        loss = sum(terms) / len(terms)
    else:
        means = [sum(sample) / len(sample) for sample in samples if sample]
        loss = sum(means) / len(means)
    loss.backward()
    return loss.detach(), x.grad


def serial_policy(low, high, c, per):
    return serial(lambda t, i, x: clipped((x[t] - OLD[t]).exp(), A[t], low, high, c), LOG_PROBS, per=per)


def serial_gspo(low, high, c, per):
    starts = np.cumsum([0, *RESPONSE])

    def per_token(t, i, x):
        valid = [starts[i] + j for j, m in enumerate(MASKS[i]) if m]
        ratio = torch.stack([x[s] - OLD[s] for s in valid]).mean().exp()
        return clipped(ratio, A[t], low, high, c)

    return serial(per_token, LOG_PROBS, per=per)


def serial_value(clip, per):
    def per_token(t, i, x):
        plain = (x[t] - RETURNS[t]) ** 2
        if clip is None:
            return plain / 2
        held = OLD[t] + min(max(x[t] - OLD[t], -clip), clip)
        return max(plain, (held - RETURNS[t]) ** 2) / 2

    return serial(per_token, VALUES, per=per)


def serial_kl(kind, per):
    formulas = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: (-d).exp() - 1 + d}
    return serial(lambda t, i, x: formulas[kind](x[t] - REF[t]), LOG_PROBS, per=per)


# ---- every rank's share, added


def spread_over_ranks(loss, leaf, others, *, w, layout=zigzag):
    """(loss, its gradient) of the shares of w ranks in threads, each with its own leaf."""
    cut = layout(TOTAL, RESPONSE, w)

    def rank_share(rank, all_gather):
        cp = CPContext(cut, rank, all_gather)
        mine = cp.take(leaf).clone().requires_grad_()
        share = loss(mine, *(cp.take(x) for x in others), FULL_MASK, cp=cp)
        assert not mine.numel() or share.total.requires_grad
        share.total.backward()
        return share.total.detach(), share.count, share.whole, mine.grad

    shares = in_threads(rank_share, w)
    count = sum(s[1] for s in shares)
    assert all(s[2] == count for s in shares)
    gradient = torch.full_like(leaf, math.nan)
    for rank, share in enumerate(shares):
        gradient[torch.from_numpy(cut.index(rank))] = share[3]
    return sum(s[0] for s in shares) / count, gradient / count


REDUCTIONS = {"token": token_mean, "sequence": sequence_mean}
CLIPS = [(0.2, 0.2, None), (0.2, 0.28, None), (0.2, 0.28, 1.5)]
CASES = {
    **{
        f"policy {low} {high} {c}": (
            partial(policy_loss, eps_clip=low, eps_clip_high=high, eps_clip_c=c),
            LOG_PROBS,
            (OLD, A),
            partial(serial_policy, low, high, c),
        )
        for low, high, c in CLIPS
    },
    **{
        f"gspo {low} {high} {c}": (
            partial(gspo_loss, eps_clip=low, eps_clip_high=high, eps_clip_c=c),
            LOG_PROBS,
            (OLD, A),
            partial(serial_gspo, low, high, c),
        )
        for low, high, c in [(0.2, 0.2, None), (0.05, 0.08, 1.1)]
    },
    **{
        f"value {clip}": (partial(value_loss, eps_clip=clip), VALUES, (OLD, RETURNS), partial(serial_value, clip))
        for clip in (None, 0.3)
    },
    **{k: (partial(kl_loss, kind=k), LOG_PROBS, (REF,), partial(serial_kl, k)) for k in ("k1", "k2", "k3")},
}


@pytest.mark.parametrize("per", REDUCTIONS)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_whole_batch(case, per):
    loss, leaf, others, expected = CASES[case]
    loss = partial(loss, reduce=REDUCTIONS[per])
    value, gradient = expected(per)
    gradient = torch.where(FULL_MASK.bool(), gradient, 0)
    for w, layout in [(1, zigzag), (2, zigzag), (3, contiguous), (4, zigzag)]:
        got_value, got_gradient = spread_over_ranks(loss, leaf, others, w=w, layout=layout)
        torch.testing.assert_close(got_value, value, rtol=0, atol=1e-12)
        torch.testing.assert_close(got_gradient, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("w", [1, 2, 4])
def test_sums_and_means_of_whole_responses(w):
    """Each rank uses the sum with a weight of its own: the gradient is that of all ranks' losses added."""
    cut = zigzag(TOTAL, RESPONSE, w)
    sums = [
        sum(float(v) for v, m in zip(x, mask, strict=True) if m)
        for x, mask in zip(A.split(RESPONSE), MASKS, strict=True)
    ]
    valid = [sum(mask) for mask in MASKS]

    def rank_share(rank, all_gather):
        cp = CPContext(cut, rank, all_gather)
        mine = cp.take(A).clone().requires_grad_()
        total = cp_masked_sum(mine, FULL_MASK, cp=cp)
        mean = cp_masked_mean(mine, FULL_MASK, cp=cp)
        ((rank + 1) * total.sum() + mean.square().sum() / w).backward()
        return total.detach(), mean.detach(), mine.grad

    shares = in_threads(rank_share, w)
    weight = w * (w + 1) / 2
    for rank, (total, mean, gradient) in enumerate(shares):
        assert total.tolist() == pytest.approx(sums, abs=1e-12)
        means = [s / max(n, 1) for s, n in zip(sums, valid, strict=True)]
        assert mean.tolist() == pytest.approx(means, abs=1e-12)
        per_sample = [weight + 2 * m / max(n, 1) for m, n in zip(means, valid, strict=True)]
        cp = CPContext(cut, rank)
        expected = cp.take(torch.tensor(per_sample, dtype=torch.float64).repeat_interleave(torch.tensor(RESPONSE)))
        torch.testing.assert_close(gradient, torch.where(cp.take(FULL_MASK).bool(), expected, 0), rtol=0, atol=1e-12)


def test_gradients_against_finite_differences():
    cp = CPContext(zigzag([6, 4], [4, 2], 1))
    mask = torch.tensor([1, 0, 1, 1, 1, 1])
    old, a, x = (torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (1, 2, 3))
    leaf = x.requires_grad_()
    for loss in (
        lambda x: policy_loss(x, old, a, mask, cp=cp, eps_clip_high=0.3, eps_clip_c=2.0).total,
        lambda x: gspo_loss(x, old, a, mask, cp=cp, eps_clip=0.1, eps_clip_high=0.3).total,
        lambda x: value_loss(x, old, a, mask, cp=cp, eps_clip=0.2).total,
        lambda x: kl_loss(x, old, mask, cp=cp).total,
        lambda x: cp_masked_mean(x, mask, cp=cp),
    ):
        assert torch.autograd.gradcheck(loss, leaf)


# ---- by hand, through the outermost call: what Megatron gets


def one_token(loss, x, *others, mask=(1,), **settings):
    """(the number that Megatron gets for one token, its gradient)."""
    cp = CPContext(zigzag([2], [1], 1))
    leaf = torch.tensor([x], dtype=torch.float64, requires_grad=True)
    share = loss(leaf, *(torch.tensor([o], dtype=torch.float64) for o in others), torch.tensor(mask), cp=cp, **settings)
    total, count, _ = megatron_loss(share, counts_over_cp=True)
    assert count.dtype == torch.int32
    total.backward()
    return pytest.approx(total.item(), abs=1e-12), pytest.approx(leaf.grad.item(), abs=1e-12)


@pytest.mark.parametrize("loss", [policy_loss, gspo_loss])
@pytest.mark.parametrize(
    ("ratio", "a", "clips", "value", "slope"),
    [
        (1.5, 1.0, {"eps_clip": 0.2, "eps_clip_high": None}, -1.2, 0.0),
        (1.5, 1.0, {"eps_clip": 0.6, "eps_clip_high": None}, -1.5, -1.5),
        (1.5, 1.0, {"eps_clip": 0.2, "eps_clip_high": 0.28}, -1.28, 0.0),
        (1.5, -1.0, {"eps_clip": 0.2, "eps_clip_high": 0.28}, 1.5, 1.5),
        (0.5, -1.0, {"eps_clip": 0.2, "eps_clip_high": 0.28}, 0.8, 0.0),
        (0.5, -1.0, {"eps_clip": 0.4, "eps_clip_high": 0.28}, 0.6, 0.0),
        (0.5, 1.0, {"eps_clip": 0.2, "eps_clip_high": 0.28}, -0.5, -0.5),
        (5.0, -1.0, {"eps_clip": 0.2}, 5.0, 5.0),
        (5.0, -1.0, {"eps_clip": 0.2, "eps_clip_c": 3.0}, 3.0, 0.0),
        (5.0, -1.0, {"eps_clip": 0.2, "eps_clip_c": 6.0}, 5.0, 5.0),
        (2.0, -1.5, {"eps_clip": 0.2, "eps_clip_c": 1.5}, 2.25, 0.0),
        (5.0, 1.0, {"eps_clip": 0.2, "eps_clip_high": None, "eps_clip_c": 3.0}, -1.2, 0.0),
    ],
)
def test_every_clip_takes_effect(loss, ratio, a, clips, value, slope):
    assert one_token(loss, math.log(ratio) - 2, -2.0, a, **clips) == (value, slope)


def test_value_and_kl_clips_take_effect():
    assert one_token(value_loss, 2.0, 1.0, 0.0) == (2.0, 2.0)
    assert one_token(value_loss, 2.0, 1.0, 3.0, eps_clip=0.5) == (1.125, 0.0)  # held at 1.5
    assert one_token(value_loss, 2.0, 1.0, 3.0, eps_clip=2.0) == (0.5, -1.0)
    assert one_token(kl_loss, 3.0, 1.0, kind="k1") == (2.0, 1.0)
    assert one_token(kl_loss, 3.0, 1.0, kind="k2") == (2.0, 2.0)
    assert one_token(kl_loss, 3.0, 1.0, kind="k3") == (math.exp(-2) + 1, 1 - math.exp(-2))
    assert one_token(kl_loss, 3.0, 1.0, kind="k2", clamp=1.5) == (1.5, 0.0)
    assert one_token(kl_loss, 1.0, 1.0 + 1e-9, kind="k3")[0] == 0.0


@pytest.mark.parametrize("loss", [policy_loss, gspo_loss])
def test_an_infinite_log_ratio_times_zero_is_zero(loss):
    assert one_token(loss, -1.0, -math.inf, 0.0) == (0.0, 0.0)
    assert one_token(loss, -1.0, -2000.0, 0.0) == (0.0, 0.0)
    assert one_token(loss, -1.0, -2000.0, -1.0) == (math.exp(20), 0.0)
    assert one_token(kl_loss, -2000.0, -1.0, kind="k3") == (math.expm1(20) - 1999, 1.0)


@pytest.mark.parametrize("trap", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("mask", [[0], [False], [0.0]])
def test_masked_slots_may_hold_anything(trap, mask):
    for loss, n in ((policy_loss, 2), (gspo_loss, 2), (value_loss, 2), (kl_loss, 1)):
        assert one_token(loss, trap, *[trap] * n, mask=mask) == (0.0, 0.0)


def test_only_the_first_argument_is_differentiated():
    cp = CPContext(zigzag([3], [2], 1))
    leaves = [torch.randn(2, requires_grad=True) for _ in range(3)]
    for loss, n in ((policy_loss, 3), (gspo_loss, 3), (value_loss, 3), (kl_loss, 2)):
        for leaf in leaves:
            leaf.grad = None
        loss(*leaves[:n], torch.ones(2), cp=cp).total.backward()
        assert leaves[0].grad is not None
        assert all(leaf.grad is None for leaf in leaves[1:])


# ---- what Megatron makes of the shares


def test_one_valid_token_gives_the_same_gradient_for_every_cp_size():
    """The local count would halve it at CP 2 and make it 0 / 0 on the other rank."""
    mask = torch.tensor([0, 0, 1, 0, 0])
    for w in (1, 2, 4):
        cut = zigzag([8], [5], w)

        def rank_share(rank, all_gather, cut=cut):
            cp = CPContext(cut, rank, all_gather)
            leaf = torch.zeros(int(cut.lengths(rank)[0]), requires_grad=True)
            share = policy_loss(leaf, torch.zeros_like(leaf), torch.ones_like(leaf), mask, cp=cp)
            total, count, _ = megatron_loss(share, counts_over_cp=True)
            total.backward()
            return leaf.grad, count

        shares = in_threads(rank_share, w)
        assert sum(int(n) for _, n in shares) == 1
        assert sum(float(g.sum()) for g, _ in shares) == -1.0


def test_megatron_forms():
    cp = CPContext(zigzag(TOTAL, RESPONSE, 2), 1, alone)
    share = policy_loss(cp.take(LOG_PROBS), cp.take(OLD), cp.take(A), FULL_MASK, cp=cp)
    total, count, report = megatron_loss(share, counts_over_cp=True)
    assert (total, int(count)) == (share.total, int(cp.take(FULL_MASK).sum()))
    assert int(megatron_loss(share, counts_over_cp=False)[1]) == int(FULL_MASK.sum())  # Megatron-core 0.12
    scaled, same_report = megatron_loss(
        share, calculate_per_token_loss=False, num_microbatches=4, data_parallel_size=3, whole_batch=60
    )
    assert scaled.item() == pytest.approx(total.item() * 4 * 3 / 60, rel=1e-12)
    assert same_report is report
    with pytest.raises(CPInputError, match="expected whole_batch"):
        megatron_loss(share, calculate_per_token_loss=False)


def test_counts_of_the_whole_batch_go_over_dp_only():
    masks = [torch.tensor(m) for m in MASKS]
    assert (count_tokens(masks), count_sequences(masks)) == (14, 5)
    assert count_tokens([]) == 0
    counts = in_threads(
        lambda rank, g: (count_tokens(masks[rank::2], all_gather=g), count_sequences(masks[rank::2], all_gather=g)), 2
    )
    assert counts == [(14, 5), (14, 5)]


def test_combine_adds_terms_of_one_fraction():
    cp = CPContext(zigzag(TOTAL, RESPONSE, 1))
    policy = policy_loss(LOG_PROBS, OLD, A, FULL_MASK, cp=cp)
    value = value_loss(VALUES, OLD, RETURNS, FULL_MASK, cp=cp)
    both = combine((1.0, policy), (0.5, value))
    assert both.total.item() == pytest.approx(policy.total.item() + 0.5 * value.total.item(), abs=1e-12)
    assert int(both.count) == int(policy.count)
    assert set(both.report) == {"policy_loss", "clip_fraction", "old_kl", "value_loss", "value_clip_fraction"}
    assert both.report["value_loss"].tolist() == [value.total.item(), 14.0]
    with pytest.raises(CPInputError, match="one reduction for all"):
        combine((1.0, policy), (0.5, value_loss(VALUES, OLD, RETURNS, FULL_MASK, cp=cp, reduce=sequence_mean)))


def test_reports_add_over_ranks_and_micro_batches():
    cp = CPContext(zigzag([5], [4], 1))
    ratios, mask = torch.tensor([1.5, 1.1, 0.5, 9.0]).log(), torch.tensor([1, 1, 1, 0])
    share = policy_loss(ratios, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, 1.0]), mask, cp=cp, eps_clip=0.2)
    assert share.report["clip_fraction"].tolist() == [2.0, 3.0]
    k3 = sum(r - 1 - math.log(r) for r in (1.5, 1.1, 0.5))
    assert share.report["old_kl"].tolist() == pytest.approx([k3, 3.0], abs=1e-6)
    assert share.report["policy_loss"].tolist() == pytest.approx([-1.2 - 1.1 + 0.8, 3.0], abs=1e-6)


def test_bad_settings_and_shapes_are_named():
    cp = CPContext(zigzag([3], [2], 1))
    x, mask = torch.zeros(2), torch.ones(2)
    for settings, text in (
        ({"eps_clip": -0.1}, "eps_clip is -0.1"),
        ({"eps_clip": 1.5}, "eps_clip is 1.5"),
        ({"eps_clip_high": -1.0}, "eps_clip_high -1.0"),
        ({"eps_clip_c": 1.0}, "eps_clip_c is 1.0; expected above 1"),
        ({"eps_clip_c": math.nan}, "eps_clip_c is nan"),
    ):
        for loss in (policy_loss, gspo_loss):
            with pytest.raises(CPInputError, match=text):
                loss(x, x, x, mask, cp=cp, **settings)
    with pytest.raises(CPInputError, match="eps_clip is -1"):
        value_loss(x, x, x, mask, cp=cp, eps_clip=-1)
    with pytest.raises(CPInputError, match="kind is 'k4'"):
        kl_loss(x, x, mask, cp=cp, kind="k4")
    with pytest.raises(CPInputError, match=r"advantages has shape \[1\]; expected \[2\]"):
        policy_loss(x, x, torch.zeros(1), mask, cp=cp)  # would broadcast
    with pytest.raises(CPInputError, match=r"old_values has shape \[2, 1\]"):
        value_loss(x, x[:, None], x, mask, cp=cp)
