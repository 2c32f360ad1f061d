"""Group advantages against the oracle; bits that do not depend on the order of samples, on ranks or on other groups."""

import itertools
import math

import pytest
import torch
from helpers import assert_same_bits, golden_cases
from hypothesis import given
from hypothesis import strategies as st

from cp_returns import reference
from cp_returns.baselines import group_advantage
from cp_returns.errors import CPInputError
from cp_returns.simulate import RankFailure, in_threads

NAN = math.nan
SETTINGS = [
    {"center": center, "scale": scale, "ddof": ddof, "singleton": singleton}
    for center, scale, (ddof, singleton) in itertools.product(
        ("mean", "loo", "opo"), ("none", "std", "loo_std"), ((1, "zero"), (0, "raw"))
    )
]


def as_tensors(rewards, ids, sample_mask, lengths):
    return (
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(sample_mask, dtype=torch.bool),
        torch.tensor(lengths, dtype=torch.int64),
    )


def advantage(rewards, ids, sample_mask, lengths, **options):
    return group_advantage(rewards, ids, sample_mask=sample_mask, lengths=lengths, **options)


@pytest.mark.parametrize("case", golden_cases("grpo", "rloo"), ids=lambda case: case["id"])
def test_golden(case):
    grpo = {"center": "mean", "scale": "std" if case["params"].get("std", True) else "none"}
    options = grpo if case["estimator"] == "grpo" else {"center": "loo"}
    mask = None if case["sample_mask"] is None else torch.tensor(case["sample_mask"])
    rewards = torch.tensor(case["rewards"], dtype=torch.float64)
    got = group_advantage(rewards, torch.tensor(case["groups"]), sample_mask=mask, **options)
    assert got.tolist() == pytest.approx(case["expect"]["scalar"], rel=1e-14, abs=1e-15)


rewards = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 0.1, NAN]),
    st.floats(-10, 10).map(lambda x: round(x, 3)),
    st.sampled_from([1e6, -1e6]),
)
batches = st.lists(
    st.tuples(rewards, st.sampled_from([-(2**63), -1, 0, 2**62]), st.integers(0, 9).map(bool), st.integers(0, 50)),
    max_size=24,
)


@given(batches, st.sampled_from(SETTINGS))
def test_equals_the_oracle(batch, settings):
    x, ids, mask, lengths = ([row[i] for row in batch] for i in range(4))
    expected = reference.group_advantage(x, ids, sample_mask=mask, lengths=lengths, **settings)
    got = advantage(*as_tensors(x, ids, mask, lengths), **settings).tolist()
    # Centring 1e6 leaves errors of 1e-10, and rewards 1e-3 apart have no smaller a scale.
    assert got == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(batches, st.sampled_from(SETTINGS), st.randoms(use_true_random=False))
def test_permuting_the_batch_permutes_the_bits(batch, settings, random):
    tensors = as_tensors(*([row[i] for row in batch] for i in range(4)))
    order = torch.tensor(random.sample(range(len(batch)), len(batch)), dtype=torch.int64)
    got = advantage(*tensors, **settings)
    assert_same_bits(got[order], advantage(*(t[order] for t in tensors), **settings))


@given(batches, batches, st.sampled_from(SETTINGS))
def test_other_groups_and_excluded_members_change_no_bit(batch, others, settings):
    tensors = as_tensors(*([row[i] for row in batch] for i in range(4)))
    expected = advantage(*tensors, **settings)
    elsewhere = as_tensors(*([row[i] for row in others] for i in range(4)))
    elsewhere[1][:] = 7  # a group of their own
    mixed = [torch.cat([b, a]) for a, b in zip(tensors, elsewhere, strict=True)]
    assert_same_bits(advantage(*mixed, **settings)[len(others) :], expected)
    excluded = as_tensors(*([row[i] for row in batch] for i in range(4)))
    excluded[2][:] = False
    mixed = [torch.cat([b, a]) for a, b in zip(tensors, excluded, strict=True)]
    got = advantage(*mixed, **settings)
    assert_same_bits(got[len(batch) :], expected)
    assert (got[: len(batch)] == 0).all()


