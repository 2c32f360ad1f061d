"""The door for actor code: what ReturnsConfig refuses, what a call takes and gives, and what it says that it did."""

import logging
import math

import pytest
import torch
from helpers import assert_as_good_as_serial

from cp_returns import reference
from cp_returns.clocks import CLOCKS
from cp_returns.config import ReturnsConfig
from cp_returns.errors import CPInputError
from cp_returns.layout import contiguous_pack, zigzag
from cp_returns.module import ContextParallelReturns
from cp_returns.simulate import RankFailure, in_threads

NAN = float("nan")


def one_sample(**change) -> dict:
    """m = [1, 0, 1], k = [1, NaN, 1], reward 2; with gamma 0.5 and kl_coef 0.1 the returns are 0.375, 0, 1.9."""
    return {
        "kl": [torch.tensor([1.0, NAN, 1.0])],
        "rewards": [2.0],
        "loss_masks": [torch.tensor([1, 0, 1])],
        "response_lengths": [3],
        "total_lengths": [8],
    } | change


def lists(x) -> list[list[float]]:
    return [part.tolist() for part in x]


# The configuration


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"estimator": "ppo"}, "estimator is 'ppo'; expected one of 'reinforce_plus_plus', "),
        ({"layout": "ring"}, "layout is 'ring'; expected one of 'zigzag', 'contiguous', 'contiguous_pack'"),
        ({"strategy": "ring"}, "strategy is 'ring'; expected one of 'gather', 'carry'"),
        ({"agreement": "none"}, "agreement is 'none'; expected one of 'full', 'off'"),
        ({"nonfinite": "zero"}, "nonfinite is 'zero'; expected one of 'error', 'propagate'"),
        ({"clock": "step"}, "clock is 'step'; expected one of 'token', 'trainable', 'turn'"),
        ({"kl": "k4"}, "kl is 'k4'; expected one of 'k1', 'k2', 'k3'"),
        ({"estimator": "gae", "masked_values": "keep"}, "masked_values is 'keep'; expected one of 'zero', 'use'"),
        ({"estimator": "gae", "masked_values": "use"}, "masked_values is 'use'; expected clock 'token'"),
        ({"estimator": "grpo", "kl_coef": 0.1}, "kl_coef is 0.1, which estimator 'grpo' does not use"),
        ({"lam": 0.9}, "lam is 0.9, which estimator 'reinforce_plus_plus' does not use"),
        ({"whiten_ddof": 1}, "whiten_ddof is 1, which whiten=False does not use"),
        ({"group_scale": "std"}, "group_scale is 'std', which is not used without group_center"),
        ({"whiten": "yes"}, "whiten is 'yes'; expected one of False, True"),
        ({"whiten": True, "whiten_ddof": 2}, "whiten_ddof is 2; expected one of 0, 1"),
        ({"whiten": True, "whiten_eps_mode": "max"}, "whiten_eps_mode is 'max'; expected one of 'add', 'clamp'"),
        ({"whiten": True, "whiten_eps": -1e-8}, "whiten_eps is -1e-08; expected a number that is at least 0"),
        (
            {"whiten": True, "whiten_weight": "sequence", "whiten_ddof": 1},
            "whiten_ddof is 1; expected one of 0",
        ),
        ({"group_center": "median"}, "group_center is 'median'; expected one of 'mean', 'loo', 'opo'"),
        ({"estimator": "grpo", "group_ddof": 2}, "group_ddof is 2; expected one of 0, 1"),
        ({"estimator": "grpo", "singleton": "drop"}, "singleton is 'drop'; expected one of 'zero', 'raw'"),
        ({"estimator": ["gae"]}, "estimator is ['gae']; expected one of 'reinforce_plus_plus', "),
        ({"multiple": 2.5}, "multiple is 2.5; expected at least 1, a whole number"),
        ({"whiten": True, "whiten_scale": "false"}, "whiten_scale is 'false'; expected one of False, True"),
        (
            {"whiten": True, "whiten_center": False, "whiten_scale": False},
            "whiten_scale is False, which is not used with whiten_center=False",
        ),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(config, text):
    with pytest.raises(CPInputError) as caught:
        ReturnsConfig(**config)
    assert str(caught.value).startswith(text)


