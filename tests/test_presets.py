"""Each preset against its framework's serial loop, and each thing that a framework does and this library does not."""

import inspect
import math
import random
from functools import cache, partial
from pathlib import Path

import frameworks as fw
import pytest
import torch
import yaml

from cp_returns import ContextParallelReturns, CPInputError, ReturnsConfig

PRESETS = Path(__file__).resolve().parents[1] / "configs" / "presets"
BASELINE = {"score": fw.centred, "normalise": True}
LOOPS = {
    ("slime", "reinforce_plus_plus"): fw.slime_reinforce_plus_plus,
    ("slime", "reinforce_plus_plus_baseline"): fw.slime_reinforce_plus_plus_baseline,
    ("slime", "gae"): fw.slime_gae,
    ("slime", "grpo"): fw.slime_grpo,
    ("slime", "gspo"): fw.slime_grpo,
    ("slime", "cispo"): fw.slime_grpo,
    ("slime", "dr_grpo"): fw.trl_dr_grpo,
    ("miles", "reinforce_plus_plus"): fw.miles_reinforce_plus_plus,
    ("miles", "reinforce_plus_plus_baseline"): fw.slime_reinforce_plus_plus_baseline,
    ("miles", "gae"): fw.miles_gae,
    ("miles", "grpo"): fw.slime_grpo,
    ("miles", "gspo"): fw.slime_grpo,
    ("miles", "dr_grpo"): fw.trl_dr_grpo,
    ("verl", "reinforce_plus_plus"): fw.verl_reinforce_plus_plus,
    ("verl", "gae"): fw.verl_gae,
    ("verl", "reinforce_plus_plus_baseline"): fw.verl_reinforce_plus_plus_baseline,
    ("verl", "remax"): fw.verl_remax,
    ("verl", "grpo"): fw.verl_grpo,
    ("verl", "dr_grpo"): fw.verl_dr_grpo,
    ("verl", "rloo"): fw.verl_rloo,
    ("verl", "opo"): fw.verl_opo,
    ("openrlhf", "reinforce"): fw.openrlhf_reinforce,
    ("openrlhf", "reinforce_plus_plus"): fw.openrlhf_reinforce,
    ("openrlhf", "gae"): fw.openrlhf_gae,
    ("openrlhf", "reinforce_baseline"): partial(fw.openrlhf_group, **BASELINE),
    ("openrlhf", "reinforce_plus_plus_baseline"): partial(fw.openrlhf_group, **BASELINE),
    ("openrlhf", "rloo"): partial(fw.openrlhf_group, score=fw.leave_one_out, normalise=False),
    ("openrlhf", "dr_grpo"): partial(fw.openrlhf_group, score=fw.centred, normalise=False),
    ("openrlhf", "group_norm"): partial(fw.openrlhf_group, score=fw.standardised(1e-9), normalise=False),
    ("openrlhf", "grpo"): partial(fw.openrlhf_group, score=fw.standardised(1e-9), normalise=False),
    ("nemo_rl", "gae"): fw.nemo_rl_gae,
    ("nemo_rl", "reinforce_plus_plus"): fw.nemo_rl_reinforce_plus_plus,
    ("nemo_rl", "reinforce_plus_plus_baseline"): fw.nemo_rl_reinforce_plus_plus,
    ("nemo_rl", "grpo"): fw.nemo_rl_grpo,
    ("nemo_rl", "rloo"): fw.trl_rloo,
    ("trl", "gae"): fw.trl_gae,
    ("trl", "grpo"): fw.trl_grpo,
    ("trl", "dr_grpo"): fw.trl_dr_grpo,
    ("trl", "rloo"): fw.trl_rloo,
}
NUMBERS = {"gamma": 0.9, "lam": 0.8, "kl_coef": 0.3}


