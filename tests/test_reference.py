"""The oracle against numbers worked by hand (from the formulas, on paper) and against every golden case."""

import math
import subprocess
import sys

import pytest
from helpers import golden_cases, per_sample

from cp_returns import reference

GAP = [1, 1, 0, 0, 1, 1]
NAN = math.nan


def close(got, expected, rel=1e-14):
    assert got == pytest.approx(expected, rel=rel, abs=1e-15)


@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        ("token", [0.03125, 0.0625, 0, 0, 0.5, 1]),
        ("trainable", [0.125, 0.25, 0, 0, 0.5, 1]),
        ("turn", [0.5, 0.5, 0, 0, 1, 1]),
    ],
)
def test_three_clocks(clock, expected):
    assert reference.reinforce_plus_plus([0] * 6, 1.0, GAP, gamma=0.5, kl_coef=0.0, clock=clock) == expected


def test_turn_clock_with_gamma_zero_shares_the_reward_within_a_turn_only():
    # gamma^0 = 1 also for gamma = 0
    assert reference.reinforce_plus_plus([0] * 6, 1.0, GAP, gamma=0.0, kl_coef=0.0, clock="turn") == [0, 0, 0, 0, 1, 1]


def test_credit_crosses_gaps_and_masked_kl_is_not_read():
    assert reference.reinforce_plus_plus([0] * 5, 3.0, [1, 0, 0, 1, 1], gamma=1.0, kl_coef=0.0) == [3, 0, 0, 3, 3]
    for k in (5.0, NAN, math.inf, 3e38):
        close(reference.reinforce_plus_plus([1, k, 1], 2.0, [1, 0, 1], gamma=0.5, kl_coef=0.1), [0.375, 0, 1.9])


def test_scalar_reward_goes_to_the_last_valid_token_and_adds_to_its_token_reward():
    got = reference.reinforce_plus_plus(
        [0] * 4, 10.0, [1, 1, 1, 0], gamma=1.0, kl_coef=0.0, token_rewards=[1, 0, 2, NAN]
    )
    assert got == [13, 12, 12, 0]


@pytest.mark.parametrize(
    "dropped",
    [{"reward": NAN}, {"sample_mask": 0}, {"mask": [0, 0]}],
    ids=["nan reward", "sample mask", "no valid token"],
)
def test_what_counts_as_fully_masked_gives_zeros(dropped):
    sample = {"kl": [1.0, 1.0], "reward": 5.0, "mask": [1, 1], "sample_mask": 1, **dropped}
    assert reference.reinforce_plus_plus(**sample, gamma=1.0, kl_coef=0.1) == [0, 0]
    assert reference.gae(**sample, values=[1.0, 1.0], gamma=1.0, lam=1.0) == ([0, 0], [0, 0])
    assert reference.remax(**sample, baseline=1.0, kl_coef=0.1) == [0, 0]


def test_empty_response():
    assert reference.reinforce_plus_plus([], 1.0, [], gamma=0.9, kl_coef=0.1) == []
    assert reference.gae([], 1.0, [], [], gamma=0.9, lam=0.9) == ([], [])


def test_gae_by_hand():
    for masked in (77.0, NAN):
        advantages, returns = reference.gae(
            [0] * 4, 0.0, [0.5, 0, 1, masked], [1, 1, 1, 0], gamma=1.0, lam=0.5, token_rewards=[0, 0, 2, 0]
        )
        assert advantages == [0.25, 1.5, 1, 0]
        assert returns == [0.75, 1.5, 2, 0]