def test_the_module_shows_what_differs_from_the_defaults_and_holds_no_state():
    returns_fn = ContextParallelReturns(ReturnsConfig(gamma=0.9, whiten=True))
    assert repr(returns_fn) == "ContextParallelReturns(gamma=0.9, whiten=True)"
    assert returns_fn.state_dict() == {}
    assert list(returns_fn.parameters()) == []


# Lists in, lists out


def test_the_sample_of_the_contract():
    out = ContextParallelReturns(ReturnsConfig(gamma=0.5, kl_coef=0.1))(**one_sample())
    assert_as_good_as_serial(out.returns[0].tolist(), [0.375, 0.0, 1.9])
    assert lists(out.advantages) == lists(out.returns)
    assert lists(out.masks) == [[1, 0, 1]]
    assert out.returns[0].dtype == torch.float32


def test_the_reward_is_put_where_the_last_token_is():
    """total 10, response 9, W = 2: rank 0 holds tokens 0..2. total 13, response 3: rank 0 holds none."""

    def fn(rank, all_gather):
        layout = zigzag([10, 13], [9, 3], 2)
        return ContextParallelReturns(ReturnsConfig(gamma=0.5), cp_group=all_gather)(
            kl=[torch.zeros(int(n)) for n in layout.lengths(rank)],
            rewards=[1.0, 4.0],
            loss_masks=[torch.ones(9), torch.ones(3)],
            response_lengths=[9, 3],
            total_lengths=[10, 13],
        ).returns

    first, second = in_threads(fn, 2)
    assert lists(first) == [[2.0**-8, 2.0**-7, 2.0**-6], []]
    assert lists(second) == [[2.0**-5, 2.0**-4, 2.0**-3, 0.25, 0.5, 1.0], [1.0, 2.0, 4.0]]


@pytest.mark.parametrize("whiten", [False, True])
def test_what_a_call_gives_is_the_callers_alone(whiten):
    """Writing into one result changes no other and no input, and no input was written to."""
    given = one_sample(loss_masks=[torch.tensor([True, False, True])])
    before = [x.clone() for x in (given["kl"][0], given["loss_masks"][0])]
    out = ContextParallelReturns(ReturnsConfig(gamma=0.5, kl_coef=0.1, whiten=whiten))(**given)
    results = [out.returns[0], out.advantages[0], out.masks[0], given["kl"][0], given["loss_masks"][0]]
    expected = [x.clone() for x in results[:3]] + before
    for x in results:
        others = [(y, z) for y, z in zip(results, expected, strict=True) if y is not x]
        kept = x.clone()
        x.fill_(7)
        for y, z in others:
            torch.testing.assert_close(y, z, rtol=0, atol=0, equal_nan=True)
        x.copy_(kept)


def test_no_samples_give_empty_lists():
    empty = {"kl": [], "rewards": [], "loss_masks": [], "response_lengths": [], "total_lengths": []}
    for config in ({}, {"whiten": True}, {"strategy": "carry"}, {"estimator": "gae"}, {"estimator": "grpo"}):
        given = empty | ({"values": []} if config.get("estimator") == "gae" else {})
        if config.get("estimator") == "grpo":
            given = {**empty, "group_ids": []}
            del given["kl"]
        out = ContextParallelReturns(ReturnsConfig(**config))(**given)
        assert (out.returns, out.advantages, out.masks) == ([], [], [])
        assert (out.info.samples, out.info.valid_tokens, out.info.kl_sum, out.info.kl_mean) == (0, 0, 0, 0)


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_sample_whose_only_valid_token_is_its_first_is_not_fully_masked(clock):
    config = ReturnsConfig(clock=clock, gamma=1.0, kl_coef=0.0)
    mask = torch.tensor([1, 0, 0])
    out = ContextParallelReturns(config)(
        loss_masks=[mask, 0 * mask], rewards=[2.0, 3.0], response_lengths=[3, 3], total_lengths=[5, 5]
    )
    assert (out.info.valid_tokens, out.info.fully_masked) == (1, 1)
    assert lists(out.returns) == [[2, 0, 0], [0, 0, 0]]