def random_batch(seed, *, spread=1.0, apart=1.0, fully_masked=True):
    """Gaps, masked tails, one-token responses, groups in any order; `apart` scales log_probs - ref_log_probs."""
    rng = random.Random(seed)
    n = rng.randint(2, 8)
    lengths = [rng.choice((1, 2, 5, 9, 13)) for _ in range(n)]
    masks = [[int(rng.random() < 0.7) for _ in range(r)] for r in lengths]
    for m in masks:
        if rng.random() < 0.4:
            m[-(len(m) // 3) :] = [0] * len(m[-(len(m) // 3) :]) if len(m) > 2 else m[-(len(m) // 3) :]
        if not any(m) and not (fully_masked and rng.random() < 0.5):
            m[rng.randrange(len(m))] = 1
    normal = lambda scale: [[rng.gauss(0, scale) for _ in range(r)] for r in lengths]
    ref = normal(1.0)
    steps = normal(apart)
    return fw.Batch(
        log_probs=fw.plus(ref, steps),
        ref_log_probs=ref,
        masks=masks,
        values=normal(spread),
        rewards=[1.0 + rng.gauss(0, spread) for _ in range(n)],
        group_ids=[rng.choice((7, -1, 7, 2**40)) for _ in range(n)],
        baseline_rewards=[rng.gauss(0, spread) for _ in range(n)],
    )


def loop_of(framework, estimator, batch, numbers=None, **switches):
    """(advantages, returns) of the serial loop; it is given the numbers that it takes."""
    loop = LOOPS[framework, estimator]
    takes = inspect.signature(loop).parameters
    numbers = NUMBERS | (numbers or {})
    return loop(batch, **{k: v for k, v in numbers.items() if k in takes} | switches)


def ours(framework, estimator, batch, numbers=None, **changes):
    """The library under the preset, on one rank and in float64, given what the configuration needs."""
    config = preset(framework, estimator, **changes)
    used = config.defaults()
    numbers = NUMBERS | (numbers or {})
    if config.gamma is not None:  # the preset fixes it
        numbers = {k: v for k, v in numbers.items() if k != "gamma"}
    if config.lam_alpha is not None:  # in place of lam
        numbers = {k: v for k, v in numbers.items() if k != "lam"}
    rows = lambda x: [torch.tensor(row, dtype=torch.float64) for row in x]
    lengths = [len(m) for m in batch.masks]
    inputs = {"rewards": batch.rewards, "loss_masks": rows(batch.masks)}
    if config.kl is not None:
        inputs |= {"log_probs": rows(batch.log_probs), "ref_log_probs": rows(batch.ref_log_probs)}
    if "lam" in used:
        inputs["values"] = rows(batch.values)
    if config["group_center"] is not None:
        inputs["group_ids"] = batch.group_ids
    if config.estimator == "remax":
        inputs["baselines"] = batch.baseline_rewards
    numbers = {k: v for k, v in numbers.items() if k in used and (k != "kl_coef" or config.kl is not None)}
    out = ContextParallelReturns(config)(
        **inputs, response_lengths=lengths, total_lengths=[n + 3 for n in lengths], **numbers
    )
    return out.advantages, out.returns


def difference(got, expected, masks):
    """The largest difference at valid tokens over the largest number there; inf where NaN meets a number."""
    worst, largest = 0.0, 1e-300
    for x, y, m in zip(got, expected, masks, strict=True):
        for a, b, valid in zip(x.tolist() if isinstance(x, torch.Tensor) else x, y, m, strict=True):
            if valid:
                worst = max(worst, math.inf if math.isnan(a) != math.isnan(b) else abs(a - b) if a == a else 0.0)
                largest = max(largest, abs(b) if math.isfinite(b) else 0.0)
    return worst / largest


def assert_equal(got, expected, masks):
    """Both lists, advantages and returns; as good as float64, or as one rounding to float32 where that is given."""
    for x, y in zip(got, expected, strict=True):
        single = isinstance(x[0], torch.Tensor) and x[0].dtype == torch.float32
        assert difference(x, y, masks) <= (2**-23 if single else 1e-11)


def assert_differ(got, expected, masks):
    assert max(difference(x, y, masks) for x, y in zip(got, expected, strict=True)) > 1e-7


@cache
def preset(framework, estimator, **changes):
    return ReturnsConfig.preset(framework, estimator=estimator, **changes)


# Names with the same settings and the same loop are run once: slime's gspo is its grpo.
EVERY = sorted({(preset(*name), str(loop)): name for name, loop in reversed(LOOPS.items())}.values())


def test_every_preset_has_a_loop():
    files = {path.stem: yaml.safe_load(path.read_text()) for path in PRESETS.glob("*.yaml")}
    assert set(files) == {"slime", "verl", "openrlhf", "nemo_rl", "miles", "trl"}
    assert {(framework, estimator) for framework, settings in files.items() for estimator in settings} == set(LOOPS)


def test_every_preset_is_a_line_of_the_page():
    rows = [line.split("|") for line in (PRESETS / "README.md").read_text().splitlines() if line.startswith("| ")]
    named = {(row[1].strip(), name.strip(" `")) for row in rows[1:] for name in row[2].split(",")}
    assert set(LOOPS) <= named


def test_unknown_presets_name_what_there_is():
    with pytest.raises(
        CPInputError, match=r"preset is 'areal'; expected one of miles, nemo_rl, openrlhf, slime, trl, verl"
    ):
        ReturnsConfig.preset("areal", estimator="gae")
    with pytest.raises(CPInputError, match="'opo'; expected one of gae, grpo, dr_grpo, rloo"):
        ReturnsConfig.preset("trl", estimator="opo")


def test_whitening_and_kl_are_left_out_whole():
    """slime without --normalize-advantages, OpenRLHF with a KL of one's own; what is then unused is an error."""
    batch = random_batch(1)
    advantages, returns = ours("slime", "reinforce_plus_plus", batch, whiten=False)
    assert all(torch.equal(a, g) for a, g in zip(advantages, returns, strict=True))
    own_kl = ReturnsConfig.preset("openrlhf", estimator="reinforce", kl=None)
    assert (own_kl.kl, own_kl.kl_clamp, own_kl.whiten_eps_mode) == (None, None, "clamp")
    with pytest.raises(CPInputError, match="whiten_ddof"):
        ReturnsConfig.preset("slime", estimator="gae", whiten=False, whiten_ddof=0)


@pytest.mark.parametrize(("framework", "estimator"), EVERY)
def test_a_preset_gives_its_frameworks_numbers(framework, estimator):
    for seed in range(100):
        batch = random_batch(seed)
        assert_equal(ours(framework, estimator, batch), loop_of(framework, estimator, batch), batch.masks)


@pytest.mark.parametrize(("framework", "estimator"), EVERY)
def test_presets_on_a_variance_below_eps(framework, estimator):
    """Here every eps and its mode shows: the population has a standard deviation of 1e-6, groups one of 1e-7."""
    small = {"gamma": 1.0, "lam": 1.0}
    for seed in range(10):
        batch = random_batch(seed, spread=1e-7, apart=1e-6)
        got, expected = ours(framework, estimator, batch, small), loop_of(framework, estimator, batch, small)
        for x, y in zip(got, expected, strict=True):
            # about 1 the inputs themselves are rounded to 2^-53, which divided by eps is the bound
            assert difference(x, y, batch.masks) <= (2**-23 if x[0].dtype == torch.float32 else 1e-6)


@pytest.mark.parametrize(("framework", "estimator"), EVERY)
def test_presets_on_groups_of_one(framework, estimator):
    batch = random_batch(3, fully_masked=False)
    batch = fw.Batch(**vars(batch) | {"group_ids": list(range(len(batch.rewards)))})
    got = ours(framework, estimator, batch)
    assert_equal(got, loop_of(framework, estimator, batch), batch.masks)
    assert all(x.isfinite().all() for rows in got for x in rows)


@pytest.mark.parametrize(("framework", "estimator"), EVERY)
def test_presets_on_log_probs_far_apart(framework, estimator):
    for seed in range(5):
        batch = random_batch(seed, apart=40.0)
        assert max(abs(k) for row in fw.kl_rows(batch) for k in row) > 20
        assert_equal(ours(framework, estimator, batch), loop_of(framework, estimator, batch), batch.masks)


def test_the_four_kl_types_of_slime():
    for seed in range(10):
        batch = random_batch(seed, apart=15.0)
        for kind, settings in (
            ("k2", {"kl": "k2"}),
            ("k3", {"kl": "k3"}),
            ("low_var_kl", {"kl": "k3", "kl_clamp": 10.0}),
        ):
            expected = loop_of("slime", "reinforce_plus_plus", batch, kl=kind)
            assert_equal(ours("slime", "reinforce_plus_plus", batch, **settings), expected, batch.masks)


@pytest.mark.parametrize("change", [{"lam_value": 1.0}, {"lam_alpha": 0.3}])
def test_nemo_rls_decoupled_and_length_adaptive_lambda(change):
    for seed in range(20):
        batch = random_batch(seed)
        expected = loop_of("nemo_rl", "gae", batch, **change)
        assert_equal(ours("nemo_rl", "gae", batch, **change), expected, batch.masks)


# What frameworks do and this library does not. Off, a switch is us; on, it is them, with their own published numbers
# where peers were run; and the two are not the same.


def plain(masks, rewards, *, log_probs=None, values=None, group_ids=None):
    zeros = [[0.0] * len(m) for m in masks]
    return fw.Batch(
        log_probs or zeros,
        zeros,
        masks,
        values or zeros,
        rewards,
        group_ids or list(range(len(masks))),
        [0.0] * len(masks),
    )


AGENT = [[1, 1, 0, 0, 1, 1]]
TOOL_TAIL = [[1, 1, 0, 0]]
KL_ON_TOOLS = plain([[1, 0, 0, 1]], [1.0], log_probs=[[0.0, 100.0, 100.0, 0.0]])
GAMMA1 = {"gamma": 1.0, "lam": 1.0, "kl_coef": 0.5}
HALF = {"gamma": 0.5, "lam": 1.0, "kl_coef": 0.0}

# framework, estimator, switch, batch, numbers, changes to the preset, their published (advantages, returns) or None
SWITCHES = {
    "slime: PPO reward on a masked last token": (
        "slime", "gae", {"reward_on_last_token": True},
        plain(TOOL_TAIL, [8.0]), HALF, {}, (None, [[1.0, 2.0, 4.0, 8.0]]),
    ),
    "slime: PPO with the KL of masked tokens": (
        "slime", "gae", {"unmasked_kl": True},
        KL_ON_TOOLS, GAMMA1, {}, (None, [[-99.0, -99.0, -49.0, 1.0]]),
    ),
    "slime: PPO reward on CP rank 0's last token": (
        "slime", "gae", {"reward_on_tail_of_rank_0": 2},
        plain([[1] * 6], [10.0]), HALF, {}, (None, [[5.0, 10.0, 0.0, 0.0, 0.0, 0.0]]),
    ),
    "slime: NaN times a mask of 0": (
        "slime", "reinforce_plus_plus", {"multiplied_masks": True},
        plain([[1, 0, 1]], [1.0], log_probs=[[0.0, math.inf, 0.0]]), GAMMA1, {}, (None, [[math.nan, math.nan, 1.0]]),
    ),
    "slime: k3 without a bound on its exponent": (
        "slime", "reinforce_plus_plus", {"unclamped_exp": True},
        plain([[1, 1]], [1.0], log_probs=[[-30.0, 0.0]]), GAMMA1, {"kl": "k3"}, None,
    ),
    "slime: single-pass float32 variance": (
        "slime", "reinforce_plus_plus", {"single_pass_float32": True},
        plain([[1] * 50_000], [0.7]), GAMMA1, {}, ([[math.nan] * 50_000], None),
    ),
    "slime: removed samples vote in their group": (
        "slime", "grpo", {"fully_masked_vote": True},
        plain([[1], [0], [1], [1]], [2.0, 5.0, 0.0, 1.0], group_ids=[0] * 4), GAMMA1, {}, None,
    ),
    "slime: removed samples vote in the baseline": (
        "slime", "reinforce_plus_plus_baseline", {"fully_masked_vote": True},
        plain([[1], [0], [1], [1], [1]], [2.0, 5.0, 0.0, 1.0, 3.0], group_ids=[0, 0, 0, 0, 1]), GAMMA1, {},
        (None, [[0.0], [3.0], [-2.0], [-1.0], [0.0]]),
    ),
    "miles: the KL of masked tokens": (
        "miles", "reinforce_plus_plus", {"unmasked_kl": True},
        KL_ON_TOOLS, GAMMA1, {}, (None, [[-99.0, -99.0, -49.0, 1.0]]),
    ),
    "miles: whitening without context parallel": (
        "miles", "reinforce_plus_plus", {"whiten_without_cp": 2, "prompt": 2},
        plain([[1] * 6], [6.0], log_probs=[[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]]), GAMMA1 | {"kl_coef": 1.0}, {},
        ([[-0.7071, -1.1619, -0.3873, 0.3873, 1.1619, 0.7071]], None),
    ),
    "verl: reset at gaps (before August 2026; SkyRL)": (
        "verl", "reinforce_plus_plus", {"reset_at_gaps": True},
        plain(AGENT, [1.0]), HALF, {}, (None, [[0.0, 0.0, 0.0, 0.25, 0.5, 1.0]]),
    ),
    "verl: reward on a masked last token, lost": (
        "verl", "reinforce_plus_plus", {"reward_on_last_token": True},
        plain(TOOL_TAIL, [1.0]), HALF, {}, (None, [[0.0, 0.0, 0.0, 0.0]]),
    ),
    "verl: GAE reward on a masked last token, lost": (
        "verl", "gae", {"reward_on_last_token": True},
        plain(TOOL_TAIL, [1.0]), HALF, {}, (None, [[0.0, 0.0, 0.0, 0.0]]),
    ),
    "verl: the summed KL in the baseline's scalar": (
        "verl", "reinforce_plus_plus_baseline", {"kl_in_scalar": True},
        plain([[1, 1], [1, 1]], [1.0, 0.0], log_probs=[[1.0, 0.0], [0.0, 0.0]], group_ids=[0, 0]), GAMMA1, {}, None,
    ),
    "verl: float32 noise over eps": (
        "verl", "grpo", {"float32": True},
        plain([[1]] * 7, [0.1] * 7, group_ids=[0] * 7), GAMMA1, {}, ([[-0.0074]] * 7, None),
    ),
    "verl: a group of one over 1 + 1e-6": (
        "verl", "grpo", {"singleton_divided": True},
        plain([[1]], [5.0]), GAMMA1, {}, ([[4.999995]], None),
    ),
    "verl: vectorised RLOO drops groups of one": (
        "verl", "rloo", {"vectorised": True}, plain([[1]], [5.0]), GAMMA1, {}, ([[0.0]], None),
    ),
    "verl: ReMax returns without the baseline": (
        "verl", "remax", {"returns_without_baseline": True},
        fw.Batch(**vars(plain([[1, 1]], [1.0])) | {"baseline_rewards": [3.0]}), GAMMA1, {}, (None, [[1.0, 1.0]]),
    ),
    "OpenRLHF: rewards clipped to 10": (
        "openrlhf", "reinforce", {"clipped_reward": True}, plain([[1, 1], [1, 1]], [50.0, 1.0]), GAMMA1, {}, None,
    ),
    "OpenRLHF: fully masked samples vote": (
        "openrlhf", "rloo", {"fully_masked_vote": True},
        plain([[1], [0], [1], [1]], [2.0, 5.0, 0.0, 1.0], group_ids=[0] * 4), GAMMA1, {}, None,
    ),
    "NeMo-RL: one valid token": (
        "nemo_rl", "gae", {"unguarded": True}, plain([[1, 0]], [1.0]), GAMMA1, {}, ([[math.nan, math.nan]], None),
    ),
    "NeMo-RL: placeholders vote (older)": (
        "nemo_rl", "reinforce_plus_plus", {"fully_masked_vote": True},
        plain([[1], [0], [1], [1], [1]], [2.0, 5.0, 0.0, 1.0, 3.0], group_ids=[0, 0, 0, 0, 1]), GAMMA1, {}, None,
    ),
    "TRL: reward on the token after the end": (
        "trl", "gae", {"reward_after_eos": True},
        plain([[1, 1, 0, 0]], [1.0], values=[[0.5, 0.5, 0.5, 0.5]]), HALF, {}, None,
    ),
    "TRL: each process whitens alone": (
        "trl", "gae", {"processes": 2}, plain([[1, 1], [1, 1]], [1.0, 5.0]), HALF, {}, None,
    ),
    "TRL: the summed KL in RLOO's scalar": (
        "trl", "rloo", {"kl_in_scalar": True, "kl_coef": 0.5},
        plain([[1, 1], [1, 1]], [1.0, 0.0], log_probs=[[1.0, 0.0], [0.0, 0.0]], group_ids=[0, 0]), GAMMA1, {}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SWITCHES)
def test_a_difference_is_a_switch(name):
    framework, estimator, switch, batch, numbers, changes, published = SWITCHES[name]
    kl = {"kl": changes["kl"]} if "kl" in changes else {}
    off = {key: value for key, value in switch.items() if key in ("kl_coef", "prompt")}
    got = ours(framework, estimator, batch, numbers, **changes)
    theirs = loop_of(framework, estimator, batch, numbers, **kl, **switch)
    assert_equal(got, loop_of(framework, estimator, batch, numbers, **kl, **off), batch.masks)
    assert_differ(got, theirs, batch.masks)
    for x, y in zip(theirs, published or (), strict=False):
        if y is not None:
            everywhere = [[1] * len(row) for row in y]
            assert difference(x, y, everywhere) <= 1e-2 if name.endswith("over eps") else 1e-4


def test_slime_asserts_where_a_fully_masked_sample_gives_zeros():
    batch = plain([[0, 0], [1, 1]], [5.0, 1.0])
    with pytest.raises(AssertionError):
        loop_of("slime", "reinforce_plus_plus", batch, fully_masked_asserts=True)
    got = ours("slime", "reinforce_plus_plus", batch)
    assert_equal(got, loop_of("slime", "reinforce_plus_plus", batch), batch.masks)
    assert [x.tolist() for x in (got[0][0], got[1][0])] == [[0.0, 0.0]] * 2


def test_openrlhfs_phantom_values_are_its_presets_clock():
    """V = 0 at gap tokens that are steps: .0849 before the gap, where skipping it gives .1805 (lambda .95, V = .8)."""
    batch = plain(AGENT, [1.0], values=[[0.8] * 6])
    numbers = {"gamma": 1.0, "lam": 0.95}
    theirs = loop_of("openrlhf", "gae", batch, numbers)
    assert_equal(ours("openrlhf", "gae", batch, numbers), theirs, batch.masks)
    skipping = ours("openrlhf", "gae", batch, numbers, clock="trainable")
    assert_equal(skipping, loop_of("openrlhf", "gae", batch, numbers, phantom_values=False), batch.masks)
    assert_differ(skipping, theirs, batch.masks)
    assert [round(x - 0.8, 4) for x in theirs[1][0][:2]] == [0.0807, 0.0849]
    assert [round(x - 0.8, 4) for x in skipping[1][0].tolist()[:2]] == [0.1715, 0.1805]


def test_nemo_rls_reinforce_plus_plus_is_not_to_go():
    """One KL spike at token 1: NeMo-RL punishes token 1 alone; REINFORCE++ tokens 0 and 1."""
    batch = plain([[1, 1, 1, 1]], [1.0], log_probs=[[0.0, 1.0, 0.0, 0.0]])
    numbers = {"gamma": 1.0, "kl_coef": 0.1}
    theirs = loop_of("nemo_rl", "reinforce_plus_plus", batch, numbers)
    assert_equal(ours("nemo_rl", "reinforce_plus_plus", batch, numbers), theirs, batch.masks)
    assert [round(x, 3) for x in theirs[0][0]] == [0.577, -1.732, 0.577, 0.577]
    to_go = ours("slime", "reinforce_plus_plus", batch, numbers)[1]
    assert to_go[0].tolist() == pytest.approx([0.9, 0.9, 1.0, 1.0])
