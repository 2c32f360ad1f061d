"""Whitening over all ranks: every option against the oracle, one collective joined by all, never NaN, never alone."""

import itertools
import math

import pytest
import torch
from helpers import assert_as_good_as_serial, assert_same_bits, golden_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from cp_returns import reference
from cp_returns.collectives import Counted, alone
from cp_returns.errors import CPInputError
from cp_returns.layout import zigzag
from cp_returns.simulate import RankFailure, in_threads
from cp_returns.whiten import whiten

NAN = math.nan


def over_ranks(shards: list[dict], **options) -> list[torch.Tensor]:
    """whiten(x, mask, weights=) of each rank's shard in threads; each joins exactly one collective."""

    def fn(rank, all_gather):
        counted = Counted(all_gather)
        out = whiten(**shards[rank], all_gather=counted, **options)
        assert counted.collectives == 1
        return out

    return in_threads(fn, len(shards), timeout=30)


def shard(x, mask=None, weights=None, dtype=torch.float32) -> dict:
    x = x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=dtype)
    mask = torch.ones(len(x), dtype=torch.bool) if mask is None else torch.as_tensor(mask)
    return {"x": x, "mask": mask} | (
        {} if weights is None else {"weights": torch.as_tensor(weights, dtype=torch.float64)}
    )


def alone_(x, mask=None, weights=None, **options) -> torch.Tensor:
    return whiten(**shard(x, mask, weights), all_gather=alone, **options)


# ---- against the oracle


@pytest.mark.parametrize("case", golden_cases("whiten"), ids=lambda case: case["id"])
def test_golden_cases(case):
    options = dict(case["params"])
    by_sequence = options.pop("weight", "token") == "sequence"
    rows = range(len(case["x"]))
    mine = {rank: [i for i in rows if case["ranks"][i] == rank] for rank in range(max(case["ranks"]) + 1)}
    flat = lambda name, of: [v for i in of for v in case[name][i]]
    weight = lambda of: [1 / max(1, sum(case["mask"][i])) for i in of for _ in case["mask"][i]] if by_sequence else None
    shards = [shard(flat("x", of), flat("mask", of), weight(of), torch.float64) for of in mine.values()]
    for of, got in zip(mine.values(), over_ranks(shards, **options), strict=True):
        expected = [v for i in of for v in case["expect"]["whitened"][i]]
        assert_as_good_as_serial(got.tolist(), expected, bits=40)


OPTIONS = st.fixed_dictionaries(
    {
        "ddof": st.sampled_from([0, 1]),
        "eps": st.sampled_from([1e-8, 1e-5, 0.0, 1.0]),
        "eps_mode": st.sampled_from(["add", "clamp"]),
        "center": st.booleans(),
        "shift_mean": st.booleans(),
        "scale": st.booleans(),
    }
).filter(lambda o: o["center"] or o["shift_mean"])


@st.composite
def batches(draw):
    """Ragged shards, some of them empty, with junk in masked slots."""
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(0, 12))
        mask = draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        number = st.floats(-100, 100, width=32) | st.sampled_from([0.1, 7.0])
        junk = st.sampled_from([NAN, math.inf, -math.inf, 3e38])
        x = [draw(number if m else junk) for m in mask]
        rows.append((x, mask, [draw(st.floats(0.01, 4)) if m else draw(junk) for m in mask]))
    return rows