def test_what_is_left_out_is_masked_counted_and_said(caplog):
    """A NaN reward, a sample_mask of 0, no valid token and no token; the masks that come out say which remained."""
    batch = {
        "kl": [torch.ones(2), torch.ones(2), torch.ones(2), torch.zeros(0), torch.ones(2)],
        "rewards": [NAN, 1.0, 1.0, 1.0, 1.0],
        "sample_mask": [1, 0, 1, 1, 1],
        "loss_masks": [torch.ones(2), torch.ones(2), torch.zeros(2), torch.zeros(0), torch.ones(2)],
        "response_lengths": [2, 2, 2, 0, 2],
        "total_lengths": [5, 5, 5, 5, 5],
    }
    with caplog.at_level(logging.WARNING):
        out = ContextParallelReturns(ReturnsConfig(kl_coef=0.25, whiten=True))(**batch)
    assert lists(out.masks) == [[0, 0], [0, 0], [0, 0], [], [1, 1]]
    assert lists(out.returns) == [[0, 0], [0, 0], [0, 0], [], [0.5, 0.75]]
    assert_as_good_as_serial(out.advantages[4].tolist(), reference.whiten([0.5, 0.75], [1, 1]))
    assert (out.info.samples, out.info.valid_tokens, out.info.fully_masked, out.info.missing_rewards) == (5, 2, 4, 1)
    assert out.info.whitening.population == 2
    assert [record.getMessage() for record in caplog.records] == [
        "cp_returns: 1 of 5 samples have no reward (NaN) and were left out"
    ]


def test_nothing_is_logged_when_all_is_well(caplog):
    with caplog.at_level(logging.INFO):
        ContextParallelReturns(ReturnsConfig())(**one_sample())
    assert caplog.records == []


def test_rewards_may_be_absent_or_of_any_kind():
    returns_fn = ContextParallelReturns(ReturnsConfig(gamma=0.5, kl_coef=0.1))
    none = returns_fn(**one_sample(rewards=None))
    assert_as_good_as_serial(none.returns[0].tolist(), [-0.125, 0.0, -0.1])
    wanted = returns_fn(**one_sample()).returns[0]
    for rewards in (
        [2],
        (2.0,),
        torch.tensor([2.0]),
        torch.tensor([2]),
        [torch.tensor(2.0)],
        torch.tensor([2.0]).half(),
    ):
        assert torch.equal(returns_fn(**one_sample(rewards=rewards)).returns[0], wanted)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64])
def test_masks_of_any_dtype_are_the_same(dtype):
    returns_fn = ContextParallelReturns(ReturnsConfig(gamma=0.5, kl_coef=0.1))
    out = returns_fn(**one_sample(loss_masks=[torch.tensor([1, 0, 1]).to(dtype)]))
    assert torch.equal(out.returns[0], returns_fn(**one_sample()).returns[0])
    assert lists(out.masks) == [[1, 0, 1]]


def test_remax_takes_the_baseline_away_also_without_a_scalar_reward():
    """A_j = sum of r from j on, minus the baseline: with token rewards 1, _, 3 and baseline 1: 3, 0, 2."""
    given = one_sample(kl=None, token_rewards=[torch.tensor([1.0, 0.0, 3.0])], baselines=[1.0])
    returns_fn = ContextParallelReturns(ReturnsConfig(estimator="remax"))
    assert lists(returns_fn(**given | {"rewards": None}).returns) == [[3.0, 0.0, 2.0]]
    assert lists(returns_fn(**given | {"rewards": [0.5]}).returns) == [[3.5, 0.0, 2.5]]


