"""Every golden case at its own cp_size and at 1, by both strategies, through the functions and through the module.

The inputs are float64, so that outputs are too and are compared with the float64 numbers of the cases to 2^-46 of the
sample's largest: a few roundings, nothing more.
"""

import pytest
import torch
from batches import STRATEGIES, Batch, Out, function, make, module, run
from helpers import assert_as_good_as_serial, assert_same_bits, golden_cases, per_sample

from cp_returns.baselines import group_advantage
from cp_returns.estimators import gae, reinforce_plus_plus
from cp_returns.kl import approx_kl
from cp_returns.module import ContextParallelReturns, ReturnsConfig
from cp_returns.scenario import make_layout
from cp_returns.simulate import in_threads
from cp_returns.whiten import whiten

FUNCTIONS = {"reinforce_plus_plus": reinforce_plus_plus, "gae": gae}
TOKEN, WHITEN, GROUP, KL = (
    golden_cases(*names) for names in (("reinforce_plus_plus", "gae"), ("whiten",), ("grpo", "rloo"), ("kl",))
)
both_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def each(cases: list[dict]):
    return pytest.mark.parametrize("case", cases, ids=[case["id"] for case in cases])


def close(got, expected) -> None:
    assert_as_good_as_serial(list(map(float, got)), expected, bits=46)


def batch_of(case: dict) -> Batch:
    samples = case["samples"]
    masks = [sample.get("mask", [1] * sample["response"]) for sample in samples]
    batch = make([(sample["total"] - sample["response"], sample["response"]) for sample in samples], masks)
    packed = {
        name: torch.tensor([x for row in per_sample(case, name) for x in row], dtype=torch.float64)
        for name in ("kl", "values", "token_rewards")
    }
    one = {
        name: torch.tensor([sample.get(name, 0.0) for sample in samples], dtype=torch.float64)
        for name in ("rewards", "bootstrap")
    }
    one["rewards"] = torch.tensor([sample.get("reward", 0.0) for sample in samples], dtype=torch.float64)
    return batch.change(**packed, **one)


def doors_of(case: dict):
    """The case as a call of the function and of the module, and the numbers that only a call takes."""
    params, numbers = dict(case["params"]), {}
    for name in ("gamma", "lam", "kl_coef"):
        if isinstance(params.get(name), list):
            numbers[name] = torch.tensor(params.pop(name), dtype=torch.float64)
    reads = ["kl", "rewards", "token_rewards"] + (["values", "bootstrap"] if case["estimator"] == "gae" else [])
    return numbers, [
        function("function", FUNCTIONS[case["estimator"]], *reads, **params),
        module("module", *reads, estimator=case["estimator"], **params),
    ]


@each(TOKEN)
def test_owners(case):
    totals, responses = ([sample[key] for sample in case["samples"]] for key in ("total", "response"))
    kind, multiple = case["layout"]["kind"], case["layout"]["multiple"]
    cut = make_layout(kind, totals, responses, case["cp_size"], multiple=multiple)
    assert [cut.token_owners(i).tolist() for i in range(len(totals))] == case["owners"]


@both_strategies
@each(TOKEN)
def test_token_estimators(case, strategy):
    batch, (numbers, doors) = batch_of(case), doors_of(case)
    layout = case["layout"]["kind"], case["layout"]["multiple"]
    for door in doors:
        alone, parts = (
            run(door, batch, cp_size, strategy, layout=layout, **numbers) for cp_size in (1, case["cp_size"])
        )
        for out in (alone, parts):
            for name, expected in case["expect"].items():
                for got, exact in zip(batch.rows(out.tokens[name]), expected, strict=True):
                    close(got, exact)
        if strategy == "gather":
            assert_equal_bits(parts, alone)


def assert_equal_bits(a: Out, b: Out) -> None:
    for name in b.tokens:
        assert_same_bits(a.tokens[name], b.tokens[name])


def rows_as_batch(rows: list[list[float]], masks: list[list[int]]) -> Batch:
    """Rows of numbers as a KL; with gamma 0 and coefficient -1 they are the returns."""
    x = torch.tensor([v for row in rows for v in row], dtype=torch.float64)
    return make([(2, len(row)) for row in rows], masks).change(kl=x)


