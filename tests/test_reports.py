"""One small test for each public report about returns, advantages, whitening and baselines; its id is in the name.

The ids and the expected numbers are those of the log of reports that this library was built from.
"""

import inspect
import math

import pytest
import torch
from batches import STRATEGIES, Batch, function, make, module, run
from helpers import assert_same_bits

from cp_returns.baselines import group_advantage
from cp_returns.config import ReturnsConfig
from cp_returns.estimators import gae, reinforce_plus_plus
from cp_returns.kl import approx_kl
from cp_returns.module import ContextParallelReturns
from cp_returns.simulate import RankFailure
from cp_returns.whiten import whiten

NAN, INF = math.nan, math.inf
RF = function("rf++", reinforce_plus_plus, "kl", "token_rewards", "rewards")
GAE = function("gae", gae, "kl", "token_rewards", "rewards", "values", "bootstrap")


def of(mask, reward=0.0, prompt=3, **tokens) -> Batch:
    """One sample in float64."""
    batch = make([(prompt, len(mask))], [mask])
    zeros = {name: [0.0] * len(mask) for name in batch.tokens} | tokens
    packed = {name: torch.tensor(x, dtype=torch.float64) for name, x in zeros.items()}
    return batch.change(**packed, rewards=torch.tensor([reward], dtype=torch.float64), bootstrap=torch.zeros(1))


def returns(
    batch: Batch, cp_size: int = 1, strategy: str = "gather", door=RF, part="returns", **numbers
) -> list[float]:
    return run(door, batch, cp_size, strategy, **numbers).tokens[part].tolist()