# Numbers of a call


def test_numbers_of_the_call_come_before_those_of_the_configuration():
    returns_fn = ContextParallelReturns(ReturnsConfig(gamma=1.0, kl_coef=9.0))
    two = {key: x * 2 for key, x in one_sample().items()}
    for gamma, kl_coef in ((0.5, 0.1), (torch.tensor(0.5), torch.tensor(0.1, dtype=torch.float64))):
        out = returns_fn(**one_sample(), gamma=gamma, kl_coef=kl_coef)
        assert_as_good_as_serial(out.returns[0].tolist(), [0.375, 0.0, 1.9])
    out = returns_fn(**two, gamma=torch.tensor([0.5, 1.0]), kl_coef=torch.tensor([0.1, 1.0], dtype=torch.float64))
    assert_as_good_as_serial(out.returns[0].tolist(), [0.375, 0.0, 1.9])
    assert lists(out.returns)[1] == [0.0, 0.0, 1.0]
    again = returns_fn(**one_sample())
    assert lists(again.returns) == [[-16.0, 0.0, -7.0]]


def test_lambda_of_the_call():
    """m = [1, 0, 1], V = [.5, _, 1], reward 2, gamma 1: A_2 = 1, A_0 = (1 - .5) + lam * 1."""
    returns_fn = ContextParallelReturns(ReturnsConfig(estimator="gae", lam=0.0))
    given = one_sample(kl=None, values=[torch.tensor([0.5, NAN, 1.0])])
    assert lists(returns_fn(**given).advantages) == [[0.5, 0.0, 1.0]]
    out = returns_fn(**given, lam=0.5)
    assert lists(out.advantages) == [[1.0, 0.0, 1.0]]
    assert lists(out.returns) == [[1.5, 0.0, 2.0]]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_from_log_probs(kind):
    log_probs, ref, mask = torch.tensor([-1.0, NAN, -0.5]), torch.tensor([-1.5, 3e38, -0.25]), [1, 0, 1]
    kl = reference.approx_kl([-1.0, 0.0, -0.5], [-1.5, 0.0, -0.25], mask, kind=kind, clamp=0.4)
    exact = reference.reinforce_plus_plus(kl, 2.0, mask, gamma=0.5, kl_coef=0.1)
    config = ReturnsConfig(gamma=0.5, kl_coef=0.1, kl=kind, kl_clamp=0.4)
    out = ContextParallelReturns(config)(**one_sample(kl=None), log_probs=[log_probs], ref_log_probs=[ref])
    assert out.returns[0].tolist() == pytest.approx(exact, rel=1e-6)
    assert out.info.kl_sum == pytest.approx(math.fsum(kl), rel=1e-6)
    assert out.info.kl_mean == pytest.approx(math.fsum(kl) / 2, rel=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf])
def test_a_clamp_hides_no_infinite_log_prob(kind, poison):
    returns_fn = ContextParallelReturns(ReturnsConfig(kl_coef=0.1, kl=kind, kl_clamp=0.4))
    log_probs, ref = torch.tensor([-1.0, poison, -0.5]), torch.tensor([-1.5, -1.0, -0.25])
    given = one_sample(kl=None) | {"log_probs": [log_probs], "ref_log_probs": [ref]}
    assert returns_fn(**given).returns[0].isfinite().all()
    with pytest.raises(CPInputError, match=r"^sample 0, token 1, kl is nan; expected a finite number at a valid token"):
        returns_fn(**given | {"loss_masks": [torch.ones(3)]})


# What a call refuses


