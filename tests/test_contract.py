"""One contract, run over every estimator: masks, NaN, left-out samples, dtypes, order, CP. A new one cannot skip it.

Every call through `run` also asserts what holds of all: no graph, no shared memory, unchanged inputs, float32 or
float64.
"""

import inspect
import math
from functools import cache

import pytest
import torch
from batches import DOORS, FUNCTIONS, MODULES, STRATEGIES, Batch, Door, Out, assert_clean, make, run
from helpers import assert_same_bits

import cp_returns
from cp_returns import config, module
from cp_returns.simulate import RankFailure

SIZES = (1, 2, 3, 5)
NAN, INF = math.nan, math.inf
# prompt and response lengths: many blocks of the scan, shorter than the pieces, none at all
SHAPES = [(3, 40), (1, 7), (5, 0), (2, 290), (9, 1), (4, 33), (30, 16), (1, 16), (2, 20), (70, 9), (3, 16)]
TAIL = 8  # ends masked
DROPPED = {"no token": 2, "no valid token": 5, "sample_mask 0": 6, "NaN reward": 7}


def contract_batch(seed: int = 0) -> Batch:
    batch = make(SHAPES, seed=seed)
    mask = batch.mask.clone()
    rows = batch.rows(mask)
    rows[5][:] = False
    rows[TAIL][-6:] = False
    rows[TAIL][3] = True
    for row in rows[3], rows[9]:
        row[:2] = False
    rows[4][:] = True
    rewards, kept = batch.samples["rewards"].clone(), torch.ones(len(batch))
    rewards[7] = NAN
    kept[6] = 0
    groups = torch.tensor([4, -1, 4, 2**40, 4, -1, 2**40, 4, -1, 4, 2**40])
    rewards_of_tokens = torch.where(mask, batch.tokens["token_rewards"], 0.0)
    return batch.change(mask=mask, rewards=rewards, sample_mask=kept, group_ids=groups, token_rewards=rewards_of_tokens)


BATCH = contract_batch()
COUNTED = torch.cat([torch.full((n,), i not in DROPPED.values()) for i, n in enumerate(BATCH.response)])
every_door = pytest.mark.parametrize("door", DOORS, ids=str)


@cache
def plain(door: Door, cp_size: int, strategy: str) -> Out:
    return run(door, BATCH, cp_size, strategy)


def every_way(door: Door, sizes=SIZES):
    """(cp_size, strategy, what the batch gives there)."""
    for cp_size in sizes:
        for strategy in STRATEGIES if cp_size > 1 else ("gather",):
            yield cp_size, strategy, plain(door, cp_size, strategy)


def tokens_of(door: Door, out: Out, *, unwhitened: bool = False) -> dict[str, torch.Tensor]:
    return {name: x for name, x in out.tokens.items() if not (unwhitened and door.whitens and name == "advantages")}


def assert_equal(door: Door, a: Out, b: Out, where: torch.Tensor | None = None, **which: bool) -> None:
    """Bit for bit, at the tokens of `where`."""
    parts = tokens_of(door, b, **which)
    assert parts.keys() <= a.tokens.keys()
    for name, x in parts.items():
        assert_same_bits(*((y if where is None else y[where]) for y in (a.tokens[name], x)))


def test_no_estimator_is_left_out():
    public = [value for value in vars(cp_returns).values() if inspect.isfunction(value)]
    estimators = {fn.__name__ for fn in public if fn.__module__ == cp_returns.gae.__module__}
    assert estimators == {door.estimator for door in FUNCTIONS}
    assert set(config.ESTIMATORS) == {d.estimator for d in MODULES}
    catch_all = [
        fn.__name__
        for fn in (*public, module.ContextParallelReturns.forward)
        if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspect.signature(fn).parameters.values())
    ]
    assert not catch_all, "a catch-all argument swallows what an estimator does not use"


# masks


