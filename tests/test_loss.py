"""Losses of a rank's shard against the same formula over the whole batch, token by token in plain Python."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from cp_returns.collectives import Counted, alone
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


# ---- numbers


def of_every_dtype(loss, inputs, mask, dtype, **settings):
    """(loss, gradient) of one response on one rank, for inputs of a dtype."""
    cp = CPContext(zigzag([len(mask) + 1], [len(mask)], 1))
    leaf, *others = (x.to(dtype) for x in inputs)
    leaf = leaf.clone().requires_grad_()
    out = loss(leaf, *others, mask, cp=cp, **settings)
    out.total.backward()
    return out, leaf.grad


@pytest.mark.parametrize("per", REDUCTIONS)
@pytest.mark.parametrize("loss", [policy_loss, gspo_loss, value_loss, kl_loss])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype, loss, per):
    """Bit for bit what the same numbers give in float32; the gradient is rounded once more."""
    n, generator = 5001, torch.Generator().manual_seed(0)
    x = -torch.rand(n, generator=generator)
    inputs = [x, x + 0.05 * torch.randn(n, generator=generator), torch.randn(n, generator=generator)]
    inputs = [y.to(dtype) for y in inputs[: 2 if loss is kl_loss else 3]]
    mask = torch.arange(n) % 5 > 0
    half, gradient = of_every_dtype(loss, inputs, mask, dtype, reduce=REDUCTIONS[per])
    single, expected = of_every_dtype(loss, inputs, mask, torch.float32, reduce=REDUCTIONS[per])
    assert half.total.dtype == torch.float32
    assert torch.equal(half.total, single.total)
    assert gradient.dtype == dtype
    assert torch.equal(gradient, expected.to(dtype))
    for name, pair in single.report.items():
        assert torch.equal(half.report[name], pair)
        assert pair[1] == (4000 if per == "token" else 1)
    double, _ = of_every_dtype(loss, inputs, mask, torch.float64)
    assert double.total.dtype == torch.float64


def test_what_half_precision_cannot_hold():
    n = 100_000
    cp, one = CPContext(zigzag([n + 1], [n], 1)), torch.ones(n, dtype=torch.float16)
    mask = one.bool()
    assert token_mean(one, mask, cp=cp).report["loss"].tolist() == [n, n]
    assert sequence_mean(one, mask, cp=cp).total.item() == pytest.approx(1, abs=1e-6)
    for dtype in (torch.float16, torch.bfloat16, torch.int8):
        assert cp_masked_sum(one.to(dtype), mask, cp=cp).tolist() == [n]
        assert cp_masked_mean(one.to(dtype), mask, cp=cp).tolist() == [1]
        assert cp_masked_sum(one.to(dtype), mask, cp=cp).dtype == torch.float32
    low, high = torch.tensor([-16.0]).half(), torch.tensor([-1.0]).half()
    one_token_cp = CPContext(zigzag([2], [1], 1))
    k3 = kl_loss(low, high, torch.ones(1), cp=one_token_cp).total
    assert k3.item() == pytest.approx(math.expm1(15) - 15, rel=1e-6)
    assert policy_loss(high, low, 0 * high, torch.ones(1), cp=one_token_cp).total == 0  # ratio e^15


@pytest.mark.parametrize(
    ("dtype", "n", "tolerance"), [(torch.float32, 2**17, 2.0**-23), (torch.bfloat16, 20_000, 2.0**-8)]
)
def test_the_gradient_of_gspo_does_not_depend_on_length_or_cp_size(dtype, n, tolerance):
    """Every token's gradient is the sum of one number a token of its response."""
    for w in (1, 2, 8):
        cut = zigzag([n + 1], [n], w)

        def gradient(rank, all_gather, cut=cut):
            x = torch.full((cut.sizes[rank],), -1.0, dtype=dtype, requires_grad=True)
            mask = torch.ones(n, dtype=torch.bool)
            a = torch.full((cut.sizes[rank],), 0.7)
            gspo_loss(x, x.detach(), a, mask, cp=CPContext(cut, rank, all_gather)).total.backward()
            return x.grad.double() * n

        for mine in in_threads(gradient, w):
            assert (mine / -0.7 - 1).abs().max() < 2 * tolerance  # 0.7 and the gradient are rounded


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