@given(batches, st.integers(1, 4), st.data())
def test_groups_spread_over_ranks_with_different_numbers_of_samples(batch, ranks, data):
    settings = data.draw(st.sampled_from(SETTINGS))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), min_size=ranks - 1, max_size=ranks - 1)))
    bounds = list(itertools.pairwise([0, *cuts, len(batch)]))
    tensors = as_tensors(*([row[i] for row in batch] for i in range(4)))

    def on_rank(rank, all_gather):
        begin, end = bounds[rank]
        return advantage(*(t[begin:end] for t in tensors), **settings, all_gather=all_gather)

    assert_same_bits(torch.cat(in_threads(on_rank, ranks)), advantage(*tensors, **settings))


def test_two_ranks_that_send_the_same_samples_are_two_members_each():
    def on_rank(rank, all_gather):
        return group_advantage(
            torch.tensor([0.0, 1.0]), torch.tensor([5, 5]), scale="std", eps=0.0, all_gather=all_gather
        )

    # Four members 0 1 0 1: std = sqrt(1/3)
    for got in in_threads(on_rank, 2):
        assert got.tolist() == pytest.approx([-(0.75**0.5), 0.75**0.5], rel=1e-6)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_equal_rewards_give_exactly_zero(settings):
    for n in range(2, 30):  # at 3, 6, 7, 12, .. the mean of n float64 0.1 is not 0.1
        x = torch.full((n,), 0.1, dtype=torch.float64)
        got = advantage(x, torch.zeros(n, dtype=torch.int64), None, torch.arange(n) + 1, **settings)
        assert got.tolist() == [0.0] * n


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_ties_have_equal_bits_and_sums_no_order(settings):
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        x = torch.tensor([0.1, 0.1, 0.1, 0.3, 0.7, 0.9], dtype=torch.float64)[
            torch.randint(6, (9,), generator=generator)
        ]
        ids, lengths = torch.zeros(9, dtype=torch.int64), torch.randint(1, 1000, (9,), generator=generator)
        order = torch.randperm(9, generator=generator)
        got = advantage(x, ids, None, lengths, **settings)
        assert_same_bits(got[order], advantage(x[order], ids, None, lengths[order], **settings))
        for value in x.unique():
            assert len(got[x == value].unique()) == 1


def test_low_precision_and_integer_rewards_are_centred_in_full_precision():
    ids = torch.zeros(4, dtype=torch.int64)
    got = group_advantage(torch.tensor([2, 2, 2, 2.015625], dtype=torch.bfloat16), ids)
    assert got.dtype == torch.float32
    assert got.tolist() == [-0.00390625, -0.00390625, -0.00390625, 0.01171875]
    got = group_advantage(torch.tensor([1, 0, 0, 0]), ids, center="loo")
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3], rel=1e-7)
    assert group_advantage(torch.ones(4, dtype=torch.float64), ids).dtype == torch.float64


def test_missing_reward_excluded_member_and_empty_response_are_no_members():
    x, ids = torch.tensor([2.0, 5.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.int64)
    for mask in ([1, 0, 1, 1], [True, False, True, True], [1.0, 0.0, 1.0, 1.0]):
        assert group_advantage(x, ids, sample_mask=torch.tensor(mask)).tolist() == [1, 0, -1, 0]
    assert group_advantage(x, ids, lengths=torch.tensor([3, 0, 1, 1])).tolist() == [1, 0, -1, 0]
    x[1] = NAN
    assert group_advantage(x, ids).tolist() == [1, 0, -1, 0]
    assert group_advantage(x, ids, sample_mask=torch.tensor([1, 1, 0, 0])).tolist() == [0, 0, 0, 0]
    assert group_advantage(x, ids, sample_mask=torch.tensor([1, 1, 0, 0]), singleton="raw").tolist() == [2, 0, 0, 0]


def test_leave_one_out_scale_divides_only_where_the_others_differ():
    ids = torch.zeros(4, dtype=torch.int64)
    x = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    got = group_advantage(x, ids, center="loo", scale="loo_std")
    third = -1 / 3 / (3**-0.5 + 1e-6)
    assert got.tolist() == pytest.approx([third, 1.0, third, third], rel=1e-14)
    # Beside an outlier the scale of the others is theirs, not the rounding of the outlier's square.
    x = torch.tensor([1e9, 100_000.25, 100_000.5, 100_000.75], dtype=torch.float64)
    got = group_advantage(x, ids, center="loo", scale="loo_std")
    assert got[0].item() == pytest.approx((1e9 - 100_000.5) / (0.25 + 1e-6), rel=1e-12)


def test_a_group_of_thousands_is_as_exact_as_a_small_one():
    x = torch.arange(5000, dtype=torch.float64) / 7 + 1e4
    got = group_advantage(x.flip(0), torch.full((5000,), -3), scale="std")
    exact = reference.std(x.tolist(), 1) + 1e-6
    mean = math.fsum(x.tolist()) / 5000
    assert got.flip(0).tolist() == pytest.approx([(v - mean) / exact for v in x.tolist()], rel=1e-9, abs=1e-12)


def test_no_graph_no_alias_inputs_unchanged_and_an_empty_batch():
    x = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 0, 1])
    got = group_advantage(x, ids, singleton="raw")
    assert not got.requires_grad
    assert got[2] == 5
    got.fill_(9.0)
    assert x.tolist() == [1, 2, 5]
    assert ids.tolist() == [0, 0, 1]
    for settings in SETTINGS:
        none = torch.empty(0)
        assert advantage(none, none.long(), None, none.long(), **settings).shape == (0,)