@every_door
def test_masked_slots_may_hold_anything(door):
    """NaN, inf, -inf and 3e38 there change no bit; a masked token reward may be NaN (any other is an error)."""
    junk = torch.tensor([NAN, INF, -INF, 3e38]).repeat(len(BATCH.mask))[: len(BATCH.mask)]
    outside = ~BATCH.mask
    poison = {name: torch.where(outside, junk, x) for name, x in BATCH.tokens.items()}
    poison["token_rewards"] = torch.where(outside, NAN, BATCH.tokens["token_rewards"])
    if "use" in door.name:  # masked values are used there, but not those of samples that are left out
        left_out = torch.cat([torch.full((n,), i in (6, 7)) for i, n in enumerate(BATCH.response)])
        poison["values"] = torch.where(left_out, junk, BATCH.tokens["values"])
    batch = BATCH.change(**poison)
    read = [name for name in door.reads if name in poison]
    assert not any(poison[name].isfinite().all() for name in read)
    for cp_size, strategy, exact in every_way(door):
        assert_equal(door, run(door, batch, cp_size, strategy), exact)


@every_door
def test_masked_outputs_are_zero_and_valid_ones_are_not(door):
    valid = BATCH.mask & COUNTED
    for _, _, out in every_way(door):
        for name, x in out.tokens.items():
            assert not x[~valid].any(), f"{name} at a masked token"
            assert x[valid].isfinite().all()
            assert (x[valid] != 0).double().mean() > 0.5
        if "masks" in out.tokens:
            assert torch.equal(out.tokens["masks"], valid)


@every_door
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.float64], ids=str)
def test_a_mask_of_any_dtype(door, dtype):
    cp_size, strategy = {torch.uint8: (1, "gather"), torch.int64: (2, "carry")}.get(dtype, (3, "gather"))
    kept = BATCH.samples["sample_mask"].to(dtype)
    batch = BATCH.change(mask=BATCH.mask.to(dtype), sample_mask=kept)
    assert_equal(door, run(door, batch, cp_size, strategy), plain(door, cp_size, strategy))


# samples


@every_door
@pytest.mark.parametrize("what", DROPPED)
def test_a_sample_left_out_changes_no_other(door, what):
    """Its reward, its tokens and their number reach no other sample, by any way; without it the others are the same."""
    i = DROPPED[what]
    others = torch.cat([torch.full((n,), j != i) for j, n in enumerate(BATCH.response)])
    changed = {name: torch.where(others, x, 7 * x + 1) for name, x in BATCH.tokens.items()}
    changed["token_rewards"] = torch.where(BATCH.mask, changed["token_rewards"], 0.0)
    one = {name: BATCH.samples[name].clone() for name in ("rewards", "baselines", "bootstrap")}
    for x in one.values():
        x[i] = NAN if what == "NaN reward" and x is one["rewards"] else 1e6
    batch = BATCH.change(**changed, **one)
    for cp_size, strategy, exact in every_way(door, (1, 3)):
        assert_equal(door, run(door, batch, cp_size, strategy), exact)
    rest = BATCH.pick([j for j in range(len(BATCH)) if j != i])
    exact = plain(door, 1, "gather")
    without = run(door, rest)
    for name, x in tokens_of(door, without, unwhitened=True).items():
        assert_same_bits(x, exact.tokens[name][others])
    if door.whitens:  # the sums of the population are the same numbers in another order
        torch.testing.assert_close(
            without.tokens["advantages"], exact.tokens["advantages"][others], rtol=1e-6, atol=1e-6
        )


@every_door
def test_samples_left_out_are_counted(door):
    for _, _, out in every_way(door, (1, 5)):
        for info in out.infos:
            assert (info.samples, info.fully_masked, info.missing_rewards) == (len(BATCH), len(DROPPED), 1)
            assert info.valid_tokens == int((BATCH.mask & COUNTED).sum())


