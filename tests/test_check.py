"""The parity checker: ten planted mistakes are caught, located and named; right functions raise no alarm; no hang."""

import importlib.util
import math
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import planted
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_returns import (
    GAE,
    ContextParallelReturns,
    CPContext,
    ReturnsConfig,
    carry,
    contiguous,
    contiguous_pack,
    gae,
    group_advantage,
    reference,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    whiten,
    zigzag,
)
from cp_returns.batches import filled, hard_batch
from cp_returns.check import CheckError, Finding, Report, Share, View, check_cp_invariance
from cp_returns.diagnose import KINDS
from cp_returns.loss import policy_loss, sequence_mean
from cp_returns.pytest_plugin import rollout_batches
from cp_returns.rollouts import Rollouts

GAMMA, LAM, KL_COEF = planted.GAMMA, planted.LAM, planted.KL_COEF


def clean_batch() -> Rollouts:
    """`hard_batch` with 0 in masked slots, so that a function may multiply by the mask."""
    hard = hard_batch()
    return filled(hard.total_lengths, hard.response_lengths, hard.loss_masks, hard.rewards)


# ---- ten planted mistakes. What one rank gives comes from the float64 oracle or from the formula written out.


def kl_of(batch: Rollouts, i: int) -> list[float]:
    return (batch.log_probs[i] - batch.ref_log_probs[i]).tolist()


def returns_of(batch: Rollouts, *, with_reward: bool) -> list[list[float]]:
    """Returns at every token: the mask drops the penalty of a token, not the token."""
    out = []
    for i, mask in enumerate(batch.loss_masks):
        r = [-KL_COEF * k if m else 0.0 for k, m in zip(kl_of(batch, i), mask.tolist(), strict=True)]
        r[-1] += batch.rewards[i] if with_reward else 0.0
        out.append(reference.discounted(r, GAMMA, [True] * len(r), [1] * len(r)))
    return out


def whitened_of(batch: Rollouts) -> list[list[float]]:
    full = [
        reference.reinforce_plus_plus(kl_of(batch, i), batch.rewards[i], m.tolist(), gamma=GAMMA, kl_coef=KL_COEF)
        for i, m in enumerate(batch.loss_masks)
    ]
    valid = np.concatenate([np.array(x)[m.numpy()] for x, m in zip(full, batch.loss_masks, strict=True)])
    mean, std = valid.mean(), valid.std(ddof=1)
    return [
        [(x - mean) / std if on else 0.0 for x, on in zip(xs, m.tolist(), strict=True)]
        for xs, m in zip(full, batch.loss_masks, strict=True)
    ]


def advantages_of(batch: Rollouts) -> list[list[float]]:
    out = []
    for i, mask in enumerate(batch.loss_masks):
        on = mask.tolist()
        v = [x if m else 0.0 for x, m in zip(batch.values[i].tolist(), on, strict=True)]
        r = [-KL_COEF * k if m else 0.0 for k, m in zip(kl_of(batch, i), on, strict=True)]
        delta = [r[j] + GAMMA * (v[j + 1] if j + 1 < len(v) else 0.0) - v[j] for j in range(len(v))]
        out.append(reference.discounted(delta, GAMMA * LAM, [True] * len(v), [1] * len(v)))
    return out


def valid_count(batch: Rollouts) -> int:
    return sum(int(m.sum()) for m in batch.loss_masks)


def loss_of(batch: Rollouts) -> float:
    total = 0.0
    for i, mask in enumerate(batch.loss_masks):
        total -= sum(x * batch.rewards[i] for x, m in zip(batch.log_probs[i].tolist(), mask.tolist(), strict=True) if m)
    return total / valid_count(batch)


def kl_mean_of(batch: Rollouts) -> float:
    total = 0.0
    for i, mask in enumerate(batch.loss_masks):
        total += sum(k for k, m in zip(kl_of(batch, i), mask.tolist(), strict=True) if m)
    return total / valid_count(batch)


def found_at(report: Report, dp: int, cp: int, output: str | None = "any") -> Finding:
    found = [f for f in report.findings if (f.dp_size, f.cp_size) == (dp, cp) and output in ("any", f.output)]
    assert len(found) == 1, str(report)
    return found[0]