@pytest.mark.parametrize(("version", "over_cp"), [("0.12.3", False), ("0.13.0", True), ("1.0.0", True)])
def test_the_count_is_the_one_that_the_installed_megatron_adds_up(monkeypatch, version, over_cp):
    pytest.importorskip("megatron.core", reason="NOT RUN: megatron-core is not installed")
    monkeypatch.setattr("megatron.core.__version__", version)
    cp = CPContext(zigzag(TOTAL, RESPONSE, 2), 1, alone)
    share = policy_loss(cp.take(LOG_PROBS), cp.take(OLD), cp.take(A), FULL_MASK, cp=cp)
    local, whole = int(cp.take(FULL_MASK).sum()), int(FULL_MASK.sum())
    assert local != whole
    assert int(megatron_loss(share)[1]) == (local if over_cp else whole)


def test_counts_of_the_whole_batch_go_over_dp_only():
    masks = [torch.tensor(m) for m in MASKS]
    assert (count_tokens(masks), count_sequences(masks)) == (14, 5)
    assert count_tokens([]) == 0
    counts = in_threads(
        lambda rank, g: (count_tokens(masks[rank::2], all_gather=g), count_sequences(masks[rank::2], all_gather=g)), 2
    )
    assert counts == [(14, 5), (14, 5)]
    assert in_threads(lambda rank, g: count_tokens(masks[: 7 * rank], all_gather=g), 2) == [14, 14]  # one without


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


def test_combine_keeps_the_reports_of_terms_with_one_name():
    cp = CPContext(zigzag([4], [3], 1))
    x, mask = torch.zeros(3), torch.ones(3)
    one, two, three = (kl_loss(x, x - n, mask, cp=cp, kind="k1") for n in (1, 2, 3))
    report = combine((1.0, combine((1.0, one), (1.0, two))), (1.0, three)).report
    assert {name: pair.tolist() for name, pair in report.items()} == {
        "kl_loss": [3.0, 3.0],
        "kl_loss_2": [6.0, 3.0],
        "kl_loss_3": [9.0, 3.0],
    }
    assert len(combine((1.0, three), (1.0, combine((1.0, one), (1.0, two)))).report) == 3


def test_combine_refuses_what_has_no_one_denominator():
    cp = CPContext(zigzag([4], [3], 1))
    x = torch.zeros(3)
    terms = [(1.0, kl_loss(x, x, torch.tensor(mask), cp=cp)) for mask in ([1, 1, 1], [1, 0, 1])]
    with pytest.raises(CPInputError, match=r"means over \[3, 2\] tokens; expected one full_mask for all"):
        combine(*terms)
    with pytest.raises(CPInputError, match="combine was given nothing"):
        combine()


@pytest.mark.parametrize("zero", [0, 0.0, torch.tensor(0.0)])
def test_a_term_with_coefficient_0_adds_nothing_but_stays_connected(zero):
    cp, mask = CPContext(zigzag([4], [3], 1)), torch.ones(3)
    x, v = (torch.zeros(3, requires_grad=True) for _ in range(2))
    policy = policy_loss(x, x.detach(), torch.ones(3), mask, cp=cp)
    infinite = kl_loss(v, torch.full((3,), -math.inf), mask, cp=cp)
    assert infinite.total == math.inf
    both = combine((1.0, policy), (zero, infinite))
    assert both.total == policy.total
    both.total.backward()
    assert x.grad.tolist() == [-1.0] * 3
    assert v.grad.tolist() == [0.0] * 3


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
    for loss in (policy_loss, gspo_loss, value_loss):
        with pytest.raises(CPInputError, match=r"eps_clip is '0\.2'"):
            loss(x, x, x, mask, cp=cp, eps_clip="0.2")
    for clamp in (-1.0, 0.0, math.nan):
        with pytest.raises(CPInputError, match=r"clamp is .*; expected a positive number"):
            kl_loss(x, x, mask, cp=cp, clamp=clamp)
    share = kl_loss(x, x, mask, cp=cp)
    for wrong in ({"whole_batch": -3}, {"whole_batch": 2, "num_microbatches": 0}):
        with pytest.raises(CPInputError, match="expected at least 0, 1 and 1"):
            megatron_loss(share, calculate_per_token_loss=False, **wrong)
    with pytest.raises(CPInputError, match="kind is 'k4'"):
        kl_loss(x, x, mask, cp=cp, kind="k4")
    with pytest.raises(CPInputError, match=r"advantages has shape \[1\]; expected \[2\]"):
        policy_loss(x, x, torch.zeros(1), mask, cp=cp)  # would broadcast
    with pytest.raises(CPInputError, match=r"old_values has shape \[2, 1\]"):
        value_loss(x, x[:, None], x, mask, cp=cp)
    with pytest.raises(CPInputError, match=r"old_values is a list; expected a tensor \[2\]"):
        value_loss(x, [0.0, 0.0], x, mask, cp=cp)
    with pytest.raises(CPInputError, match="full_mask is on meta; expected cpu"):
        kl_loss(x, x, mask.to("meta"), cp=cp)