@every_door
@pytest.mark.parametrize("cp_size", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_empty_batch(door, cp_size, strategy):
    empty = BATCH.pick([])
    for info in run(door, empty, cp_size, strategy).infos:
        assert (info.samples, info.valid_tokens, info.fully_masked, info.missing_rewards) == (0, 0, 0, 0)
        assert info.kl_mean == 0


@every_door
def test_nothing_but_left_out_samples(door):
    batch = BATCH.pick(DROPPED.values())
    for cp_size, strategy in [(1, "gather"), (3, "gather"), (3, "carry")]:
        for x in run(door, batch, cp_size, strategy).tokens.values():
            assert not x.any()


# order and company


@every_door
def test_permuting_the_batch_permutes_the_bits(door):
    order = [7, 3, 10, 0, 9, 2, 1, 8, 6, 5, 4]
    for cp_size, strategy, exact in every_way(door, (1, 2, 5)):
        got = run(door, BATCH.pick(order), cp_size, strategy)
        for name, x in tokens_of(door, exact, unwhitened=True).items():
            expected = torch.cat([BATCH.rows(x)[i] for i in order])
            assert_same_bits(got.tokens[name], expected)
        if door.whitens:
            x = torch.cat([BATCH.rows(exact.tokens["advantages"])[i] for i in order])
            torch.testing.assert_close(got.tokens["advantages"], x, rtol=1e-6, atol=1e-6)


@every_door
@pytest.mark.parametrize("other", ["other numbers", "NaN", "inf", "longer"])
def test_changing_one_sample_changes_no_other(door, other):
    """Group members and whitening apart. A non-finite number spoils its own sample only."""
    i = 3
    numbers, batch = {}, contract_batch(seed=1)
    order = [*range(i), len(BATCH) + i, *range(i + 1, len(BATCH))]
    if other == "longer":
        batch = make([*SHAPES[:i], (2, 411), *SHAPES[i + 1 :]], seed=1)
        batch = batch.change(group_ids=BATCH.samples["group_ids"])
    elif other != "other numbers":
        numbers = {"nonfinite": "propagate"}
        batch = batch.change(**{name: torch.where(batch.mask, float(other), x) for name, x in batch.tokens.items()})
    batch = both(BATCH, batch).pick(order)
    same = BATCH.samples["group_ids"] != BATCH.samples["group_ids"][i]
    kept = [j for j in range(len(BATCH)) if j != i and (same[j] or not door.by_groups)]
    for cp_size, strategy, exact in every_way(door, (1, 3)):
        got = run(door, batch, cp_size, strategy, **numbers)
        for name, x in tokens_of(door, exact, unwhitened=True).items():
            for j in kept:
                assert_same_bits(batch.rows(got.tokens[name])[j], BATCH.rows(x)[j])


def both(a: Batch, b: Batch) -> Batch:
    return Batch(
        a.total + b.total,
        a.response + b.response,
        torch.cat([a.mask, b.mask]),
        {name: torch.cat([x, b.tokens[name]]) for name, x in a.tokens.items()},
        {name: torch.cat([x, b.samples[name]]) for name, x in a.samples.items()},
    )


# numbers


@every_door
def test_every_cp_size_and_layout_gives_the_result_of_one_rank(door):
    """gather bit for bit; carry within 2^-23 of the sample's largest. Whitened: of the largest whitened number."""
    exact = plain(door, 1, "gather")
    ways = [(cp_size, strategy, ("zigzag", 1)) for cp_size in SIZES[1:] for strategy in STRATEGIES]
    ways += [(2, strategy, layout) for strategy in STRATEGIES for layout in [("zigzag", 4), ("contiguous", 1)]]
    values = BATCH.tokens["values"] * BATCH.mask if door.estimator == "gae" else torch.zeros(len(BATCH.mask))
    for cp_size, strategy, layout in ways:
        usual = layout == ("zigzag", 1)
        out = plain(door, cp_size, strategy) if usual else run(door, BATCH, cp_size, strategy, layout=layout)
        for name, x in exact.tokens.items():
            whitened = door.whitens and name == "advantages"
            if (strategy == "gather" and not whitened) or name == "masks":
                assert_same_bits(out.tokens[name], x)
                continue
            for got, row, v in zip(*(BATCH.rows(y) for y in (out.tokens[name], x, values)), strict=True):
                largest = x.abs().max() if whitened else torch.cat([row, v, row.new_zeros(1)]).abs().max()
                off = (got.double() - row.double()).abs()
                assert (off <= largest * (1e-6 if whitened else 2.0**-23)).all(), (cp_size, strategy, layout, name)


@every_door
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.int8], ids=str)
def test_low_precision_and_integers_are_promoted_to_float32(door, dtype):
    batch = BATCH.to(dtype)
    batch = batch.change(token_rewards=torch.where(batch.mask, batch.tokens["token_rewards"], 0))
    for cp_size, strategy in [(1, "gather"), (3, "gather"), (2, "carry")]:
        got, exact = (run(door, b, cp_size, strategy) for b in (batch, batch.to(torch.float32)))
        assert {x.dtype for name, x in got.tokens.items() if name != "masks"} == {torch.float32}
        assert_equal(door, got, exact)