RF_HALF = {"gamma": 0.5, "kl_coef": 0.0}
# id, door, one sample, numbers, expected: the table is what "[mask] -> output" means here
TABLE = [
    ("I20", RF, of([1, 0, 1], 2.0, kl=[1, 5, 1]), {"gamma": 0.5, "kl_coef": 0.1}, [0.375, 0, 1.9]),
    ("I20 500", RF, of([1, 0, 1], 2.0, kl=[1, 500, 1]), {"gamma": 0.5, "kl_coef": 0.1}, [0.375, 0, 1.9]),
    ("I22", RF, of([1, 0, 0, 1, 1], 3.0), {"gamma": 1.0, "kl_coef": 0.0}, [3, 0, 0, 3, 3]),
    ("I23 token", RF, of([1, 0, 0, 1], 1.0), RF_HALF | {"clock": "token"}, [0.125, 0, 0, 1]),
    ("I23 trainable", RF, of([1, 0, 0, 1], 1.0), RF_HALF | {"clock": "trainable"}, [0.5, 0, 0, 1]),
    ("I24", GAE, of([1, 1, 0], 1.0), {"gamma": 0.0, "lam": 1.0}, [0, 1, 0]),
    ("I33 tail", RF, of([1, 1, 0, 0], 1.0), RF_HALF, [0.5, 1, 0, 0]),
    ("I33 middle", RF, of([1, 0, 0, 1], 1.0), RF_HALF, [0.125, 0, 0, 1]),
    ("I33 alternating", RF, of([1, 0, 1, 0], 1.0), RF_HALF, [0.25, 0, 1, 0]),
    ("I33 all zero", RF, of([0, 0, 0], 1.0), RF_HALF, [0, 0, 0]),
    ("I34", GAE, of([1, 1], 1.0, values=[0.5, 0.25]).change(bootstrap=torch.tensor([2.0])), {"gamma": 0.5, "lam": 0.0},
     [-0.375, 1.75]),
    ("I34 nan", GAE, of([1, 1], 1.0, values=[0.5, 0.25]).change(bootstrap=torch.tensor([NAN])),
     {"gamma": 0.5, "lam": 0.0}, [-0.375, 0.75]),
    ("I111", RF, of([1, 1, 0, 1, 1], 1.0), RF_HALF | {"clock": "turn"}, [0.5, 0.5, 0, 1, 1]),
    ("I113", RF, of([1, 1, 0, 1, 1], token_rewards=[0, 2, 0, 0, 3]), {"gamma": 1.0, "kl_coef": 0.0}, [5, 5, 0, 3, 3]),
    ("I114", RF, of([1, 1, 1], 1.0, token_rewards=[4, 0, 2]), RF_HALF, [4.75, 1.5, 3]),
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize(
    ("door", "batch", "numbers", "expected"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_the_number_that_the_report_asks_for(door, batch, numbers, expected, cp_size, strategy):
    part = "advantages" if door is GAE else "returns"
    assert returns(batch, cp_size, strategy, door, part, **numbers) == pytest.approx(expected, abs=1e-15)


def test_I21_a_named_test_pins_each_report():
    """The fix of I20 was lost in a fork because no test pinned it: the id stands in this file."""
    assert {row[0].split()[0] for row in TABLE} >= {"I20", "I22", "I23", "I24"}


def test_I24_trainable_gae_over_a_gap_is_gae_on_the_kept_tokens():
    numbers = {"gamma": 0.9, "lam": 0.8}
    gap = returns(of([1, 0, 1], 1.0, values=[0.5, 9.0, 0.25]), door=GAE, part="advantages", **numbers)
    kept = returns(of([1, 1], 1.0, values=[0.5, 0.25]), door=GAE, part="advantages", **numbers)
    assert [gap[0], gap[2]] == kept


@pytest.mark.parametrize("clock", ["token", "trainable", "turn"])
def test_I26_junk_in_masked_slots_leaves_valid_outputs_bitwise_unchanged(clock):
    mask = [0, 1, 1, 0, 1, 0]
    v, kl = [7.0, 0.5, -1.0, 3.0, 0.25, 2.0], [1.0, -0.5, 0.25, 9.0, 2.0, 1.0]
    junk = [x if m else j for x, m, j in zip(v, mask, [NAN, 0, 0, INF, 0, 3e38], strict=True)]
    junk_kl = [x if m else j for x, m, j in zip(kl, mask, [-INF, 0, 0, NAN, 0, 1e30], strict=True)]
    numbers = {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.1, "clock": clock}
    plain, other = (run(GAE, of(mask, 1.0, values=a, kl=b), **numbers) for a, b in ((v, kl), (junk, junk_kl)))
    for part in plain.tokens:
        assert_same_bits(other.tokens[part], plain.tokens[part])


@pytest.mark.parametrize("mask", [[0, 1, 1], [1, 0, 1], [1, 1, 0]], ids=["start", "middle", "end"])
def test_I27_the_next_value_is_that_of_the_next_valid_token(mask):
    values = [0.5 if m else 77.0 for m in mask]
    got = returns(of(mask, 1.0, values=values), door=GAE, part="advantages", gamma=1.0, lam=0.0)
    assert [a for a, m in zip(got, mask, strict=True) if m] == [0.0, 0.5]


def test_I29_a_sample_without_a_valid_token_moves_nobody():
    batch = make([(3, 2), (3, 2), (3, 0), (3, 2)], [[1, 1], [0, 0], [], [1, 1]])
    batch = batch.change(rewards=torch.tensor([1.0, 50.0, -7.0, 0.0]), group_ids=torch.zeros(4, dtype=torch.int64))
    out = run(module("dr_grpo", "rewards", "group_ids", estimator="dr_grpo", whiten=True), batch)
    assert out.tokens["returns"].tolist() == [0.5, 0.5, 0, 0, -0.5, -0.5]
    assert out.tokens["advantages"].tolist() == pytest.approx(
        [0.866025, 0.866025, 0, 0, -0.866025, -0.866025], abs=1e-6
    )
    assert (out.infos[0].fully_masked, out.infos[0].whitening.population) == (2, 4)


def test_I30_one_scalar_a_sample_not_a_tensor_of_tokens():
    with pytest.raises(ValueError, match=r"rewards holds a tensor of shape \[2\]; expected one number a sample"):
        call(estimator="dr_grpo", rewards=[torch.ones(2), torch.ones(2)], group_ids=[0, 0])


def test_I31_kl_of_padding_does_not_leak_and_returns_are_not_rewards():
    got = returns(of([1, 1, 0], 1.0, kl=[1, 1, 100]), gamma=1.0, kl_coef=0.1)
    assert got == pytest.approx([0.8, 0.9, 0])


def test_I32_a_mean_over_a_sequence_counts_its_valid_tokens():
    """whiten_weight="sequence" weighs a token by 1 / valid tokens of its sample, whatever the masked slots hold."""
    batch = make([(2, 3), (2, 4)], [[1, 0, 1], [1, 0, 0, 0]]).change(kl=torch.tensor([1, NAN, 3, 4, NAN, INF, 3e38]))
    config = {"kl_coef": -1.0, "gamma": 0.0, "whiten": True, "whiten_weight": "sequence"}
    door = module("rf++", "kl", estimator="reinforce_plus_plus", **config)
    out = run(door, batch)
    whitening = out.infos[0].whitening
    assert (whitening.population, whitening.mean) == (2, 3.0)
    for info in (*out.infos, *run(door, batch, 2).infos):
        assert info.kl_mean == pytest.approx(8 / 3)  # the mean KL is of tokens, however whitening weighs them


def test_I44_and_I66_nan_in_a_masked_slot():
    x, mask = torch.tensor([2, NAN, 4, 9]), torch.tensor([1, 0, 1, 1])
    got = whiten(x, mask, all_gather=lambda x: x[None], ddof=0)
    assert got.tolist() == pytest.approx([-3 / (26 / 3) ** 0.5, 0, -1 / (26 / 3) ** 0.5, 4 / (26 / 3) ** 0.5], abs=1e-6)
    visible = whiten(torch.tensor([2, NAN]), torch.tensor([1, 1]), all_gather=lambda x: x[None])
    assert visible.isnan().any(), "NaN in a valid slot stays visible"
    assert approx_kl(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, NAN]), torch.tensor([1, 0])).tolist() == [0.5, 0]


def test_I45_and_P1_constant_and_nearly_constant():
    ones = torch.ones(100_003, dtype=torch.bool)
    assert not whiten(torch.full((100_003,), 0.7), ones, all_gather=lambda x: x[None]).any()
    x = 100 + 0.01 * torch.randn(4096, generator=torch.Generator().manual_seed(0))
    got = whiten(x, ones[:4096], all_gather=lambda x: x[None])
    assert float(got.double().std()) == pytest.approx(1.0, abs=0.01)


def test_I47_and_I50_excluded_samples_are_no_part_of_a_baseline():
    rewards, ids, kept = torch.tensor([2.0, 5, 0, 1]), torch.zeros(4, dtype=torch.int64), torch.tensor([1, 0, 1, 1])
    assert group_advantage(rewards, ids, sample_mask=kept).tolist() == [1, 0, -1, 0]
    for estimator in ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline"):
        one, other = (
            call(estimator=estimator, samples=4, rewards=[2.0, x, 0, 1], group_ids=[0] * 4, sample_mask=[1, 0, 1, 1])
            for x in (5.0, 500.0)
        )
        assert_same_bits(torch.cat(one.advantages), torch.cat(other.advantages))


def test_I48_and_I59_nothing_is_swallowed():
    with pytest.raises(ValueError, match=r"kl_coef is 0\.1, which estimator 'grpo' does not use"):
        ReturnsConfig(estimator="grpo", kl_coef=0.1)
    with pytest.raises(ValueError, match="kl was given, which this configuration of estimator 'grpo' does not use"):
        call(estimator="grpo", kl=[torch.ones(2)] * 2, group_ids=[0, 0])
    for unused in (
        {"kl_clamp": 10.0},
        {"group_eps": 1e-4},
        {"whiten_eps": 1e-5},
        {"estimator": "rloo", "group_ddof": 0},
    ):
        with pytest.raises(ValueError, match="not use"):
            ReturnsConfig(**unused)
    for wrong in ({"kl": "k3", "kl_clamp": 0.0}, {"estimator": "grpo", "group_eps": -1e-6}):
        with pytest.raises(ValueError, match="expected a"):
            ReturnsConfig(**wrong)
    with pytest.raises(ValueError, match=r"lam is 0\.9, which is not used with lam_alpha"):
        ReturnsConfig(estimator="gae", lam=0.9, lam_alpha=0.05)
    kinds = [p.kind for p in inspect.signature(ContextParallelReturns.forward).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds


def test_I49_trained_tokens_and_counted_samples_are_two_masks():
    """The whitening population is their product."""
    mask = [torch.tensor([1, 1, 0]), torch.tensor([1, 0, 1])]
    out = call(whiten=True, rewards=[1.0, 5.0], sample_mask=[1, 0], loss_masks=mask, length=3)
    assert out.info.whitening.population == 2
    assert torch.cat(out.masks).tolist() == [True, True, False, False, False, False]


def test_I52_groups_of_different_sizes_in_any_order():
    rewards, ids = torch.tensor([0.0, 1, 0, 1, 0]), torch.tensor([1, 0, 1, 1, 0])
    assert group_advantage(rewards, ids).tolist() == pytest.approx([-1 / 3, 0.5, -1 / 3, 2 / 3, -0.5])


def test_I53_a_group_of_one():
    rewards, ids = torch.tensor([5.0]), torch.tensor([3])
    for center in ("mean", "loo"):
        assert group_advantage(rewards, ids, center=center).tolist() == [0]
        assert group_advantage(rewards, ids, center=center, singleton="raw").tolist() == [5]


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "remax", "dr_grpo"])
def test_I54_a_nan_reward_is_missing_and_an_infinite_one_an_error(estimator, caplog):
    more = {"baselines": [0.0, 0.0]} if estimator == "remax" else {}
    more |= {"group_ids": [0, 0]} if estimator == "dr_grpo" else {}
    out = call(estimator=estimator, rewards=[NAN, 1.0], **more)
    assert not out.advantages[0].any()
    assert (out.info.missing_rewards, out.info.fully_masked) == (1, 1)
    assert "1 of 2 samples have no reward (NaN)" in caplog.text
    with pytest.raises(ValueError, match="sample 1, reward is inf"):
        call(estimator=estimator, rewards=[0.0, INF], **more)
    if more.get("baselines"):
        with pytest.raises(ValueError, match="sample 1, baselines is inf"):
            call(estimator=estimator, rewards=[0.0, INF], baselines=[0.0, INF])