TAKES_A_MASK = {
    "token_mean": lambda x, mask, cp: token_mean(x, mask, cp=cp),
    "sequence_mean": lambda x, mask, cp: sequence_mean(x, mask, cp=cp),
    "cp_masked_sum": lambda x, mask, cp: cp_masked_sum(x, mask, cp=cp),
    "cp_masked_mean": lambda x, mask, cp: cp_masked_mean(x, mask, cp=cp),
    "policy_loss": lambda x, mask, cp: policy_loss(x, x, x, mask, cp=cp),
    "gspo_loss": lambda x, mask, cp: gspo_loss(x, x, x, mask, cp=cp),
    "value_loss": lambda x, mask, cp: value_loss(x, x, x, mask, cp=cp),
    "kl_loss": lambda x, mask, cp: kl_loss(x, x, mask, cp=cp),
}
BAD_MASKS = [
    ([1, 1, 0.5, 1, 0], "sample 2, token 0, full_mask is 0.5; expected 0 or 1"),
    ([1, 1, 1, 2, 0], "sample 2, token 1, full_mask is 2; expected 0 or 1"),
    ([1, math.nan, 1, 1, 0], "sample 0, token 1, full_mask is nan"),
    ([-1, 1, 1, 1, 0], "sample 0, token 0, full_mask is -1"),
    ([1, 1, 1, 1], r"full_mask has shape \[4\]; expected \[5\]"),
    ([1] * 9, r"full_mask has shape \[9\]; expected \[5\]"),
    ([[1], [1], [1], [1], [1]], r"full_mask has shape \[5, 1\]"),
]


@pytest.mark.parametrize("name", TAKES_A_MASK)
def test_a_mask_that_is_none_is_named(name):
    for w in (1, 2):
        cp = CPContext(zigzag([3, 2, 4], [2, 0, 3], w), 0, alone)
        x = torch.zeros(cp.layout.sizes[0])
        if w == 1 or not name.startswith(("cp_masked", "gspo")):  # these exchange: see the next test
            for mask, text in BAD_MASKS:
                with pytest.raises(CPInputError, match=("^" if w == 1 else "^CP rank 0 of 2: ") + text):
                    TAKES_A_MASK[name](x, torch.tensor(mask), cp)
            with pytest.raises(CPInputError, match="full_mask is a list; expected a tensor"):
                TAKES_A_MASK[name](x, [1] * 5, cp)


# ---- failure


def told(call):
    """The text of the error that a rank gets."""
    try:
        call()
    except CPInputError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("w", [2, 3])
def test_what_is_wrong_on_one_rank_is_raised_by_all(w):
    """A rank that raised alone would leave the others in the collective: in_threads notices that."""
    cut = zigzag([9, 6], [8, 5], w)
    mask = torch.ones(13)
    half, other = mask.clone(), mask.clone()
    half[9], other[3] = 0.5, 0
    bad_input = {
        "x is the wrong shape": (lambda x: (x[1:], mask, {}), "has shape"),
        "x is a list": (lambda x: (x.tolist(), mask, {}), "is a list; expected a tensor"),
        "short mask": (lambda x: (x, mask[1:], {}), r"full_mask has shape [12]; expected [13]"),
        "mask of 0.5": (lambda x: (x, half, {}), "sample 1, token 1, full_mask is 0.5; expected 0 or 1"),
        "another mask": (lambda x: (x, other, {}), "sample 0, loss_mask is 7 ones"),
    }
    bad_clips = {
        "bad clip": (lambda x: (x, mask, {"eps_clip": -1.0}), "eps_clip is -1.0"),
        "another clip": (lambda x: (x, mask, {"eps_clip": 0.3}), "eps_clip is 0.3; expected 0.2"),
    }
    gspo = lambda x, mask, cp, eps_clip=0.2: gspo_loss(x, x, x, mask, cp=cp, eps_clip=eps_clip)
    cases = [(fn, case) for fn in (gspo, TAKES_A_MASK["cp_masked_mean"]) for case in bad_input.values()]
    cases += [(TAKES_A_MASK["cp_masked_sum"], case) for case in bad_input.values()]
    for fn, (spoil, text) in [*cases, *((gspo, case) for case in bad_clips.values())]:

        def rank_told(rank, all_gather, fn=fn, spoil=spoil):
            x = torch.zeros(cut.sizes[rank])
            x, full_mask, settings = spoil(x) if rank == 1 else (x, mask, {})
            return told(lambda: fn(x, full_mask, CPContext(cut, rank, all_gather), **settings))

        texts = in_threads(rank_told, w)
        assert texts == [texts[0]] * w
        assert texts[0].startswith(f"CP rank 1 of {w}: ")
        assert text in texts[0]


