"""Real gloo ranks: torchrun --nproc-per-node 4 -m pytest tests/test_gloo.py

Under torchrun every test below runs on all four ranks at once; groups of 2 and 3 are sub-groups, in which the other
ranks take no part. Run by pytest alone, this file has one test: it starts that command.
"""

import os
import re
import subprocess
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cp_returns.collectives import over
from cp_returns.config import ReturnsConfig
from cp_returns.module import ContextParallelReturns
from cp_returns.scenario import make_layout
from cp_returns.simulate import under_torchrun

ROOT = Path(__file__).resolve().parents[1]
TOKENS = ("kl", "values", "token_rewards")
LAYOUTS = [("zigzag", 1), ("zigzag", 4), ("contiguous", 1), ("contiguous_pack", 1)]
CONFIGS = {
    "reinforce_plus_plus": {"gamma": 0.99, "kl_coef": 0.05},
    "reinforce_plus_plus, turn clock": {"gamma": 0.9, "kl_coef": 0.05, "clock": "turn"},
    "gae": {"estimator": "gae", "gamma": 0.99, "lam": 0.95, "kl_coef": 0.05},
}


def on_ranks(test):
    """A test that needs the ranks of torchrun; without them it is no test of its own."""
    return test if under_torchrun() else None


if not under_torchrun():

    def test_torchrun_runs_this_file_on_four_ranks():
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        process = subprocess.Popen(
            [*torchrun, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_gloo.py"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its ranks; killed, it would leave them behind
            out, err = process.communicate(timeout=60)
        assert process.returncode == 0, out[-4000:] + err[-4000:]
        passed = re.findall(r"(\d+) passed", out)
        assert len(passed) == 4
        assert set(passed) == {passed[0]}
        assert int(passed[0]) > 10
        assert "skipped" not in out


@pytest.fixture(scope="module")
def world():
    """{ranks: group} of the groups that the tests use, every one made by every rank."""
    torch.set_num_threads(1)
    # One host: do not wait for a name server to say so.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if dist.get_world_size() != 4:
        raise ValueError(f"{dist.get_world_size()} ranks; these tests are for torchrun --nproc-per-node 4")
    sets = [(0,), (1,), (2,), (3,), (0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2), (0, 1, 2, 3)]
    yield {ranks: dist.new_group(list(ranks)) for ranks in sets}
    dist.destroy_process_group()


def samples() -> dict[str, list]:
    """Whole responses: one token; two after a long prompt (most ranks own nothing); gaps; a masked tail; none at all.

    No total length is a multiple of anything.
    """
    r = torch.Generator().manual_seed(0)
    response = [1, 2, 37, 53, 0, 101, 29, 5]
    total = [11, 1009, 41, 97, 7, 103, 59, 47]
    masks = [torch.rand(n, generator=r) < 0.7 for n in response]
    masks[0][:] = True
    masks[2][10:20] = False
    masks[3][30:] = False
    masks[7][:] = False
    batch = {"response_lengths": response, "total_lengths": total, "loss_masks": masks}
    for name in TOKENS:
        batch[name] = [torch.where(m, torch.randn(len(m), generator=r), 0.0) for m in masks]
    for i, mask in enumerate(masks):
        batch["kl"][i][~mask] = float("nan")
    return batch | {"rewards": torch.randn(len(response), generator=r).tolist()}


def pick(batch: dict, which: list[int]) -> dict:
    return {key: [x[i] for i in which] for key, x in batch.items()}


def shards(full: list, layout, rank: int) -> list:
    if not full:
        return []
    index = torch.from_numpy(layout.index(rank))
    return list(torch.cat(full)[index].split(layout.lengths(rank).tolist()))


def call(batch: dict, config: dict, group, wide=None, layout=("zigzag", 1), **more):
    """The module on this rank's shards; (outputs, layout, rank in the group)."""
    name, multiple = layout
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    cut = make_layout(name, batch["total_lengths"], batch["response_lengths"], size, multiple=multiple)
    tokens = TOKENS if config.get("estimator") == "gae" else ("kl", "token_rewards")
    inputs = {key: batch[key] for key in ("response_lengths", "total_lengths", "loss_masks", "rewards")}
    inputs |= {key: shards(batch[key], cut, rank) for key in tokens} | more
    if name == "contiguous_pack":
        inputs["stream_length"] = size * cut.grid_length
    else:
        config = config | {"multiple": multiple}
    returns_fn = ContextParallelReturns(ReturnsConfig(layout=name, **config), cp_group=group, dp_cp_group=wide)
    return returns_fn(**inputs), cut, rank


def mine(world, *sets):
    """The first of these sets of ranks that holds this rank, as a group; None if there is none."""
    return next((world[ranks] for ranks in sets if dist.get_rank() in ranks), None)


def alone(world, batch, config, **more):
    """One rank that holds everything."""
    group = world[dist.get_rank(),]
    return call(batch, config, group, group, **more)[0]


@on_ranks
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_gather_gives_the_bits_of_one_rank(world, cp_size, layout):
    group = mine(world, tuple(range(cp_size)))
    if group is None:
        return
    batch = samples()
    for config in CONFIGS.values():
        one = alone(world, batch, config)
        out, cut, rank = call(batch, config, group, layout=layout)
        for got, expected in ((out.returns, one.returns), (out.advantages, one.advantages), (out.masks, one.masks)):
            for shard, part in zip(got, shards(expected, cut, rank), strict=True):
                assert torch.equal(shard, part)
        assert any(len(x) == 0 for x in out.returns)
        assert max(float(x.abs().max()) for x in one.returns if len(x)) > 1


@on_ranks
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_carry_is_within_a_unit(world, cp_size, layout):
    group = mine(world, tuple(range(cp_size)))
    if group is None:
        return
    batch = samples()
    for config in CONFIGS.values():
        one = alone(world, batch, config)
        out, cut, rank = call(batch, config | {"strategy": "carry"}, group, layout=layout)
        for name in ("returns", "advantages"):
            expected = getattr(one, name)
            for i, (shard, part) in enumerate(zip(getattr(out, name), shards(expected, cut, rank), strict=True)):
                if len(part):
                    values = batch["values"][i] if config.get("estimator") == "gae" else expected[i]
                    largest = max(float(x.abs().max()) for x in (one.returns[i], one.advantages[i], values))
                    assert float((shard.double() - part.double()).abs().max()) <= 2**-23 * largest


FACTORS = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)]