@every_door
def test_one_float64_input_makes_float64_outputs(door):
    reads = [name for name in door.reads if name in BATCH.tokens]
    for name in reads:
        batch = BATCH.change(**{name: BATCH.tokens[name].double()})
        for cp_size, strategy in [(1, "gather"), (3, "gather"), (2, "carry")]:
            got, exact = run(door, batch, cp_size, strategy), plain(door, cp_size, strategy)
            for key, x in tokens_of(door, got).items():
                if key != "masks":
                    assert x.dtype == torch.float64
                    torch.testing.assert_close(x.float(), exact.tokens[key], rtol=2e-6, atol=2e-6)
    if not reads:
        assert plain(door, 1, "gather").tokens["returns"].dtype == torch.float32


@every_door
def test_no_graph_from_inputs_that_require_grad(door):
    tokens = {name: x.clone().requires_grad_() for name, x in BATCH.tokens.items()}
    samples = {name: BATCH.samples[name].clone().requires_grad_() for name in ("rewards", "baselines", "bootstrap")}
    for cp_size, strategy in [(1, "gather"), (2, "gather"), (2, "carry")]:
        got = run(door, BATCH.change(**tokens, **samples), cp_size, strategy)
        assert_equal(door, got, plain(door, cp_size, strategy))


def test_the_checks_of_every_call_can_fail():
    x, grad = torch.ones(3), torch.ones(3, requires_grad=True)
    inputs = [(x, x.clone())]
    assert_clean({"returns": torch.ones(3), "advantages": torch.ones(3)}, inputs, [1, 2])
    for bad in (x, x[1:], torch.ones(2), torch.ones(3).half(), grad * 1, [torch.ones(2), torch.ones(1)]):
        with pytest.raises(AssertionError):
            assert_clean({"returns": bad}, inputs, [1, 2])
    shared = torch.ones(3)
    with pytest.raises(AssertionError, match="shares memory"):
        assert_clean({"returns": shared, "advantages": shared}, inputs, [1, 2])
    with pytest.raises(AssertionError, match="bits differ"):
        assert_clean({"returns": torch.ones(3)}, [(x, torch.zeros(3))], [1, 2])


@every_door
def test_calls_repeat_bit_for_bit_whatever_the_matmul_precision(door):
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "medium"):
            torch.set_float32_matmul_precision(precision)
            for cp_size, strategy in [(1, "gather"), (3, "carry")]:
                assert_equal(door, run(door, BATCH, cp_size, strategy), plain(door, cp_size, strategy))
    finally:
        torch.set_float32_matmul_precision(before)


# failure


@every_door
def test_a_non_finite_number_at_a_valid_token_is_an_error_that_names_it(door):
    assert BATCH.rows(BATCH.mask)[9][5]
    for name in door.reads:
        if name in BATCH.tokens:
            x = BATCH.tokens[name].clone()
            BATCH.rows(x)[9][5] = NAN if name == "kl" else INF
            with pytest.raises(RankFailure) as caught:
                run(door, BATCH.change(**{name: x}), 3, "carry")
            texts = {str(outcome.error) for outcome in caught.value.outcomes}
            assert len(texts) == 1
            what = "kl" if "log_probs" in name else name
            assert f"sample 9, token 5, {what} is" in texts.pop()


@every_door
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mask": 2}, "sample 9, token 5, loss_mask is 2"),
        ({"mask": 0.5}, "sample 9, token 5, loss_mask is 0.5"),
        ({"rewards": INF}, "sample 9, reward is inf"),
        ({"sample_mask": 0.5}, "sample 9, sample_mask is 0.5"),
    ],
    ids=["mask", "soft mask", "reward", "sample_mask"],
)
def test_what_is_never_allowed_is_named(door, change, text):
    ((name, value),) = change.items()
    x = (BATCH.mask.to(type(value)) if name == "mask" else BATCH.samples[name]).clone()
    if name == "mask":
        BATCH.rows(x)[9][5] = value
    else:
        x[9] = value
    with pytest.raises(RankFailure) as caught:
        run(door, BATCH.change(**{name: x}), 2)
    assert all(text in str(outcome.error) for outcome in caught.value.outcomes), caught.value