# function, kind, output, the first place at dp 1 x cp 2 (sample, token, cp rank, piece), what one rank gives there.
# Sample 0 has T = 41, R = 33: pieces of 11 positions, response token 0 at position 7, so tokens 0..3 are piece 0 (rank
# 0), 4..14 and 15..25 pieces 1 and 2 (rank 1), 26..32 piece 3 (rank 0). Sample 1, T = 13: token 0 is position 11, piece
# 2 of four, rank 1: rank 0 owns nothing of it.
PLANTED = [
    (planted.whitened_over_dp_only, "whitening group", "output", (0, 0, 0, 0), lambda b: whitened_of(b)[0][0]),
    (
        planted.reward_on_last_token_of_rank_0,
        "terminal reward",
        "returns",
        (1, 0, 1, 2),
        lambda b: returns_of(b, with_reward=True)[1][0],
    ),
    (
        planted.prompt_border_off_by_one,
        "shift",
        "output",
        (0, 4, 1, 1),
        lambda b: returns_of(b, with_reward=False)[0][4],
    ),
    (
        planted.zigzag_read_as_contiguous,
        "order",
        "output",
        (0, 0, 0, 0),
        lambda b: returns_of(b, with_reward=False)[0][0],
    ),
    (planted.gae_without_look_ahead, "piece ends", "advantages", (0, 0, 0, 0), lambda b: advantages_of(b)[0][0]),
    (
        planted.loss_over_local_tokens,
        "local count",
        "gradient of log_probs",
        (0, 0, 0, 0),
        lambda b: -b.rewards[0] / valid_count(b),
    ),
    (planted.loss_over_local_tokens, "local count", "loss", (None, None, None, None), loss_of),
    (
        planted.gradient_times_cp,
        "scale",
        "gradient of log_probs",
        (0, 0, 0, 0),
        lambda b: -b.rewards[0] / valid_count(b),
    ),
    (planted.metrics_summed_over_cp_twice, "scale", "kl_mean", (None, None, 0, None), kl_mean_of),
]


@pytest.mark.parametrize(
    ("fn", "kind", "output", "place", "one_rank"), PLANTED, ids=[f"{case[0].__name__}-{case[2]}" for case in PLANTED]
)
def test_a_planted_mistake_is_caught_located_and_named(fn, kind, output, place, one_rank):
    batch = clean_batch()
    gradients = "loss" in fn.__name__ or "gradient" in fn.__name__
    report = check_cp_invariance(fn, batch, cp_sizes=(1, 2, 4), dp_sizes=(1, 2), gradients=gradients)
    first = found_at(report, 1, 2, output)
    assert (first.sample, first.token, first.rank, first.piece) == place
    assert first.expected == pytest.approx(one_rank(batch), rel=1e-5, abs=1e-6)
    assert abs(first.got - first.expected) > 1e-3 * abs(first.expected)
    for cp in (2, 4):  # the mistake is in how CP is handled, so data parallelism alone may be right
        for dp in (1, 2):
            assert found_at(report, dp, cp, output).kind == kind, str(report)
    text = str(report)
    assert kind.upper() in text
    assert KINDS[kind] in text
    assert f"one rank gives {first.expected:.9g}" in text


def test_the_numbers_of_a_scaled_gradient_and_of_a_local_count():
    batch = clean_batch()
    check = partial(check_cp_invariance, batch=batch, cp_sizes=(2,), gradients=True)
    scaled = found_at(check(planted.gradient_times_cp), 1, 2)
    assert scaled.got == pytest.approx(2 * scaled.expected, rel=1e-5)
    assert "cp_size = 2 times" in scaled.why
    local = found_at(check(planted.loss_over_local_tokens), 1, 2, "gradient of log_probs")
    own = sum(int(m.sum()) for m in shards_of_rank_0(batch))
    assert local.got == pytest.approx(-batch.rewards[0] / own, rel=1e-5)