def test_I55_long_responses_do_not_dominate_when_sequences_are_weighed():
    batch = make([(2, 1), (2, 99)], [[1], [1] * 99]).change(rewards=torch.tensor([1.0, -1.0]))
    for weight, mean in (("sequence", 0.0), ("token", -0.98)):
        config = {"whiten": True, "whiten_weight": weight, "estimator": "reinforce_plus_plus"}
        out = run(module("rf++", "rewards", **config), batch)
        assert out.infos[0].whitening.mean == pytest.approx(mean, abs=1e-12)


def test_I56_and_I58_whitening_belongs_to_the_call_and_is_reported():
    with_, without = (call(whiten=on, rewards=[1.0, 2.0]) for on in (True, False))
    assert without.info.whitening is None
    assert (with_.info.whitening.population, with_.info.whitening.mean) == (4, 1.5)
    assert_same_bits(torch.cat(with_.returns), torch.cat(without.returns))


def test_I60_the_kl_in_the_reward_is_reported_with_its_sum():
    kl = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    out = call(kl_coef=0.1, kl=kl, loss_masks=[torch.tensor([1, 0]), torch.tensor([1, 1])])
    assert (out.info.kl_in_reward, out.info.kl_sum, out.info.kl_mean) == (True, 8.0, 8 / 3)
    assert not call(kl_coef=0.0, kl=kl).info.kl_in_reward