@pytest.mark.parametrize(
    ("config", "change", "text"),
    [
        ({}, {"kl": [torch.zeros(2)]}, "sample 0, kl has shape [2]; expected a tensor [3], the tokens this rank owns"),
        ({}, {"kl": [torch.zeros(3, 1)]}, "sample 0, kl has shape [3, 1]; expected a tensor [3]"),
        ({}, {"kl": torch.zeros(1, 3)}, "kl is a Tensor; expected a list of 1 tensors, one a sample"),
        ({}, {"kl": [torch.zeros(3)] * 2}, "kl is a list of 2; expected a list of 1 tensors, one a sample"),
        ({}, {"kl": [[0.0, 0.0, 0.0]]}, "sample 0, kl is a list; expected a tensor [3]"),
        (
            {},
            {"loss_masks": [torch.ones(4)]},
            "sample 0, loss_masks has shape [4]; expected a tensor [3], the whole response",
        ),
        ({}, {"loss_masks": [torch.tensor([1, 0.5, 1])]}, "sample 0, token 1, loss_mask is 0.5; expected 0 or 1"),
        (
            {},
            {"loss_masks": [torch.tensor([1, 1 + 1e-12, 1], dtype=torch.float64)]},
            "sample 0, token 1, loss_mask is 1.0000",
        ),
        ({}, {"kl": [torch.tensor([1.0, 1.0, NAN])]}, "sample 0, token 2, kl is nan; expected a finite number"),
        ({}, {"rewards": [1.0, 2.0]}, "rewards has shape [2]; expected [1], one number a sample"),
        ({}, {"rewards": [torch.zeros(2)]}, "rewards holds a tensor of shape [2]; expected one number a sample"),
        ({}, {"rewards": [None]}, "sample 0, rewards is None; expected a number"),
        ({}, {"rewards": [math.inf]}, "sample 0, reward is inf; expected a finite number in float32, or NaN"),
        ({}, {"rewards": [1e39]}, "sample 0, reward is 1e+39; expected a finite number in float32, or NaN"),
        ({}, {"rewards": 1.0}, "rewards is a float; expected a list or a tensor of one number a sample"),
        ({}, {"rewards": None, "kl": None}, "rewards is absent; expected rewards, token_rewards or kl"),
        ({"kl_coef": 0.1}, {"kl": None}, "kl is absent; a kl_coef other than 0 needs it"),
        ({}, {"kl": None, "kl_coef": [0.1]}, "kl is absent; a kl_coef other than 0 needs it"),
        ({"estimator": "remax"}, {"baselines": [NAN]}, "sample 0, baselines is nan; expected a finite number"),
        ({"estimator": "remax"}, {"baselines": [math.inf]}, "sample 0, baselines is inf; expected a finite number"),
        ({}, {"total_lengths": [3]}, "sample 0: response_length 3 of total_length 3; expected 0 <= response < total"),
        ({}, {"total_lengths": [8, 9]}, "1 response_lengths for 2 total_lengths; expected one of each a sample"),
        ({}, {"total_lengths": [8.5]}, "total_lengths is [8.5]; expected one integer a sample"),
        ({}, {"gamma": -0.1}, "gamma is -0.1; expected a number in [0, 1]"),
        ({}, {"gamma": torch.tensor([0.5, 0.5])}, "shape of gamma is [2]; expected [] or [1]"),
        ({}, {"lam": 0.5}, "lam was given, which this configuration of estimator"),
        (
            {},
            {"values": [torch.zeros(3)]},
            "values was given, which this configuration of estimator 'reinforce_plus_plus'",
        ),
        (
            {},
            {"log_probs": [torch.zeros(3)]},
            "log_probs was given, which this configuration of estimator 'reinforce_plus_plus' does not use; "
            "set ReturnsConfig(kl=)",
        ),
        ({"kl": "k1"}, {"kl": None}, "log_probs is absent; estimator 'reinforce_plus_plus'"),
        ({"estimator": "gae"}, {}, "values is absent; estimator 'gae'"),
        ({"estimator": "remax"}, {}, "baselines is absent; estimator 'remax'"),
        ({"estimator": "rloo"}, {"kl": None}, "group_ids is absent; estimator 'rloo'"),
        ({"estimator": "rloo"}, {"kl": None, "group_ids": [1], "rewards": None}, "rewards is absent; estimator 'rloo'"),
        ({"estimator": "rloo"}, {"kl": None, "group_ids": [0.5]}, "sample 0, group_ids is 0.5; expected an integer"),
        ({"estimator": "rloo"}, {"kl": None, "group_ids": ["a"]}, "sample 0, group_ids is 'a'; expected an integer"),
        (
            {},
            {"padded_lengths": [7]},
            "sample 0: padded_length 7 of total_length 8; expected at least the total length",
        ),
        ({}, {"stream_length": 8}, "stream_length is 8, which layout 'zigzag' does not use"),
        ({"layout": "contiguous_pack"}, {}, "stream_length is absent; layout 'contiguous_pack' needs"),
        ({"layout": "contiguous_pack"}, {"stream_length": 7}, "stream_length is 7; expected a multiple of cp_size = 1"),
    ],
)
def test_a_call_that_cannot_be_meant_is_refused(config, change, text):
    with pytest.raises(CPInputError) as caught:
        ContextParallelReturns(ReturnsConfig(**config))(**one_sample(**change))
    assert str(caught.value).startswith(text)