def shards_of_rank_0(batch: Rollouts) -> list[torch.Tensor]:
    """slime's arithmetic for cp_size 2, rank 0."""
    out = []
    for total, response, mask in zip(batch.total_lengths, batch.response_lengths, batch.loss_masks, strict=True):
        chunk, first = -(-total // 4), total - response - 1
        out.append(torch.cat([mask[max(0, -first) : max(0, chunk - first)], mask[max(0, 3 * chunk - first) :]]))
    return out


def test_a_product_with_the_mask_is_found_on_one_rank_already():
    batch = hard_batch()  # NaN in masked slots; the first is token 5 of sample 3
    report = check_cp_invariance(planted.mask_multiplied, batch, cp_sizes=(1, 2))
    first = found_at(report, 1, 1)
    assert first.kind == "NaN spread"
    assert (first.sample, first.token, first.rank, first.piece) == (3, 0, 0, 0)
    assert math.isnan(first.got)
    assert first.expected == pytest.approx(returns_of(batch, with_reward=False)[3][0], rel=1e-5)
    assert "torch.where" in first.why
    assert check_cp_invariance(planted.mask_multiplied, clean_batch(), cp_sizes=(1, 2)).agrees


def test_nan_on_many_ranks_only_is_named_too():
    def spoilt(view: View):
        out = [kl.clone() for kl in view.kl]
        if view.size == 2 and view.rank == 1:
            out[0][3] = math.inf
        return out

    first = found_at(check_cp_invariance(spoilt, clean_batch(), cp_sizes=(2,)), 1, 2)
    assert (first.kind, first.sample, first.token, first.rank, first.piece) == ("NaN spread", 0, 7, 1, 1)


MORE = [
    (planted.mask_off_by_one, "shift"),
    (planted.zigzag_cut_as_contiguous, "order"),
    (planted.scan_of_own_pieces_only, "piece ends"),
    (planted.gae_of_pieces, "piece ends"),
    (planted.whitened_over_cp_only, "whitening group"),
    (planted.sample_means_of_own_tokens, "whitening group"),
    (planted.wrong_where_a_shard_is_empty, "empty shards"),
    (planted.pieces_swapped, "order"),
]


@pytest.mark.parametrize(("fn", "kind"), MORE, ids=[fn.__name__ for fn, _ in MORE])
def test_variants_are_named_alike(fn, kind):
    report = check_cp_invariance(fn, clean_batch(), cp_sizes=(1, 2, 4), dp_sizes=(1, 2))
    assert report.findings
    assert {f.kind for f in report.findings} == {kind}, str(report)


def test_what_is_no_known_mistake_is_not_given_a_name():
    def noise(view: View):
        generator = torch.Generator().manual_seed(7 * view.size + view.rank)
        return [kl + torch.randn(len(kl), generator=generator) for kl in view.kl]

    report = check_cp_invariance(noise, clean_batch(), cp_sizes=(2, 4), dp_sizes=(1, 2))
    assert {f.kind for f in report.findings} == {"unrecognised"}, str(report)


def plus_noise(view: View, size: float):
    """Right but for what a lower precision leaves of it."""
    generator = torch.Generator().manual_seed(7 + view.rank)
    moved = 0.0 if view.size == 1 else size
    full = zip(planted.per_sample_gather(view), view.shards(view.loss_masks), strict=True)
    return [torch.where(mask, x + moved * torch.randn(len(x), generator=generator), 0.0) for x, mask in full]


def zeros_but_on_rank_0(view: View):
    return [x if view.rank == 0 else torch.zeros_like(x) for x in planted.per_sample_gather(view)]


def detached_on_rank_1(view: View):
    share = planted.loss_right(view)["loss"].value
    return {"loss": Share(share.detach() if view.rank == 1 else share)}


def one_carry_lost_beside_large_rewards(view: View, kl_coef: float):
    """All that differs is one token, the smallest of the batch, and by 1.5e-5 of its sample's returns."""
    out = [kl_coef / KL_COEF * x + 1000 * view.rewards[i] for i, x in enumerate(planted.per_sample_gather(view))]
    if view.size > 1 and view.rank == 1 and 6 in view.samples:
        own = out[view.samples.index(6)]
        own[own.argmin()] -= 0.03
    return out


def the_same_number_everywhere(view: View):
    masks = view.shards(view.loss_masks)
    return planted.per_sample_gather(view) if view.size == 1 else [torch.where(m, 0.5, 0.0) for m in masks]


def zeros_under_cp(view: View):
    return [x * float(view.size == 1) for x in planted.per_sample_gather(view)]


def another_clock(view: View):
    clock = "token" if view.size == 1 else "trainable"
    kl, rewards, mask = inputs(view)
    return reinforce_plus_plus(kl, rewards, mask, cp=cp_of(view), gamma=GAMMA, kl_coef=KL_COEF, clock=clock)


CAREFUL = [
    (partial(plus_noise, size=1e-5), "unrecognised"),
    (partial(plus_noise, size=1e-3), "unrecognised"),
    (zeros_but_on_rank_0, "zeros"),
    (detached_on_rank_1, "zeros"),
    (partial(one_carry_lost_beside_large_rewards, kl_coef=0.1), "unrecognised"),
    (partial(one_carry_lost_beside_large_rewards, kl_coef=0.01), "unrecognised"),
    (the_same_number_everywhere, "unrecognised"),
    (zeros_under_cp, "zeros"),
    (another_clock, "unrecognised"),
]


@pytest.mark.parametrize(("fn", "kind"), CAREFUL)
def test_no_name_that_the_numbers_do_not_bear_out(fn, kind):
    """None of these is statistics of a part of the ranks, an order of pieces or a piece's end."""
    report = check_cp_invariance(
        fn, clean_batch(), cp_sizes=(2, 3, 4), dp_sizes=(1, 2), gradients="detached" in str(fn)
    )
    assert {f.kind for f in report.findings} == {kind}, str(report)
    assert len(report.findings) == 6


def test_the_sample_to_look_at_has_more_than_one_token():
    lengths = [1, 3, 4, 2]
    batch = filled([5] * 4, lengths, [torch.ones(n, dtype=torch.bool) for n in lengths], [1.0] * 4)

    def fn(view: View, moved: dict):
        shifts = [moved.get(i, 0.0) if view.size == 2 else 0.0 for i in view.samples]
        return [1.0 + shift + 0 * x for shift, x in zip(shifts, view.kl, strict=True)]

    for moved, worst in (({0: 9.0, 2: 0.1, 3: 0.2}, 3), ({0: 9.0}, 0), ({}, 0)):
        world, name = check_cp_invariance(partial(fn, moved=moved), batch, cp_sizes=(2,)).worst
        assert world.outputs[name].worst_sample == worst


# ---- location, by hand


def test_the_first_difference_is_the_one_that_was_planted():
    """T = 10, R = 9, W = 2 (semantics.md): rank 0 owns tokens 0..2, in piece 0, and rank 1 3..5 and 6..8."""
    ones = [torch.ones(9, dtype=torch.bool)] * 3
    batch = filled([10] * 3, [9] * 3, ones, [1.0] * 3)

    def fn(view: View):
        out = [torch.arange(9.0)[view.layout.token_owners(i) == view.rank] for i in range(len(view.samples))]
        if view.size == 2 and view.rank == 1 and 2 in view.samples:
            out[view.samples.index(2)][4] = -5.0  # local token 4 of rank 1: token 7
        return out

    for dp, dp_rank in ((1, 0), (2, 0), (3, 2)):  # sample 2 is on DP rank 2 % dp
        first = found_at(check_cp_invariance(fn, batch, cp_sizes=(2,), dp_sizes=(dp,)), dp, 2)
        assert (first.sample, first.token, first.dp_rank, first.rank, first.piece) == (2, 7, dp_rank, 1, 2)
        assert (first.expected, first.got, first.differ, first.compared) == (7.0, -5.0, 1, 27)


def test_the_tolerance_is_of_the_sample_and_can_be_set():
    batch = filled([10, 10], [9, 9], [torch.ones(9, dtype=torch.bool)] * 2, [1.0, 1.0])

    def fn(view: View):
        moved = 1e-4 if view.size == 2 and view.rank == 1 else 0.0
        return [torch.full((int(n),), 1.0 + moved) for n in view.layout.lengths(view.rank)]

    assert not check_cp_invariance(fn, batch, cp_sizes=(2,)).agrees
    assert check_cp_invariance(fn, batch, cp_sizes=(2,), rtol=1e-3).agrees
    assert check_cp_invariance(fn, batch, cp_sizes=(2,), atol=1e-3).agrees
    assert not check_cp_invariance(fn, batch, cp_sizes=(2,), rtol=0.0, atol=1e-5).agrees


@pytest.mark.parametrize(("step", "agrees"), [(2.0**-22, True), (2.0**-20, False)])
def test_without_rtol_float32_rounding_of_the_largest_is_allowed(step, agrees):
    batch = filled([10, 10], [9, 9], [torch.ones(9, dtype=torch.bool)] * 2, [1.0, 1.0])

    def fn(view: View):
        out = [torch.full((int(n),), 8.0) for n in view.layout.lengths(view.rank)]
        return [x * (1 + step) for x in out] if view.size == 2 and view.rank == 1 else out

    assert check_cp_invariance(fn, batch, cp_sizes=(2,), rtol=0.0).agrees == agrees


@pytest.mark.parametrize(("step", "agrees"), [(2.0**-24, True), (2.0**-22, False)])
@pytest.mark.parametrize("reward", [0.25, 64.0])
@pytest.mark.parametrize("form", ["metric", "share", "samples"])
def test_a_number_that_is_0_but_for_rounding_has_the_room_of_a_mean(form, reward, step, agrees):
    """Float32 rounds a mean of rewards by some 2^-24 of the largest, and of whitened numbers by that of 1."""
    batch = filled([10, 10], [9, 9], [torch.ones(9, dtype=torch.bool)] * 2, [reward, -reward])

    def fn(view: View):
        off = step * max(reward, 1.0) if view.size == 2 and view.rank == 1 else 0.0
        return {"metric": off, "share": Share(off), "samples": torch.full((len(view.samples),), off)}[form]

    assert check_cp_invariance(fn, batch, cp_sizes=(2,)).agrees == agrees


def test_parts_that_cancel_are_as_exact_as_the_parts():
    def fn(view: View, off: float):
        return Share(0.0 if view.size == 1 else -1e4 if view.rank else 1e4 + off)

    check = partial(check_cp_invariance, batch=clean_batch(), cp_sizes=(2,))
    assert check(partial(fn, off=0.1)).agrees  # 1e-5 of 2e4 is 0.2
    assert not check(partial(fn, off=0.4)).agrees
    assert check(partial(fn, off=0.3), atol=0.2).agrees


@pytest.mark.parametrize("given", ["one more", "other name", "a number", "too few samples"])
def test_outputs_that_do_not_fit_are_findings(given):
    def fn(view: View):
        if view.size == 1 or view.rank == 0:
            return {"x": view.kl}
        if given == "one more":
            return {"x": [*view.kl[:-1], torch.cat([view.kl[-1], torch.zeros(1)])]}
        return {"other name": {"y": view.kl}, "a number": {"x": 3.0}, "too few samples": {"x": view.kl[:-1]}}[given]

    first = found_at(check_cp_invariance(fn, clean_batch(), cp_sizes=(2,)), 1, 2, "x")
    assert first.kind == "shape"


def test_outputs_of_every_form_are_compared():
    """Packed, listed and per-sample numbers, metrics and shares agree, and each is seen when one rank moves it."""

    def fn(view: View, moved: str = ""):
        off = 1.0 if view.size == 2 and view.rank == 1 else 0.0
        packed = torch.cat(view.kl)
        add = {name: off if name == moved else 0.0 for name in ("packed", "samples", "floats", "metric", "share")}
        total = view.all_gather(torch.tensor([float(len(packed))])).sum()
        return {
            "packed": packed + add["packed"],
            "samples": view.rewards + add["samples"],
            "floats": [float(r) + add["floats"] for r in view.rewards],
            "metric": total + add["metric"],
            "share": Share(packed.sum() + add["share"]),
        }

    assert check_cp_invariance(fn, clean_batch(), cp_sizes=(1, 2), dp_sizes=(1, 2)).agrees
    for moved in ("packed", "samples", "floats", "metric", "share"):
        report = check_cp_invariance(partial(fn, moved=moved), clean_batch(), cp_sizes=(2,))
        assert [f.output for f in report.findings] == [moved]
        assert report.findings[0].rank == (None if moved == "share" else 1)


def test_an_output_that_one_rank_does_not_give_is_a_finding():
    def fn(view: View):
        return {"x": view.kl, "y": view.kl} if view.size == 2 and view.rank == 1 else {"x": view.kl}

    report = check_cp_invariance(fn, clean_batch(), cp_sizes=(2,))
    first = found_at(report, 1, 2)
    assert (first.kind, first.output) == ("shape", "y")
    assert "rank 1 returns this output, and one rank does not" in first.why
    assert "y: not compared" in str(report)


def test_one_token_a_sample_is_no_trouble():
    """As many tokens as samples on one rank, so that the numbers alone do not say which of the two they are."""
    batch = filled([5, 9, 3], [1, 1, 1], [torch.ones(1, dtype=torch.bool)] * 3, [1.0, 2.0, 3.0])
    fn = lambda view: {"tokens": torch.cat(view.kl), "samples": view.rewards * 2}
    report = check_cp_invariance(fn, batch, cp_sizes=(2, 3), dp_sizes=(1, 2))
    assert report.agrees, str(report)


# ---- functions that are right: no false alarm


def cp_of(view: View, strategy=None) -> CPContext:
    options = {} if strategy is None else {"strategy": strategy}
    return CPContext(view.layout, view.rank, view.all_gather.cp, **options)


def inputs(view: View):
    return torch.cat(view.kl), view.rewards, torch.cat(view.loss_masks)


def right_returns(view: View):
    kl, rewards, mask = inputs(view)
    tokens = torch.cat(view.token_rewards)
    return reinforce_plus_plus(
        kl, rewards, mask, cp=cp_of(view), gamma=GAMMA, kl_coef=KL_COEF, token_rewards=tokens, clock="trainable"
    )


def right_carry(view: View):
    kl, rewards, mask = inputs(view)
    return reinforce_plus_plus(kl, rewards, mask, cp=cp_of(view, carry), gamma=0.99, kl_coef=KL_COEF)


def right_whitened(view: View):
    kl, rewards, mask = inputs(view)
    cp = cp_of(view)
    G = reinforce_plus_plus(kl, rewards, mask, cp=cp, gamma=1.0, kl_coef=KL_COEF)
    return whiten(G, cp.take(mask), all_gather=view.all_gather)


def right_gae(view: View):
    kl, rewards, mask = inputs(view)
    values = torch.cat(view.values)
    return gae(kl, rewards, values, mask, cp=cp_of(view), gamma=GAMMA, lam=LAM, kl_coef=KL_COEF)


def right_gae_by_carry(view: View):
    kl, rewards, mask = inputs(view)
    values = torch.cat(view.values)
    return gae(kl, rewards, values, mask, cp=cp_of(view, carry), gamma=1.0, lam=0.95, kl_coef=KL_COEF, clock="turn")


def right_baseline(view: View):
    kl, rewards, mask = inputs(view)
    return reinforce_plus_plus_baseline(
        kl, rewards, view.group_ids, mask, cp=cp_of(view), kl_coef=KL_COEF, all_gather=view.all_gather.dp
    )


def right_remax(view: View):
    kl, rewards, mask = inputs(view)
    return remax(kl, rewards, rewards * 0.5, mask, cp=cp_of(view), kl_coef=KL_COEF)


def right_groups(view: View):
    return {"grpo": group_advantage(view.rewards, view.group_ids, scale="std", all_gather=view.all_gather.dp)}


def right_module(view: View):
    config = ReturnsConfig(estimator="reinforce_plus_plus", gamma=GAMMA, kl_coef=KL_COEF, whiten=True)
    out = ContextParallelReturns(config, cp_group=view.all_gather.cp, dp_cp_group=view.all_gather)(
        kl=view.kl,
        rewards=view.rewards,
        loss_masks=view.loss_masks,
        response_lengths=view.response_lengths,
        total_lengths=view.total_lengths,
    )
    valid = view.all_gather.dp(torch.tensor([out.info.valid_tokens])).sum()
    return {"returns": out.returns, "advantages": out.advantages, "masks": out.masks, "valid": valid}


def right_loss(view: View):
    mask, cp = torch.cat(view.loss_masks), cp_of(view)
    old = torch.cat(view.ref_log_probs)
    advantages = cp.spread(view.rewards)
    loss = policy_loss(torch.cat(view.log_probs), old, advantages, mask, cp=cp)
    whole = view.all_gather.dp(loss.whole.reshape(1).double()).sum()
    return {"loss": Share(loss.total / whole)}


def right_first_step(view: View):
    """Log-probs that have not moved: ratio 1, and whitened advantages, whose mean is 0 but for rounding."""
    cp, mask = cp_of(view), torch.cat(view.loss_masks)
    advantages, log_probs = right_whitened(view), torch.cat(view.log_probs)
    loss = policy_loss(log_probs, log_probs.detach(), advantages, mask, cp=cp)
    whole = view.all_gather.dp(loss.whole.reshape(1).double()).sum()
    return {"loss": Share(loss.total / whole)}


def right_first_step_of_grpo(view: View):
    """The same with rewards minus the mean of their group."""
    cp, mask = cp_of(view), torch.cat(view.loss_masks)
    centred = group_advantage(view.rewards, view.group_ids, all_gather=view.all_gather.dp)
    advantages = torch.where(cp.take(mask).bool(), cp.spread(centred), 0)
    log_probs = torch.cat(view.log_probs)
    loss = policy_loss(log_probs, log_probs.detach(), advantages, mask, cp=cp, reduce=sequence_mean)
    return {"loss": Share(loss.total / 10)}


ANY_LAYOUT = [
    right_returns,
    right_carry,
    right_whitened,
    right_gae,
    right_gae_by_carry,
    right_baseline,
    right_remax,
    right_groups,
    right_loss,
    right_first_step,
    right_first_step_of_grpo,
]
RIGHT = [*ANY_LAYOUT, right_module, planted.per_sample_gather]  # these two cut by zigzag themselves


def all_of(functions, view: View):
    """Every function's outputs, each named after it: one run of the ranks serves them all."""
    outputs = {}
    for fn in functions:
        out = fn(view)
        named = out if isinstance(out, dict) else vars(out) if isinstance(out, GAE) else {"": out}
        outputs |= {f"{fn.__name__} {name}": x for name, x in named.items()}
    return outputs


WORLDS = st.sampled_from([(1, 2), (2, 1), (1, 3), (2, 2)])


@settings(max_examples=200)
@given(batch=rollout_batches(max_samples=3, max_response=12), world=WORLDS)
def test_no_false_alarm_on_200_random_batches(batch, world):
    dp, cp = world
    fn = partial(all_of, RIGHT)
    report = check_cp_invariance(fn, batch, dp_sizes=(dp,), cp_sizes=(cp,), gradients=True)
    assert report.agrees, str(report)


@settings(max_examples=10)
@given(batch=rollout_batches(max_samples=3, max_response=12), world=WORLDS)
@pytest.mark.parametrize("layout", [partial(zigzag, multiple=3), contiguous], ids=["padded zigzag", "contiguous"])
def test_no_false_alarm_in_other_layouts(layout, batch, world):
    dp, cp = world
    fn = partial(all_of, ANY_LAYOUT)
    report = check_cp_invariance(fn, batch, dp_sizes=(dp,), cp_sizes=(cp,), gradients=True, layout=layout)
    assert report.agrees, str(report)


@pytest.mark.parametrize("seed", range(3))
def test_a_mean_of_whitened_numbers_is_no_false_alarm(seed):
    """Its float32 sum on each rank: 0 but for rounding, which depends on the ranks."""

    def fn(view: View):
        own = right_whitened(view)
        n = sum(int(m.sum()) for m in view.loss_masks)
        whole = int(view.all_gather.dp(torch.tensor([n])).sum())
        return right_first_step(view) | {"mean": view.all_gather(own.sum().reshape(1)).sum() / whole}

    report = check_cp_invariance(fn, hard_batch(seed), cp_sizes=(1, 2, 4), dp_sizes=(1, 2), gradients=True)
    assert report.agrees, str(report)


def test_any_layout_can_be_checked():
    def packed(total, response, cp):
        return contiguous_pack(total, response, cp, stream_length=-(-sum(total) // cp) * cp)

    report = check_cp_invariance(right_returns, hard_batch(), layout=packed, cp_sizes=(1, 2, 4), dp_sizes=(1, 2))
    assert report.agrees, str(report)


def test_more_ranks_than_samples_give_empty_views():
    def fn(view: View):
        assert len(view.samples) == len(view.kl) == len(view.rewards)
        return view.kl

    batch = filled([5], [3], [torch.ones(3, dtype=torch.bool)], [1.0])
    assert check_cp_invariance(fn, batch, cp_sizes=(2,), dp_sizes=(3,)).agrees


def test_a_function_cannot_spoil_the_batch_for_the_next_world():
    def fn(view: View):
        for own in (*view.kl, *view.log_probs, *view.loss_masks, *view.values):
            own.zero_()
        out = view.rewards.clone()
        view.rewards.zero_()
        return out

    batch = clean_batch()
    before = [x.clone() for x in (*batch.log_probs, *batch.loss_masks, *batch.values)]
    assert check_cp_invariance(fn, batch, cp_sizes=(1, 2)).agrees
    after = (*batch.log_probs, *batch.loss_masks, *batch.values)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ---- ranks that do not end


@pytest.mark.parametrize("run", ["threads", "processes"])
def test_a_skipped_collective_is_a_hang_with_every_ranks_place(run):
    """Samples 1 and 2 only: T = 13, R = 1 and T = 97, R = 9. At cp 4 ranks 1 and 3 own nothing of either."""
    hard = hard_batch()
    lists = (hard.total_lengths, hard.response_lengths, hard.loss_masks, hard.rewards)
    batch = filled(*([x[1], x[2]] for x in lists))
    if run == "processes" and importlib.util.find_spec("megatron") is not None:
        importlib.import_module("megatron.core.parallel_state")  # seconds, once a process, that are not the check's
    start = time.monotonic()
    report = check_cp_invariance(planted.skips_when_it_has_nothing, batch, cp_sizes=(4,), run=run, timeout=10)
    assert time.monotonic() - start < 30
    first = found_at(report, 1, 4)
    assert report.hangs
    assert first.kind == "hang"
    # positions 11 and 87..95 of pieces of 2 and 13: piece 5 (rank 2), pieces 6 and 7 (ranks 1 and 0)
    assert first.rank == 3
    assert "rank 3 returned after 0 collectives" in first.why
    assert "owns nothing of sample 0, 1" in first.why
    outcomes = {o.rank: o for o in first.outcomes}
    assert outcomes[3].last_collective == "none"
    for rank in (0, 1, 2):
        assert outcomes[rank].last_collective == "all_gather over all ranks, float32 []"
        assert "skips_when_it_has_nothing" in outcomes[rank].where
    text = str(report)
    assert "(ranks in " + run + "): 1 of 2 hang\n" in text
    assert "HANG" in text
    assert text.count("in skips_when_it_has_nothing") == 3
    assert "simulate.py" not in text


def test_ranks_in_different_collectives_are_a_hang():
    report = check_cp_invariance(planted.skips_an_empty_shard, clean_batch(), cp_sizes=(2,))
    first = found_at(report, 1, 2)
    assert (first.kind, first.rank) == ("hang", 0)  # of sample 1, whose shard is empty on rank 0
    assert "rank 0 owns nothing of sample 1" in first.why
    last = [o.last_collective.removeprefix("all_gather over CP, ") for o in first.outcomes]
    assert last == ["float32 [9]", "float32 [1]"]


def test_a_rank_that_waits_for_nothing_is_stopped_in_time():
    released = threading.Event()

    def never_comes(view: View):
        if view.size == 2 and view.rank == 1:
            released.wait(30)
        return view.all_gather(torch.ones(1)).sum()

    start = time.monotonic()
    report = check_cp_invariance(never_comes, clean_batch(), cp_sizes=(2,), timeout=1)
    released.set()
    assert time.monotonic() - start < 10
    assert (report.findings[0].kind, report.findings[0].rank) == ("hang", 1)
    assert "released.wait(30)" in str(report)


def test_what_a_rank_raises_is_a_finding_with_its_stack():
    def fn(view: View):
        if view.size == 2 and view.rank == 1:
            raise IndexError("past the end")
        return view.all_gather(torch.ones(1)).sum()

    report = check_cp_invariance(fn, clean_batch(), cp_sizes=(1, 2))
    first = found_at(report, 1, 2)
    assert (first.kind, first.dp_rank, first.rank) == ("raised", 0, 1)
    assert "IndexError: past the end" in first.why
    assert not report.hangs
    assert 'raise IndexError("past the end")' in str(report)


# ---- bad calls


def test_bad_calls_say_what_is_wrong():
    batch = clean_batch()

    def fails(view: View):
        raise KeyError("values")

    cases = [
        (fails, {}, r"fails on one rank already: KeyError: 'values'"),
        (lambda view: torch.distributed.get_rank(), {}, "run='processes' sets up"),
        (lambda view: torch.zeros(3), {}, r"3 numbers on one rank; expected one a response token \(214"),
        (lambda view: torch.zeros(2, 3), {}, r"output is a tensor of shape \[2, 3\]; expected"),
        (lambda view: {"x": "text"}, {}, "x is a str"),
        (planted.per_sample_gather, {"gradients": True}, "no output is a Share"),
        (planted.per_sample_gather, {"run": "mpi"}, "run is 'mpi'"),
        (planted.per_sample_gather, {"cp_sizes": (0, 2)}, "expected sizes of at least 1"),
        (planted.per_sample_gather, {"cp_sizes": ()}, "expected sizes of at least 1"),
        (planted.per_sample_gather, {"cp_sizes": (1, "2")}, "expected sizes of at least 1"),
        (planted.per_sample_gather, {"rtol": -1.0}, "rtol is -1.0; expected a finite number of at least 0"),
        (planted.per_sample_gather, {"rtol": math.nan}, "rtol is nan"),
        (planted.per_sample_gather, {"atol": math.inf}, "atol is inf"),
        (planted.per_sample_gather, {"timeout": 0}, "timeout is 0; expected seconds above 0"),
        (lambda view: {}, {}, "the function returns no output"),
        (lambda view: {"loss": Share(0.0)}, {"gradients": True}, r"no Share depends on view\.log_probs"),
        (lambda view: {"loss": Share(view.kl[0].sum())}, {"gradients": True}, r"no Share depends on view\.log_probs"),
        (
            lambda view: {"loss": Share(planted.loss_right(view)["loss"].value.detach())},
            {"gradients": True},
            r"no Share depends on view\.log_probs",
        ),
    ]
    for fn, options, text in cases:
        with pytest.raises(CheckError, match=text):
            check_cp_invariance(fn, batch, **options)
    short = replace(batch, values=[x[:-1] for x in batch.values])
    with pytest.raises(CheckError, match=r"sample 0, values has shape \[32\]; expected \[33\], the whole response"):
        check_cp_invariance(planted.per_sample_gather, short)


# ---- time


def test_a_right_function_is_answered_soon():
    """4 ranks, after the imports: under 2 s in threads, under 20 s in processes with Megatron's groups."""
    code = """
import time, warnings
import torch
torch.set_num_threads(1)
warnings.simplefilter("ignore")
import planted
from cp_returns.batches import hard_batch
from cp_returns.check import check_cp_invariance
for run in ("threads", "processes"):
    if run == "processes":
        try:
            import megatron.core.parallel_state  # 8 s of CPU time once
        except ModuleNotFoundError:
            pass
    start = time.monotonic()
    report = check_cp_invariance(planted.per_sample_gather, hard_batch(), cp_sizes=(1, 4), run=run)
    print(run, report.agrees, time.monotonic() - start)
"""
    here = [sys.executable, "-c", code]
    done = subprocess.run(here, capture_output=True, text=True, timeout=150, env=planted.environment(), check=False)
    assert done.returncode == 0, done.stderr
    times = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert times["threads"][0] == times["processes"][0] == "True"
    assert float(times["threads"][1]) < 2
    assert float(times["processes"][1]) < 20