def test_gae_turn_clock_by_hand():
    # Steps 4, 5 are the second turn: delta_5 = 1 - .7; delta_4 = .7 - .3, A_4 = .4 + A_5 (tick 0).
    # Step 1 ends the first turn: delta_1 = .5 * .3 - .1, A_1 = .05 + .25 * A_4; delta_0 = .1 - .5, A_0 = -.4 + A_1.
    advantages, returns = reference.gae(
        [0] * 6, 1.0, [0.5, 0.1, NAN, NAN, 0.3, 0.7], GAP, gamma=0.5, lam=0.5, clock="turn"
    )
    close(advantages, [-0.175, 0.225, 0, 0, 0.7, 0.3])
    close(returns, [0.325, 0.325, 0, 0, 1, 1])


def test_gae_bootstrap_and_second_lambda_by_hand():
    # One step: delta = r + gamma * bootstrap - V.
    advantages, returns = reference.gae([0], 2.0, [0.5], [1], gamma=0.5, lam=0.3, bootstrap=8.0)
    assert (advantages, returns) == ([5.5], [6.0])
    # Two steps, V = 0, r = (0, 1), gamma = 1: A_0 = lam, returns_0 = lam_value.
    advantages, returns = reference.gae([0, 0], 1.0, [0, 0], [1, 1], gamma=1.0, lam=0.25, lam_value=0.75)
    assert (advantages, returns) == ([0.25, 1], [0.75, 1])


def test_gae_token_clock_zeroes_or_uses_the_values_of_a_gap():
    args = {"kl": [0] * 3, "reward": 1.0, "values": [0.5, 4.0, 0.5], "mask": [1, 0, 1], "gamma": 1.0, "clock": "token"}
    # lam = 0: A_0 is delta_0 = V_1 - V_0, with V_1 counted as 0 or as the 4 that it is.
    assert reference.gae(**args, lam=0.0)[0] == [-0.5, 0, 0.5]
    assert reference.gae(**args, lam=0.0, masked_values="use")[0] == [3.5, 0, 0.5]


def test_adaptive_lambda():
    assert reference.adaptive_lam([1] * 20, 0.5) == 0.9
    assert reference.adaptive_lam([1, 0], 0.5) == 0.0
    assert reference.adaptive_lam([0, 0], 0.5) == 0.0


def test_remax_by_hand():
    close(reference.remax([1, 9, 1], 2.0, 0.5, [1, 0, 1], kl_coef=0.1), [1.3, 0, 1.4])


def test_reinforce_plus_plus_baseline_by_hand():
    got = reference.reinforce_plus_plus_baseline(
        [[1.0, 2.0], [NAN], [5.0, 0.0], [1.0]],
        [3.0, 7.0, 1.0, 9.0],
        [4, 4, 4, 8],
        [[1, 1], [0], [0, 1], [1]],
        kl_coef=0.1,
    )
    # The second sample has no valid token: the mean of group 4 is 2. The last one is alone in its group: 0 - kl.
    assert [v for row in got for v in row] == pytest.approx([0.9, 0.8, 0, 0, -1, -0.1], rel=1e-14)


def test_group_advantage_by_hand():
    ga = reference.group_advantage
    assert ga([2, 5, 0, 1], [0] * 4, sample_mask=[1, 0, 1, 1]) == [1, 0, -1, 0]
    close(ga([1, 0, 0, 0], [3] * 4, center="loo"), [1, -1 / 3, -1 / 3, -1 / 3])
    for n in (3, 6, 7):  # the mean of three 0.1 is not 0.1
        assert ga([0.1] * n, [0] * n, scale="std") == [0] * n
    assert ga([5, 1], [0, 1]) == [0, 0]
    assert ga([5, 1], [0, 1], singleton="raw") == [5, 1]
    # opo: the length-weighted mean of 1 (3 tokens) and 5 (1 token) is 2; a member of length 0 does not count.
    assert ga([1, 5, 9], [0] * 3, center="opo", lengths=[3, 1, 0]) == [-1, 3, 0]
    # NeMo: others of the odd one out are equal, so it is not divided; the others see 1, 0, 0: std 1 / sqrt(3).
    third = -1 / 3 / (3**-0.5 + 1e-6)
    close(ga([1, 0, 0, 0], [0] * 4, center="loo", scale="loo_std"), [1, third, third, third])
    close(ga([1, 3], [0, 0], scale="std", ddof=0, eps=1.0), [-0.5, 0.5])
    close(ga([1, 3], [0, 0], scale="std", eps=0.0), [-(0.5**0.5), 0.5**0.5])