def test_a_large_reward_is_finite_in_float64():
    out = ContextParallelReturns(ReturnsConfig())(**one_sample(kl=[torch.zeros(3).double()], rewards=[1e39]))
    assert out.returns[0].tolist() == [1e39, 0.0, 1e39]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_what_is_propagated_stays_in_its_sample_under_whitening(cp_size):
    """[1, 3] and [NaN, 5]: the finite numbers 1, 3, 5 have mean 3 and deviation 2."""
    config = ReturnsConfig(estimator="reinforce_plus_plus_baseline", kl_coef=-1.0, whiten=True, nonfinite="propagate")
    kl = [torch.tensor([1.0, 3.0]), torch.tensor([NAN, 5.0])]
    layout = zigzag([4, 4], [2, 2], cp_size)

    def fn(rank, all_gather):
        own = torch.cat(kl)[torch.from_numpy(layout.index(rank))].split(layout.lengths(rank).tolist())
        ones = [torch.ones(2)] * 2
        out = ContextParallelReturns(config, cp_group=all_gather.cp, dp_cp_group=all_gather.cp)(
            kl=list(own),
            rewards=[0.0] * 2,
            group_ids=[0, 0],
            loss_masks=ones,
            response_lengths=[2] * 2,
            total_lengths=[4] * 2,
        )
        return torch.cat(out.advantages)

    got = torch.empty(4)
    for rank, own in enumerate(in_threads(fn, cp_size)):
        got[torch.from_numpy(layout.index(rank))] = own
    assert_as_good_as_serial(got[[0, 1, 3]].tolist(), [-1.0, 0.0, 1.0])
    assert got[2].isnan()


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (torch.zeros(2).double(), "is torch.float64 on cpu; expected torch.float32 on cpu, as the others"),
        (torch.zeros(2).half(), "is torch.float16 on cpu; expected torch.float32 on cpu, as the others"),
        (torch.zeros(2, device="meta"), "is torch.float32 on meta; expected torch.float32 on cpu, as the others"),
        (torch.zeros(1, 2), "has shape [1, 2]; expected a tensor [2], the tokens this rank owns"),
        (torch.zeros(()), "has shape []; expected a tensor [2], the tokens this rank owns"),
        (torch.zeros(0), "has shape [0]; expected a tensor [2], the tokens this rank owns"),
        (None, "is a NoneType; expected a tensor [2], the tokens this rank owns"),
    ],
)
def test_a_shard_unlike_the_others_is_named(second, text):
    given = {"rewards": [1.0] * 2, "response_lengths": [3, 2], "total_lengths": [8] * 2}
    masks = [torch.ones(3), torch.ones(2)]
    with pytest.raises(CPInputError) as caught:
        ContextParallelReturns(ReturnsConfig())(**given, kl=[torch.zeros(3), second], loss_masks=masks)
    assert str(caught.value) == f"sample 1, kl {text}"