@settings(max_examples=60)
@given(batches(), OPTIONS, st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_every_option_over_ranks_of_any_shard(rows, options, weighted, dtype):
    x, mask, w = (list(itertools.chain.from_iterable(row[k] for row in rows)) for k in range(3))
    x = torch.tensor(x, dtype=dtype).tolist()
    valid = [v for v, m in zip(x, mask, strict=True) if m]
    if weighted:
        options = options | {"ddof": 0}
    if options["eps"] == 0.0 and len(set(valid)) <= 1:
        options = options | {"eps": 1e-8}  # 0/0, on which the oracle has no opinion: a test of its own below
    expected = reference.whiten(x, mask, weights=w if weighted else None, **options)
    shards = [shard(row[0], row[1], row[2] if weighted else None, dtype) for row in rows]
    got = torch.cat(over_ranks(shards, **options))
    assert got.dtype == dtype
    # x - mean has an error of 2^-53 of x, and up to 1e4 is what eps makes of it
    bits = 24 if dtype == torch.float32 else 30
    assert_as_good_as_serial(got.tolist(), expected, bits=bits)
    assert all(v == 0 for v, m in zip(got.tolist(), mask, strict=True) if not m)


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)])
def test_every_factorisation_of_the_same_samples(dp, cp):
    """I38: each rank whitens its zigzag pieces of its samples; put together they are the same."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 40, 7, 333, 12, 64, 5, 2]
    full = [torch.randn(n, generator=generator) * 5 + 2 for n in lengths]
    masks = [torch.rand(n, generator=generator) > 0.3 for n in lengths]
    expected = reference.whiten(torch.cat(full).tolist(), torch.cat(masks).tolist())
    layouts = [zigzag([n + 9], [n], cp) for n in lengths]

    def fn(rank, all_gather):
        mine = range(all_gather.dp_rank, len(lengths), dp)
        index = [torch.from_numpy(layouts[i].index(all_gather.cp_rank)) for i in mine]
        x = torch.cat([full[i][at] for i, at in zip(mine, index, strict=True)])
        mask = torch.cat([masks[i][at] for i, at in zip(mine, index, strict=True)])
        out = whiten(x, mask, all_gather=all_gather).split([len(at) for at in index])
        return [(i, at, y) for i, at, y in zip(mine, index, out, strict=True)]

    together = [torch.full((n,), NAN) for n in lengths]
    for i, at, y in itertools.chain.from_iterable(in_threads(fn, dp * cp, cp_size=cp)):
        together[i][at] = y
    largest = max(map(abs, expected))
    assert (torch.cat(together).double() - torch.tensor(expected, dtype=torch.float64)).abs().max() <= 1e-6 * largest


# ---- worked by hand


def test_two_ranks_of_which_each_is_constant():
    shards = [shard([1.0, 1.0]), shard([3.0, 3.0])]
    a, b = over_ranks(shards, ddof=0)
    assert (a.tolist(), b.tolist()) == ([-1.0, -1.0], [1.0, 1.0])
    a, b = over_ranks(shards, ddof=1)
    assert a.tolist() == pytest.approx([-0.8660254] * 2, abs=1e-6)
    assert b.tolist() == pytest.approx([0.8660254] * 2, abs=1e-6)


def test_nan_in_a_masked_slot_is_not_there():
    """I44: mean 5, population variance 26/3."""
    got = alone_([2.0, NAN, 4.0, 9.0], [1, 0, 1, 1], ddof=0).tolist()
    root = math.sqrt(26 / 3)
    assert got == pytest.approx([-3 / root, 0.0, -1 / root, 4 / root], abs=1e-6)
    assert got[1] == 0.0


@pytest.mark.parametrize("junk", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("options", [{}, {"ddof": 0}, {"eps_mode": "clamp"}, {"center": False}, {"shift_mean": False}])
def test_nan_and_inf_at_a_valid_token_stay_visible_on_all_ranks(junk, options):
    a, b = over_ranks([shard([2.0, junk, 4.0]), shard([1.0, 5.0])], **options)
    assert not a[1].isfinite()
    assert a.isnan().any()
    assert b.isnan().all()


def test_scale_only_is_scale_only():
    """I41: the mean is not taken away, and ten times x gives the same."""
    got = alone_([1.0, 3.0], ddof=0, center=False)
    assert got.tolist() == [1.0, 3.0]
    assert alone_([10.0, 30.0], ddof=0, center=False).tolist() == pytest.approx([1.0, 3.0], abs=1e-6)


def test_sequence_weighting():
    """I55: advantages 1 and -1 of lengths 1 and 99 have mean 0, not -0.98."""
    shards = [shard([1.0], weights=[1.0]), shard([-1.0] * 99, weights=[1 / 99] * 99)]
    a, b = over_ranks(shards, ddof=0)
    assert a.tolist() == pytest.approx([1.0], abs=1e-6)
    assert b.tolist() == pytest.approx([-1.0] * 99, abs=1e-6)
    by_token = over_ranks([{k: v for k, v in s.items() if k != "weights"} for s in shards], ddof=0, scale=False)
    assert by_token[0].tolist() == pytest.approx([1.98])


def test_slimes_shift_mean():
    assert alone_([1.0, 3.0], ddof=0, shift_mean=False).tolist() == pytest.approx([1.0, 3.0], abs=1e-6)
    assert alone_([10.0, 30.0], ddof=0, shift_mean=False).tolist() == pytest.approx([19.0, 21.0], abs=1e-5)


# ---- constants, few tokens, none


@pytest.mark.parametrize("split", [[100_003], [50_000, 50_003], [1, 0, 100_002], [33_334, 33_334, 33_335, 0]])
@pytest.mark.parametrize("options", [{}, {"ddof": 0}, {"eps_mode": "clamp"}, {"eps": 0.0}, {"scale": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_gives_exactly_0(split, options, dtype):
    """P1, I45."""
    for y in over_ranks([shard(torch.full((n,), 0.7, dtype=dtype)) for n in split], **options):
        assert not y.any()


def test_a_constant_with_weights_gives_exactly_0():
    generator = torch.Generator().manual_seed(0)
    shards = [shard(torch.full((n,), 0.7), weights=torch.rand(n, generator=generator)) for n in (1000, 0, 333)]
    for y in over_ranks(shards, ddof=0):
        assert not y.any()


@pytest.mark.parametrize(("mean", "std"), [(1000, 0.01), (100, 0.01), (-1000, 0.01)])
def test_a_small_spread_about_a_large_mean(mean, std):
    """I45: float32 numbers near 1000 are 6e-5 apart; E[x^2] - E[x]^2 in float32 would be noise."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * std + mean
    y = torch.cat(over_ranks([shard(part) for part in x.split([70_000, 1, 29_999])])).double()
    assert y.std().item() == pytest.approx(1, rel=0.01)
    assert abs(y.mean().item()) < 1e-6
    exact = (x.double() - x.double().mean()) / torch.sqrt(x.double().var() + 1e-8)
    assert (y - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.parametrize("options", [{}, {"ddof": 0}, {"eps": 0.0}, {"eps_mode": "clamp"}, {"shift_mean": False}])
def test_no_valid_token_anywhere_gives_0(options):
    shards = [shard([NAN, 3.0], [0, 0]), shard([]), shard([math.inf], [0])]
    assert [y.tolist() for y in over_ranks(shards, **options)] == [[0.0, 0.0], [], [0.0]]
    assert alone_([], **options).shape == (0,)


@pytest.mark.parametrize("options", [{}, {"ddof": 0}, {"eps": 0.0}, {"eps_mode": "clamp"}, {"scale": False}])
def test_one_valid_token_gives_0(options):
    shards = [shard([NAN, 3.0], [0, 0]), shard([7.25, 3e38], [1, 0]), shard([])]
    assert [y.tolist() for y in over_ranks(shards, **options)] == [[0.0, 0.0], [0.0, 0.0], []]


def test_weights_that_are_all_0_leave_no_population():
    assert alone_([1.0, 5.0], weights=[0.0, 0.0], ddof=0).tolist() == [0.0, 0.0]
    a, b = over_ranks(
        [shard([1.0, 5.0], weights=[0.0, 0.0]), shard([2.0, 4.0], weights=[1.0, 1.0])], ddof=0, scale=False
    )
    assert (a.tolist(), b.tolist()) == ([-2.0, 2.0], [-1.0, 1.0])


# ---- masks, dtypes, aliases


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int64, torch.bfloat16, torch.float32])
def test_masks_of_any_dtype_select_alike(dtype):
    """I63, I65, I73: 1,000 ones in bfloat16 count as 1,000."""
    x = torch.randn(1500, generator=torch.Generator().manual_seed(5))
    mask = torch.arange(1500) % 3 != 0
    expected = alone_(x, mask)
    for junk in (NAN, math.inf, -math.inf, 3e38):
        assert_same_bits(alone_(torch.where(mask, x, junk), mask.to(dtype)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool])