def test_approx_kl_by_hand():
    kl = reference.approx_kl
    assert kl([-1, -2, NAN], [-1.5, -0.5, 0], [1, 1, 0]) == [0.5, -1.5, 0]
    assert kl([-1, -2], [-1.5, -0.5], [1, 1], kind="k2") == [0.125, 1.125]
    close(kl([math.log(2)], [0.0], [1], kind="k3"), [0.5 - 1 + math.log(2)])
    close(kl([-900.0, 900.0], [0.0, 0.0], [1, 1], kind="k3"), [math.exp(20) - 1 - 900, math.exp(-20) - 1 + 900])
    assert kl([-900.0, 900.0], [0.0, 0.0], [1, 1], kind="k1", clamp=10) == [-10, 10]


def test_whiten_by_hand():
    w = reference.whiten
    assert w([1, 1, 3, 3], [1] * 4, ddof=0, eps=0) == [-1, -1, 1, 1]
    close(w([1, 1, 3, 3], [1] * 4, eps=0), [-(0.75**0.5)] * 2 + [0.75**0.5] * 2)
    assert w([1, NAN, 3], [1, 0, 1], ddof=0, eps=0) == [-1, 0, 1]
    assert w([1, 3], [1, 1], ddof=0, eps=0, center=False) == [1, 3]
    assert w([1, 5], [1, 1], ddof=0, eps=0, shift_mean=False) == [2, 4]
    assert w([1, 5], [1, 1], scale=False) == [-2, 2]
    assert w([1, 3], [1, 1], ddof=0, eps=4, eps_mode="clamp") == [-0.5, 0.5]
    assert w([0, 4, 4], [1] * 3, ddof=0, eps=0, weights=[2, 1, 1]) == [-1, 1, 1]
    for n in (3, 100_003):  # the mean of three 0.7 is not 0.7
        assert w([0.7] * n, [1] * n) == [0] * n
    assert w([7.0], [1]) == [0]
    assert w([7.0], [0]) == [0]
    assert w([], []) == []


@pytest.mark.parametrize(
    ("kind", "total", "response", "cp_size", "options", "expected"),
    [
        ("zigzag", 10, 9, 2, {}, [0, 0, 0, 1, 1, 1, 1, 1, 1]),
        ("zigzag", 13, 3, 2, {}, [1, 1, 1]),
        ("zigzag", 5, 2, 4, {}, [2, 3]),
        ("zigzag", 33, 4, 4, {}, [2, 2, 1, 1]),
        # padded to 16, pieces of 4: positions 0..3 and 12..15 are rank 0's
        ("zigzag", 10, 9, 2, {"multiple": 4}, [0, 0, 0, 0, 1, 1, 1, 1, 1]),
        ("zigzag", 10, 9, 2, {"padded_lengths": [16]}, [0, 0, 0, 0, 1, 1, 1, 1, 1]),
        ("contiguous", 10, 9, 2, {}, [0, 0, 0, 0, 0, 1, 1, 1, 1]),
        ("contiguous", 10, 9, 2, {"multiple": 4}, [0, 0, 0, 0, 0, 0, 0, 0, 1]),
        ("contiguous_pack", 10, 9, 2, {"stream_length": 12}, [0, 0, 0, 0, 0, 0, 1, 1, 1]),
    ],
)
def test_owners_by_hand(kind, total, response, cp_size, options, expected):
    assert reference.owners(kind, [total], [response], cp_size, **options) == [expected]