@pytest.mark.parametrize("split", [True, False], ids=["its ranks", "one rank"])
@each(WHITEN)
def test_whiten(case, split):
    batch = rows_as_batch(case["x"], case["mask"])
    ranks = case["ranks"] if split else [0] * len(batch)
    params = dict(case["params"])
    by_sequence = params.pop("weight", "token") == "sequence"
    config = {"estimator": "reinforce_plus_plus", "gamma": 0.0, "kl_coef": -1.0, "whiten": True}
    config |= {f"whiten_{name}": value for name, value in params.items()}
    config |= {"whiten_weight": "sequence"} if by_sequence else {}

    def rank_fn(rank, all_gather):
        own = batch.pick([i for i, owner in enumerate(ranks) if owner == rank])
        x, mask = own.tokens["kl"], own.mask
        weights = torch.cat([m / m.sum() for m in own.rows(mask.double())]) if by_sequence else None
        by_function = whiten(x, mask, all_gather=all_gather, weights=weights, **params)
        by_module = ContextParallelReturns(ReturnsConfig(**config))(
            loss_masks=own.rows(mask),
            response_lengths=own.response,
            total_lengths=own.total,
            kl=own.rows(x),
            cp_group=all_gather.cp,
            dp_cp_group=all_gather,
        )
        return own.rows(by_function), by_module.advantages, by_module.returns

    of_ranks = in_threads(rank_fn, max(ranks) + 1, cp_size=1)
    places = [(rank, ranks[:i].count(rank)) for i, rank in enumerate(ranks)]
    unwhitened = batch.rows(torch.where(batch.mask, batch.tokens["kl"], 0.0))
    for (rank, place), expected, x in zip(places, case["expect"]["whitened"], unwhitened, strict=True):
        by_function, by_module, returns = (of[place] for of in of_ranks[rank])
        close(by_function, expected)
        close(by_module, expected)
        close(returns, x.tolist())


@both_strategies
@pytest.mark.parametrize("cp_size", [1, 2])
@each(GROUP)
def test_groups(case, cp_size, strategy):
    rewards = torch.tensor(case["rewards"], dtype=torch.float64)
    ids = torch.tensor(case["groups"])
    kept = torch.ones(len(ids)) if case["sample_mask"] is None else torch.tensor(case["sample_mask"])
    scale = "std" if case["estimator"] == "grpo" and case["params"].get("std", True) else "none"
    center = "mean" if case["estimator"] == "grpo" else "loo"
    close(group_advantage(rewards, ids, center=center, scale=scale, sample_mask=kept), case["expect"]["scalar"])
    batch = make([(3, 5)] * len(ids), [[1, 1, 0, 1, 0]] * len(ids))
    batch = batch.change(rewards=rewards, group_ids=ids, sample_mask=kept)
    door = module("module", "rewards", "group_ids", "sample_mask", estimator=case["estimator"], group_scale=scale)
    out = run(door, batch, cp_size, strategy)
    for row, scalar in zip(batch.rows(out.tokens["advantages"]), case["expect"]["scalar"], strict=True):
        assert_as_good_as_serial(row.tolist(), [scalar, scalar, 0.0, scalar, 0.0])  # float32: there is no token input


@both_strategies
@pytest.mark.parametrize("cp_size", [1, 2])
@each(KL)
def test_kl(case, cp_size, strategy):
    log_probs, ref, mask = (
        torch.tensor(case[key], dtype=torch.float64) for key in ("log_probs", "ref_log_probs", "mask")
    )
    kind = case["params"]["kind"]
    close(approx_kl(log_probs, ref, mask, kind=kind), case["expect"]["kl"])
    batch = make([(2, len(mask))], [case["mask"]]).change(log_probs=log_probs, ref_log_probs=ref)
    config = {"estimator": "reinforce_plus_plus", "gamma": 0.0, "kl_coef": -1.0, "kl": kind}
    out = run(module("module", "log_probs", "ref_log_probs", **config), batch, cp_size, strategy)
    close(out.tokens["returns"], case["expect"]["kl"])


def test_no_case_is_left_out():
    assert len(TOKEN) + len(WHITEN) + len(GROUP) + len(KL) == len(golden_cases()) == 41