def test_inputs_of_any_dtype_are_promoted(dtype):
    x = torch.tensor([0, 1, 1, 0, 1], dtype=dtype)
    got = alone_(x)
    assert got.dtype == torch.float32
    assert_as_good_as_serial(got.tolist(), reference.whiten(x.double().tolist(), [1] * 5))


@pytest.mark.parametrize("options", [{}, {"center": False, "scale": False}, {"scale": False, "shift_mean": False}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_unchanged_outputs_alias_nothing_and_have_no_graph(options, dtype):
    x = torch.tensor([1.0, 5.0, 2.0], dtype=dtype, requires_grad=True)
    mask, weights = torch.tensor([True, True, False]), torch.tensor([1.0, 2.0, 3.0])
    before = x.detach().clone(), mask.clone(), weights.clone()
    y = whiten(x, mask, all_gather=alone, ddof=0, weights=weights, **options)
    assert not y.requires_grad
    assert y.data_ptr() != x.data_ptr()
    y.fill_(9)
    assert all(map(torch.equal, (x.detach(), mask, weights), before))


def test_without_agreement_the_same_bits_and_still_one_collective():
    shards = [shard([1.0, 4.0, 2.0]), shard([]), shard([7.0, 8.0], [1, 0])]
    for a, b in zip(over_ranks(shards, agreement="off"), over_ranks(shards), strict=True):
        assert_same_bits(a, b)


# ---- failure, on all ranks alike


def errors(fn, n: int) -> list[str]:
    """What each of n ranks raised; all of them did, and CPInputError."""
    with pytest.raises(RankFailure) as failure:
        in_threads(fn, n, timeout=30)
    outcomes = failure.value.outcomes
    assert all(type(outcome.error) is CPInputError for outcome in outcomes), failure.value
    return [str(outcome.error) for outcome in outcomes]


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mask": torch.tensor([1.0, 0.5, 1.0])}, "token 1, mask is 0.5; expected 0 or 1"),
        ({"mask": torch.tensor([1, 1, 2])}, "token 2, mask is 2; expected 0 or 1"),
        ({"mask": torch.tensor([1.0, NAN, 0.0])}, "token 1, mask is nan; expected 0 or 1"),
        ({"mask": torch.ones(2)}, r"shape of mask is [2]; expected [3]"),
        ({"x": torch.ones(3, 1)}, r"shape of x is [3, 1]"),
        ({"weights": torch.ones(1)}, r"shape of weights is [1]; expected [3]"),
        ({"weights": torch.tensor([1.0, -1.0, 1.0])}, "token 1, weights is -1.0; expected"),
        ({"weights": torch.tensor([1.0, 1.0, NAN])}, "token 2, weights is nan; expected"),
        ({"ddof": 1}, "ddof is 1; expected 0 or 1, and 0 with weights"),
        ({"ddof": 2}, "ddof is 2; expected 0 or 1"),
        ({"eps": -1.0}, "eps is -1.0; expected a number that is at least 0"),
        ({"eps": NAN}, "eps is nan; expected"),
        ({"eps_mode": "floor"}, "eps_mode is 'floor'; expected one of"),
        ({"center": False, "shift_mean": False}, "shift_mean is False; expected True with center=False"),
        ({"scale": "false"}, "scale is 'false'; expected True or False"),
        ({"agreement": "Full"}, "agreement is 'Full'; expected 'full' or 'off'"),
        ({"x": [0.0, 1.0, 2.0]}, "x is a list; expected a tensor"),
        ({"mask": None}, "mask is a NoneType; expected a tensor"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_input_on_one_rank_is_the_same_error_on_all(bad, change, text):
    def fn(rank, all_gather):
        arguments = {"x": torch.arange(3.0), "mask": torch.ones(3), "weights": torch.ones(3), "ddof": 0}
        whiten(**(arguments | (change if rank == bad else {})), all_gather=all_gather)

    told = errors(fn, 3)
    assert len(set(told)) == 1
    assert f"rank {bad} of 3: " in told[0]
    assert text in told[0]


@pytest.mark.parametrize(
    "change",
    [{"ddof": 1}, {"eps": 1e-6}, {"eps_mode": "clamp"}, {"center": False}, {"shift_mean": False}, {"scale": False}],
)
def test_options_that_differ_between_ranks(change):
    def fn(rank, all_gather):
        whiten(torch.arange(3.0), torch.ones(3), all_gather=all_gather, **({"ddof": 0} | (change if rank else {})))

    told = errors(fn, 2)
    assert len(set(told)) == 1
    (name,) = change
    assert name in told[0]
    assert "rank 1 of 2" in told[0]


def test_weights_on_one_rank_only():
    def fn(rank, all_gather):
        weights = torch.ones(3) if rank else None
        whiten(torch.arange(3.0), torch.ones(3), all_gather=all_gather, ddof=0, weights=weights)

    told = errors(fn, 2)
    assert len(set(told)) == 1
    assert "weights is True; expected False" in told[0]


def test_junk_weights_at_masked_tokens_do_not_matter():
    """1 / (valid tokens) of a sample without any is inf."""
    got = alone_([1.0, 3.0, 5.0, 9.0], [1, 1, 0, 0], weights=[0.5, 0.5, math.inf, NAN], ddof=0)
    assert got.tolist() == [-1.0, 1.0, 0.0, 0.0]


def test_bad_input_of_one_rank_alone():
    with pytest.raises(CPInputError, match="token 1, mask is 3; expected 0 or 1"):
        alone_([1.0, 2.0], [1, 3])


def test_the_group_has_no_default():
    """I40: not the world, nor one process."""
    with pytest.raises(TypeError, match="all_gather"):
        whiten(torch.ones(2), torch.ones(2))