ONE_GROUP = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"center": "median"}, "center is 'median'; expected one of"),
        ({"eps": math.nan}, "eps is nan; expected a number that is at least 0"),
        ({"eps": -1.0}, "eps is -1.0; expected a number that is at least 0"),
        ({"rewards": torch.ones(2).to(torch.complex64)}, "dtype of rewards is torch.complex64"),
        ({"lengths": torch.tensor([1.0, math.inf])}, "sample 1, lengths is inf; expected a number"),
        ({"scale": "var"}, "scale is 'var'; expected one of"),
        ({"singleton": "one"}, "singleton is 'one'; expected one of"),
        ({"ddof": 2}, "ddof is 2; expected one of 0, 1"),
        ({"center": "opo"}, "lengths is None; expected the valid tokens of each sample"),
        ({"group_ids": torch.zeros(2)}, "group_ids is torch.float32; expected int64"),
        ({"group_ids": ONE_GROUP[:1]}, r"shape of group_ids is \[1\]; expected \[2\]"),
        ({"lengths": torch.ones(3)}, r"shape of lengths is \[3\]; expected \[2\]"),
        ({"sample_mask": torch.tensor([1, 0.5])}, "sample 1, sample_mask is 0.5; expected 0 or 1"),
        ({"rewards": torch.tensor([math.inf, 1.0])}, "sample 0, reward is inf; expected a finite number"),
    ],
)
def test_wrong_calls_say_what_is_wrong(change, message):
    call = {"rewards": torch.ones(2), "group_ids": ONE_GROUP, **change}
    with pytest.raises(CPInputError, match=message):
        group_advantage(call.pop("rewards"), call.pop("group_ids"), **call)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rewards": torch.tensor([1.0, -math.inf])}, "sample 1, reward is -inf; expected a finite number"),
        ({"lengths": torch.ones(3)}, "shape of lengths is [3]; expected [2], one a sample"),
        ({"center": "median"}, "center is 'median'; expected one of"),
        ({"rewards": [1.0, 1.0]}, "rewards is a list; expected a tensor, one number a sample"),
        ({"eps": 1e-4}, "eps is 0.0001; expected 1e-06, as on rank 0"),
    ],
)
def test_a_wrong_call_on_one_rank_is_the_same_error_on_all(wrong, message):
    def on_rank(rank, all_gather):
        given = {"rewards": torch.ones(2), "group_ids": ONE_GROUP, **(wrong if rank == 1 else {})}
        return group_advantage(given.pop("rewards"), given.pop("group_ids"), **given, all_gather=all_gather)

    with pytest.raises(RankFailure) as failure:
        in_threads(on_rank, 3)
    errors = [outcome.error for outcome in failure.value.outcomes]
    assert [type(e) for e in errors] == [CPInputError] * 3
    (text,) = {str(e) for e in errors}
    assert text.startswith(f"rank 1 of 3: {message}")


@pytest.mark.parametrize(("samples", "collectives"), [(3, 1), (500, 1), (2000, 2)])
def test_one_collective_unless_the_samples_do_not_fit_in_it(samples, collectives):
    calls = []

    def all_gather(x):
        calls.append(x.numel())
        return x[None]

    group_advantage(torch.arange(samples), torch.zeros(samples, dtype=torch.int64), all_gather=all_gather)
    assert len(calls) == collectives


def test_an_excluded_infinite_reward_is_not_read():
    x = torch.tensor([1.0, math.inf, 3.0])
    got = group_advantage(x, torch.zeros(3, dtype=torch.int64), sample_mask=torch.tensor([1, 0, 1]))
    assert got.tolist() == [-1, 0, 1]