def groups_of(world, dp: int, cp: int):
    """(this rank's DP rank, its CP group, the DP x CP group), None for a rank that takes no part."""
    rank = dist.get_rank()
    if rank >= dp * cp:
        return None
    members = tuple(range(rank // cp * cp, rank // cp * cp + cp))
    return rank // cp, world[members], world[tuple(range(dp * cp))]


@on_ranks
@pytest.mark.parametrize("strategy", ["gather", "carry"])
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "gae"])
@pytest.mark.parametrize(("dp", "cp"), FACTORS)
def test_whitened_advantages_do_not_depend_on_the_grid(world, dp, cp, estimator, strategy):
    place = groups_of(world, dp, cp)
    if place is None:
        return
    dp_rank, group, wide = place
    batch = samples()
    which = list(range(dp_rank, len(batch["kl"]), dp))
    config = CONFIGS[estimator] | {"whiten": True}
    one = alone(world, batch, config)
    out, cut, rank = call(pick(batch, which), config | {"strategy": strategy}, group, wide)
    largest = max(float(x.abs().max()) for x in one.advantages if len(x))
    valid = torch.cat(one.advantages)[torch.cat(batch["loss_masks"])]
    assert abs(float(valid.double().std()) - 1) < 1e-5
    assert abs(float(valid.double().mean())) < 1e-5
    for shard, part in zip(out.advantages, shards([one.advantages[i] for i in which], cut, rank), strict=True):
        assert torch.allclose(shard, part, rtol=0, atol=1e-6 * largest)
    for shard, part in zip(out.returns, shards([one.returns[i] for i in which], cut, rank), strict=True):
        assert torch.allclose(shard, part, rtol=0, atol=1e-6 * max(float(x.abs().max()) for x in one.returns if len(x)))
    assert out.info.whitening.population == one.info.whitening.population == int(torch.cat(batch["loss_masks"]).sum())


@on_ranks
@pytest.mark.parametrize("strategy", ["gather", "carry"])
def test_an_empty_batch_joins_every_collective(world, strategy):
    """Everywhere, and in one data-parallel replica only: the others are whitened as if it were not there."""
    dp_rank, group, wide = groups_of(world, 2, 2)
    batch, config = samples(), {"whiten": True, "strategy": strategy, "gamma": 0.9}
    nothing = pick(batch, [])
    out, _, _ = call(nothing, config, group, wide)
    assert (out.returns, out.advantages, out.masks) == ([], [], [])
    assert (out.info.samples, out.info.valid_tokens, out.info.kl_mean, out.info.whitening.population) == (0, 0, 0, 0)
    one = alone(world, batch, config)
    out, cut, rank = call(nothing if dp_rank else batch, config, group, wide)
    assert out.info.whitening.population == one.info.whitening.population
    if dp_rank == 0:
        for shard, part in zip(out.advantages, shards(one.advantages, cut, rank), strict=True):
            assert torch.allclose(shard, part, rtol=0, atol=1e-5)
    else:
        assert out.advantages == []