@pytest.mark.parametrize("count", [count_tokens, count_sequences])
def test_masks_that_cannot_be_counted_are_named_by_all_ranks(count):
    good = [torch.ones(2), torch.ones(3, dtype=torch.bool)]
    for bad, text in (
        ([good[0], [1, 0]], "sample 1, full_mask is a list; expected a tensor"),
        ([good[0], torch.tensor([1, 2])], "sample 1, token 1, full_mask is 2.0; expected 0 or 1"),
        (torch.ones(3), "sample 0, shape of full_mask is []"),  # a pack would be as many samples as tokens
        (None, "full_masks is a NoneType"),
    ):
        texts = in_threads(lambda rank, g, bad=bad: told(lambda: count(bad if rank == 1 else good, all_gather=g)), 2)
        assert texts == [texts[0]] * 2
        assert texts[0].startswith("DP rank 1 of 2: " + text)
        assert told(lambda bad=bad: count(bad)).startswith(text)


def test_agreement_rides_in_the_one_collective_each_way():
    cut = zigzag(TOTAL, RESPONSE, 2)

    def collectives(rank, all_gather):
        cp = CPContext(cut, rank, Counted(all_gather))
        leaf = cp.take(LOG_PROBS).requires_grad_()
        share = gspo_loss(leaf, cp.take(OLD), cp.take(A), FULL_MASK, cp=cp)
        forward = cp.all_gather.collectives
        share.total.backward()
        return forward, cp.all_gather.collectives

    assert in_threads(collectives, 2) == [(1, 2), (1, 2)]


def test_without_agreement_the_caller_is_trusted():
    cut = zigzag(TOTAL, RESPONSE, 2)

    def share(rank, all_gather, agreement):
        cp = CPContext(cut, rank, Counted(all_gather), agreement=agreement)
        loss = gspo_loss(cp.take(LOG_PROBS), cp.take(OLD), cp.take(A), FULL_MASK, cp=cp).total
        return loss, cp.all_gather.bytes_sent

    full, off = (in_threads(partial(share, agreement=how), 2) for how in ("full", "off"))
    assert [loss for loss, _ in full] == [loss for loss, _ in off]
    assert [sent for _, sent in off] == [8 * len(TOTAL)] * 2
    cp = CPContext(zigzag([3], [2], 1), agreement="off")
    assert int(token_mean(torch.zeros(2), torch.tensor([1, 2]), cp=cp).count) == 2  # not looked at


def test_a_rank_that_owns_nothing_joins_the_backward_pass_of_gspo():
    """It may be given an empty tensor that is no part of a graph."""
    cut = zigzag([13], [3], 2)
    assert cut.sizes == [0, 3]

    def gradient(rank, all_gather):
        x = torch.zeros(cut.sizes[rank], requires_grad=rank == 1)
        cp = CPContext(cut, rank, all_gather)
        gspo_loss(x, x.detach(), torch.ones_like(x), torch.ones(3), cp=cp).total.backward()
        return None if x.grad is None else x.grad.sum().item()

    assert in_threads(gradient, 2) == [None, pytest.approx(-1.0)]
    with torch.no_grad():
        cp = CPContext(zigzag([], [], 1))
        assert not gspo_loss(*[torch.zeros(0)] * 3, torch.zeros(0), cp=cp).total.requires_grad