def test_masks_of_one_rank_without_data_are_the_same_error_on_all():
    def of_rank(rank, all_gather):
        masks = [torch.ones(3, device="meta" if rank == 1 else "cpu")]
        call = ContextParallelReturns(ReturnsConfig(), cp_group=all_gather.cp)
        call(kl=[torch.zeros(3 - rank)], loss_masks=masks, response_lengths=[3], total_lengths=[8])

    with pytest.raises(RankFailure) as caught:
        in_threads(of_rank, 2)
    texts = {str(outcome.error) for outcome in caught.value.outcomes}
    assert len(texts) == 1
    assert "CP rank" in texts.pop()


def test_a_text_of_one_rank_has_no_ranks_in_it_with_whitening_either():
    with pytest.raises(CPInputError, match=r"^sample 0, token 2, kl is inf; expected"):
        ContextParallelReturns(ReturnsConfig(whiten=True))(**one_sample(kl=[torch.tensor([0.0, 0.0, math.inf])]))


def test_a_call_that_failed_leaves_nothing_behind():
    returns_fn = ContextParallelReturns(ReturnsConfig(gamma=0.5, kl_coef=0.1))
    with pytest.raises(CPInputError):
        returns_fn(**one_sample(rewards=[math.inf]))
    assert_as_good_as_serial(returns_fn(**one_sample()).returns[0].tolist(), [0.375, 0.0, 1.9])


# Layouts by name


@pytest.mark.parametrize("strategy", ["gather", "carry"])
@pytest.mark.parametrize("padded", [None, [20, 9, 50]])
def test_a_stream_cut_in_ranks(strategy, padded):
    """contiguous_pack, with and without widths of its own: the samples are not what is cut."""
    total, response, cp_size, stream = [17, 9, 41], [12, 4, 40], 3, 81
    r = torch.Generator().manual_seed(1)
    kl, masks = [torch.randn(n, generator=r) for n in response], [torch.rand(n, generator=r) < 0.7 for n in response]
    layout = contiguous_pack(total, response, cp_size, stream_length=stream, padded_lengths=padded)
    common = {"rewards": [1.0, -1.0, 2.0], "loss_masks": masks, "response_lengths": response, "total_lengths": total}
    one = ContextParallelReturns(ReturnsConfig(gamma=0.9, kl_coef=0.1))(kl=kl, **common).returns

    def fn(rank, all_gather):
        config = ReturnsConfig(gamma=0.9, kl_coef=0.1, layout="contiguous_pack", strategy=strategy)
        own = torch.cat(kl)[torch.from_numpy(layout.index(rank))].split(layout.lengths(rank).tolist())
        widths = {} if padded is None else {"padded_lengths": padded}
        return ContextParallelReturns(config, cp_group=all_gather)(
            kl=list(own), stream_length=stream, **widths, **common
        ).returns

    full = torch.empty(sum(response))
    for rank, shards in enumerate(in_threads(fn, cp_size)):
        full[torch.from_numpy(layout.index(rank))] = torch.cat(shards)
    assert torch.allclose(full, torch.cat(one), rtol=0, atol=2**-23 * float(torch.cat(one).abs().max()))


# What it says that it did