def spans(tensors) -> list[tuple[int, int]]:
    """The memory of each tensor, empty ones left out."""
    return [(x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in tensors if x.numel()]


@on_ranks
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("strategy", ["gather", "carry"])
@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "gae"])
def test_no_graph_leaves_no_input_changes_and_nothing_is_shared(world, estimator, strategy, whiten, size):
    group = world[(0, 1, 2, 3)] if size == 4 else world[dist.get_rank(),]
    batch = pick(samples(), [2, 3, 5])
    config = CONFIGS[estimator] | {"strategy": strategy, "whiten": whiten}
    cut = make_layout("zigzag", batch["total_lengths"], batch["response_lengths"], size)
    given = {key: shards(batch[key], cut, dist.get_rank(group)) for key in TOKENS[: 3 if estimator == "gae" else 1]}
    given["kl"] = [x.requires_grad_() * 1.0 for x in given["kl"]]
    for x in given.get("values", []):
        x.requires_grad_()
    given["loss_masks"] = [mask.float() for mask in batch["loss_masks"]]
    given["rewards"] = torch.tensor(batch["rewards"], dtype=torch.float64)
    tensors = [x for key in given for x in given[key]]
    before = [x.detach().clone() for x in tensors]
    versions = [x._version for x in tensors]
    lengths = {key: batch[key] for key in ("response_lengths", "total_lengths")}
    returns_fn = ContextParallelReturns(ReturnsConfig(**config), cp_group=group, dp_cp_group=group)
    with torch.enable_grad():
        out = returns_fn(**given, **lengths)
    outputs = [*out.returns, *out.advantages, *out.masks]
    assert not any(x.requires_grad or x.grad_fn is not None for x in outputs)
    assert [x._version for x in tensors] == versions
    assert all(
        torch.equal(x.detach().view(-1).nan_to_num(77), y.view(-1).nan_to_num(77))
        for x, y in zip(tensors, before, strict=True)
    )
    assert lengths == {key: pick(samples(), [2, 3, 5])[key] for key in lengths}
    taken = sorted(spans([*tensors, *outputs]))
    owned = set(spans(outputs))
    for first, second in pairwise(taken):
        assert first[1] <= second[0] or not {first, second} & owned, "an output shares memory"
    for x in outputs:
        x.fill_(5)
    again = returns_fn(**given, **lengths)
    assert all(
        torch.equal(x.nan_to_num(77), y.nan_to_num(77))
        for x, y in zip((t.detach() for t in tensors), before, strict=True)
    )
    assert not any((x == 5).any() for x in [*again.returns, *again.advantages])


@on_ranks
@pytest.mark.parametrize("strategy", ["gather", "carry"])
def test_twenty_calls_give_the_same_bits(world, strategy):
    _, group, wide = groups_of(world, 2, 2)
    batch, config = samples(), CONFIGS["gae"] | {"whiten": True, "strategy": strategy}
    first = torch.cat(call(batch, config, group, wide)[0].advantages)
    for _ in range(20):
        assert torch.equal(torch.cat(call(batch, config, group, wide)[0].advantages), first)


@on_ranks
def test_over_is_an_all_gather_in_rank_order_on_any_shape(world):
    rank = dist.get_rank()
    gather = over(world[(0, 1, 2, 3)])
    assert (gather.rank, gather.size) == (rank, 4)
    for x in (torch.tensor(rank), torch.full((3, 2), rank), torch.full((2, 3), rank).t(), torch.zeros(0, 5)):
        got = gather(x)
        assert got.shape == (4, *x.shape)
        assert got.dtype == x.dtype
        assert all(bool((got[r] == r).all()) for r in range(4))
    x = torch.full((3,), float(rank), requires_grad=True)
    assert not gather(x).requires_grad
    if rank in (1, 3):
        assert over(world[(1, 3)])(torch.tensor([rank])).tolist() == [[1], [3]]
    assert str(gather) == "the gloo group of ranks [0, 1, 2, 3]"


@on_ranks
def test_numbers_given_as_numpy_or_tensors_are_the_same(world):
    _, group, _ = groups_of(world, 2, 2)
    batch = samples()
    plain = call(batch, CONFIGS["reinforce_plus_plus"], group)[0].returns
    lengths = {key: np.array(batch[key]) for key in ("response_lengths", "total_lengths")}
    other = call(
        batch, CONFIGS["reinforce_plus_plus"], group, **lengths, rewards=torch.tensor(batch["rewards"]).double()
    )
    assert all(torch.equal(x, y) for x, y in zip(plain, other[0].returns, strict=True))
