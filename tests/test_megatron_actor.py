"""A real Megatron-core actor under CP against the same actor on one rank: gradients, reward curves, planted bugs.

Each forked world runs all its cases, since starting it costs more than they do.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core", reason="NOT RUN: megatron-core is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import actor_ranks as ranks_do
import toy_megatron as toy
from toy_actor import Settings

F32, F64 = torch.float32, torch.float64
WORLDS = {"cp2": (2, 1, 1), "cp4": (4, 1, 1), "cp2dp2": (2, 2, 1), "tp2cp2": (2, 1, 2), "cp4dp2": (4, 2, 1)}
# A small adam_eps would turn rounding into steps, and Megatron clips by a norm in float32: the second gradient would
# show the optimizer, not the loss.
BASE = Settings(width=ranks_do.WIDTH, updates=2, lr=3e-2, adam_eps=1e-2, clip_grad=0.0)
RF = replace(BASE, estimator="reinforce_plus_plus")
CASES = {
    **{(estimator, F32): replace(BASE, estimator=estimator) for estimator in ranks_do.ESTIMATORS},
    **{(estimator, F64): replace(BASE, estimator=estimator) for estimator in ranks_do.ESTIMATORS},
    # Two micro-batches, packed samples, and Megatron's other loss convention.
    ("reinforce_plus_plus, 2 micro-batches", F32): replace(RF, micro_batches=2),
    ("grpo, 2 micro-batches", F32): replace(BASE, estimator="grpo", micro_batches=2),
    ("packed", F32): replace(RF, packed=True),
    ("packed", F64): replace(RF, packed=True),
    ("not per token", F32): replace(RF, per_token=False, micro_batches=2),
    ("grpo, not per token", F32): replace(BASE, estimator="grpo", per_token=False, micro_batches=2),
}


def run(cp: int, dp: int, tp: int) -> list:
    """What every rank of a world got for every case."""
    cases = [(settings, dtype, None) for (_, dtype), settings in CASES.items()]
    return toy.run_ranks(ranks_do.gradients, cp * dp * tp, (cp, dp, tp), cases)


@pytest.fixture(scope="module", params=WORLDS)
def world(request) -> list:
    return run(*WORLDS[request.param])


@pytest.fixture(scope="module")
def one_rank():
    """By case: the whole batch on one rank, as rows of one width, one micro-batch an update, per-token loss."""
    results = dict(zip(CASES, run(1, 1, 1)[0], strict=True))
    return lambda case: results[CASES[case].estimator, case[1]]


def largest_difference(a: dict, b: dict) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}".replace("torch.", ""))
def test_gradients_equal_those_of_one_rank(world, one_rank, case):
    """At step 0 and at the second update of the same rollout, where ratios are not 1 and clips act."""
    expected = one_rank(case)
    allowed = 1e-12 if case[1] is F64 else 1e-6
    for rank, results in enumerate(world):
        for update, (gradient, report) in enumerate(results[list(CASES).index(case)]):
            difference = largest_difference(gradient, expected[update][0])
            print(f"rank {rank} update {update}: {difference:.2g} of {largest(expected[update][0]):.3g}")
            assert difference <= allowed, f"rank {rank}, update {update}"
            for key, value in expected[update][1].items():
                assert report[key] == pytest.approx(value, abs=1e-5)


def largest(gradient: dict) -> float:
    return max(float(g.abs().max()) for g in gradient.values())


@pytest.mark.parametrize("estimator", ranks_do.ESTIMATORS)
def test_the_second_update_is_one_where_clips_act(one_rank, estimator):
    """Else the test above would not see a wrong clip."""
    first, second = one_rank((estimator, F32))
    assert first[1]["clip_fraction"] == 0
    assert 0.1 < second[1]["clip_fraction"] < 0.9
    assert largest(first[0]) > 1e-2


def test_planted_bugs_break_the_gradients(one_rank):
    """Each by far more than the 1e-6 that is asserted; and the same harness without a bug stays within it."""
    bugs = [None, *ranks_do.WRONG]
    settings = replace(RF, updates=1)
    cases = [(replace(settings, per_token="per_token" not in (bug or "")), F32, bug) for bug in bugs]
    results = toy.run_ranks(ranks_do.gradients, 2, (2, 1, 1), cases)[0]
    expected = one_rank(("reinforce_plus_plus", F32))[0][0]
    off = {bug: largest_difference(result[0][0], expected) for bug, result in zip(bugs, results, strict=True)}
    print(off)
    assert off.pop(None) <= 1e-6
    assert min(off.values()) > 1e-3, off


def test_micro_batches_with_cp_sizes_2_1_1_in_one_step():
    rows = [[slice(0, 2), slice(2, 3), slice(3, 5)], [slice(0, 2), slice(5, 6), slice(6, 7)]]
    settings = Settings(width=ranks_do.WIDTH, rope=False)
    ((expected, _),) = toy.run_ranks(ranks_do.gradients, 1, (1, 1, 1), [(settings, F32, None)])[0][0]
    for gradient in toy.run_ranks(ranks_do.dynamic, 2, rows):
        assert largest_difference(gradient, expected) <= 1e-6


def test_the_readme_block_runs_and_is_invariant():
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    section = readme.split("## In your actor (Megatron)")[1]
    block = section.split("```python\n")[1].split("```")[0]
    (expected,) = toy.run_ranks(ranks_do.readme_step, 1, block, 1)
    assert largest(expected) > 1e-2
    for gradient in toy.run_ranks(ranks_do.readme_step, 2, block, 2):
        assert largest_difference(gradient, expected) <= 1e-6