def test_owners_of_a_stream_count_the_samples_before():
    # Positions 0..2 | 3..5 | 6..8 of a stream of 9: sample 0 takes 0..3, sample 1 takes 4..7.
    assert reference.owners("contiguous_pack", [4, 4], [3, 2], 3, stream_length=9) == [[0, 0, 0], [1, 2]]
    # A first sample 5 wide moves the second by one.
    got = reference.owners("contiguous_pack", [4, 4], [3, 2], 3, stream_length=9, padded_lengths=[5, 4])
    assert got == [[0, 0, 0], [2, 2]]


@pytest.mark.parametrize("case", golden_cases("reinforce_plus_plus", "gae"), ids=lambda case: case["id"])
def test_golden_token_estimators(case):
    layout = case["layout"]
    totals, responses = ([s[k] for s in case["samples"]] for k in ("total", "response"))
    assert (
        reference.owners(layout["kind"], totals, responses, case["cp_size"], multiple=layout["multiple"])
        == case["owners"]
    )
    masks, kl, values = per_sample(case, "mask", 1), per_sample(case, "kl"), per_sample(case, "values")
    for i, sample in enumerate(case["samples"]):
        params = {k: v[i] if isinstance(v, list) else v for k, v in case["params"].items()}
        options = {**params, "token_rewards": sample.get("token_rewards")}
        reward = sample.get("reward", 0.0)
        if case["estimator"] == "gae":
            bootstrap = sample.get("bootstrap", 0.0)
            got = reference.gae(kl[i], reward, values[i], masks[i], bootstrap=bootstrap, **options)
            close(got[0], case["expect"]["advantages"][i], rel=1e-12)
            close(got[1], case["expect"]["returns"][i], rel=1e-12)
        else:
            close(
                reference.reinforce_plus_plus(kl[i], reward, masks[i], **options), case["expect"]["returns"][i], 1e-12
            )


@pytest.mark.parametrize("case", golden_cases("whiten"), ids=lambda case: case["id"])
def test_golden_whiten(case):
    options = dict(case["params"])
    mask = [m for row in case["mask"] for m in row]
    if options.pop("weight", None) == "sequence":
        options["weights"] = [1 / sum(row) for row in case["mask"] for _ in row]
    got = reference.whiten([v for row in case["x"] for v in row], mask, **options)
    close(got, [v for row in case["expect"]["whitened"] for v in row], rel=1e-12)


@pytest.mark.parametrize("case", golden_cases("grpo", "rloo"), ids=lambda case: case["id"])
def test_golden_group(case):
    grpo = {"center": "mean", "scale": "std" if case["params"].get("std", True) else "none"}
    options = grpo if case["estimator"] == "grpo" else {"center": "loo"}
    got = reference.group_advantage(case["rewards"], case["groups"], sample_mask=case["sample_mask"], **options)
    close(got, case["expect"]["scalar"], rel=1e-12)


@pytest.mark.parametrize("case", golden_cases("kl"), ids=lambda case: case["id"])
def test_golden_kl(case):
    got = reference.approx_kl(case["log_probs"], case["ref_log_probs"], case["mask"], **case["params"])
    close(got, case["expect"]["kl"], rel=1e-12)


def test_every_golden_case_is_run_above():
    known = ("reinforce_plus_plus", "gae", "whiten", "grpo", "rloo", "kl")
    assert len(golden_cases()) == len(golden_cases(*known)) > 30


def test_the_oracle_is_affordable_at_a_million_tokens():
    tokens = 1_000_000
    got = reference.reinforce_plus_plus([0.0] * tokens, 1.0, [1] * tokens, gamma=1.0, kl_coef=0.0)
    assert got[0] == got[-1] == 1.0


def test_the_oracle_imports_nothing_from_the_package():
    # Run as a lone file, without the package's own __init__.
    code = f"""
import runpy, sys
runpy.run_path({reference.__file__!r})
assert not any("cp_returns" in name or "torch" in name for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