def info_of(config: dict, cp_size: int, dp_size: int = 1, strategy="gather"):
    """Two samples a DP rank, of 4 valid tokens each, the KL of sample i of DP rank d being 1 + i + 10 d."""

    def fn(rank, peers):
        layout = zigzag([9, 20], [5, 4], cp_size)
        lengths = layout.lengths(peers.cp_rank).tolist()
        returns_fn = ContextParallelReturns(
            ReturnsConfig(kl_coef=0.1, strategy=strategy, **config), cp_group=peers.cp, dp_cp_group=peers
        )
        return returns_fn(
            kl=[torch.full((n,), 1.0 + i + 10 * peers.dp_rank) for i, n in enumerate(lengths)],
            rewards=[1.0, 2.0],
            loss_masks=[torch.tensor([1.0, 1, 0, 1, 1]), torch.ones(4)],
            response_lengths=[5, 4],
            total_lengths=[9, 20],
        ).info

    return in_threads(fn, cp_size * dp_size, cp_size=cp_size)


def test_info_of_one_context_parallel_group():
    for strategy, collectives in (("gather", 2), ("carry", 1)):
        for info in info_of({}, 3, strategy=strategy):
            assert (info.samples, info.valid_tokens, info.fully_masked, info.missing_rewards) == (2, 8, 0, 0)
            assert (info.kl_sum, info.kl_mean) == (12.0, 1.5)
            assert info.kl_in_reward is True
            assert info.whitening is None
            assert info.collectives == collectives
            assert info.scope["kl_sum"] == info.scope["kl_mean"] == info.scope["valid_tokens"] == "cp"
            assert info.scope["bytes_sent"] == info.scope["collectives"] == "local"
            assert set(info.scope) == set(vars(info)) - {"scope"}


def test_info_with_whitening_is_global():
    for dp_rank, infos in enumerate(zip(*[iter(info_of({"whiten": True}, 2, 2))] * 2, strict=True)):
        for info in infos:
            assert info.valid_tokens == 8, dp_rank
            assert info.kl_sum == 12.0 + (12.0 + 80.0)
            assert info.kl_mean == (12.0 + 92.0) / 16
            assert info.whitening.population == 16
            assert info.scope["kl_sum"] == "global"
            assert info.scope["valid_tokens"] == "cp"
            assert info.collectives == 3


def test_info_says_what_whitening_did():
    out = ContextParallelReturns(ReturnsConfig(gamma=0.5, kl_coef=0.1, whiten=True))(**one_sample())
    assert out.info.whitening.population == 2
    assert out.info.whitening.mean == pytest.approx((0.375 + 1.9) / 2)
    assert out.info.whitening.var == pytest.approx((1.9 - 0.375) ** 2 / 2)
    assert out.info.collectives == 0
    assert out.info.bytes_sent == 0


@pytest.mark.parametrize(("dtype", "largest", "kl_sum"), [(torch.float32, 3e38, 0.0), (torch.float64, 1.7e308, NAN)])
def test_the_sum_of_an_enormous_kl(dtype, largest, kl_sum):
    """float32 numbers are summed as float64 where they must be; what overflows that too is NaN, without a warning."""
    kl = torch.full((30,), largest, dtype=dtype)
    kl[15:] *= -1
    layout = zigzag([31], [30], 3)

    def fn(rank, peers):
        call = ContextParallelReturns(ReturnsConfig(kl_coef=0.1, whiten=True), cp_group=peers.cp, dp_cp_group=peers.cp)
        own = kl[torch.from_numpy(layout.index(rank))]
        given = {"loss_masks": [torch.ones(30)], "response_lengths": [30], "total_lengths": [31]}
        return call(kl=[own], rewards=[1.0], **given).info.kl_sum

    assert in_threads(fn, 3) == pytest.approx([kl_sum] * 3, nan_ok=True)


def test_the_kl_is_reported_whether_or_not_it_is_in_the_reward():
    out = ContextParallelReturns(ReturnsConfig())(**one_sample())
    assert (out.info.kl_in_reward, out.info.kl_sum, out.info.kl_mean) == (False, 2.0, 1.0)
    assert lists(out.returns) == [[2.0, 0.0, 2.0]]