def test_I61_and_I62_inputs_are_not_modified_and_outputs_have_no_graph():
    kl = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    out = call(kl_coef=0.5, kl=kl, rewards=[1.0, 2.0], whiten=True)
    assert not any(x.requires_grad for x in (*out.returns, *out.advantages))
    assert all(torch.equal(x, torch.ones(2)) for x in kl)


def test_I111_one_lambda_a_sample():
    batch = make([(2, 9), (3, 20)], seed=2)
    numbers = {"gamma": torch.tensor([0.9, 0.5]).double(), "lam": torch.tensor([0.3, 1.0]).double()}
    got = run(GAE, batch, 2, "carry", **numbers).tokens["advantages"]
    for i in (0, 1):
        scalars = {name: float(x[i]) for name, x in numbers.items()}
        assert_same_bits(batch.rows(got)[i], run(GAE, batch.pick([i]), 2, "carry", **scalars).tokens["advantages"])


def test_I111_the_module_takes_a_list_of_lambdas():
    batch = make([(2, 9), (3, 20)], seed=2)
    door = module("gae", "rewards", "values", estimator="gae")
    got, exact = (
        run(door, batch, 2, lam=lam).tokens for lam in ([0.3, 1.0], torch.tensor([0.3, 1.0], dtype=torch.float64))
    )
    assert_same_bits(got["advantages"], exact["advantages"])
    with pytest.raises(RankFailure, match=r"lam has shape \[3\]; expected \[2\], one number a sample"):
        run(door, batch, 2, lam=[0.3, 1.0, 0.5])


def test_I112_length_adaptive_lambda_counts_valid_tokens_and_is_clipped():
    long, short = [1] * 1000 + [0] * 500, [1] * 10
    for mask, lam in ((long, 0.98), (short, 0.0)):
        adaptive = of(mask, 1.0, values=[0.5] * len(mask))
        numbers = {"gamma": 1.0, "door": GAE, "part": "advantages"}
        assert returns(adaptive, lam=0.3, lam_alpha=0.05, **numbers) == pytest.approx(
            returns(adaptive, lam=lam, **numbers)
        )


def test_I113_the_sum_placed_is_the_sum_given():
    batch = of([0, 1, 1, 0, 1], 0.5, token_rewards=[0, 2, 0, 0, -3])
    assert returns(batch, 2, gamma=1.0, kl_coef=0.0)[1] == 0.5 + 2 - 3


def test_I114_a_token_reward_at_a_masked_slot_is_an_error():
    with pytest.raises(
        RankFailure, match=r"sample 0, token 1, token_rewards is 4\.0; expected 0 or NaN at a masked token"
    ):
        returns(of([1, 0, 1], token_rewards=[0, 4, 0]), gamma=1.0, kl_coef=0.0)


def call(*, samples=2, length=2, loss_masks=None, estimator="reinforce_plus_plus", **given):
    """ContextParallelReturns on one rank; what the config knows goes there."""
    settings = {name: given.pop(name) for name in list(given) if name in ("whiten", "kl_coef")}
    given.setdefault("rewards", [0.0] * samples)
    return ContextParallelReturns(ReturnsConfig(estimator=estimator, **settings))(
        loss_masks=loss_masks or [torch.ones(length)] * samples,
        response_lengths=[length] * samples,
        total_lengths=[length + 3] * samples,
        **given,
    )
