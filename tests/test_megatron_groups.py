"""Which groups a call uses: Megatron's real parallel_state, explicit ones, collections, packed_seq_params, meshes."""

import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from cp_returns import groups
from cp_returns.collectives import alone
from cp_returns.config import ReturnsConfig
from cp_returns.errors import CPInputError
from cp_returns.layout import zigzag
from cp_returns.module import ContextParallelReturns
from cp_returns.simulate import RankFailure, in_processes, in_threads

RESPONSE, TOTAL = [9, 1, 14, 3], [16, 60, 21, 8]
WHITENED = ReturnsConfig(gamma=0.9, kl_coef=0.1, whiten=True)


@pytest.fixture
def mpu():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron's own at import: deprecated names, absent GPU libraries
        return pytest.importorskip("megatron.core.parallel_state", reason="NOT RUN: megatron-core is not installed")


def full_batch() -> dict:
    r = torch.Generator().manual_seed(3)
    return {
        "kl": [torch.randn(n, generator=r) for n in RESPONSE],
        "loss_masks": [torch.arange(n) % 4 != 2 for n in RESPONSE],
        "rewards": [1.0, -1.0, 0.5, 2.0],
        "response_lengths": RESPONSE,
        "total_lengths": TOTAL,
    }


def local(cp_rank: int, cp_size: int, dp_rank: int = 0, dp_size: int = 1) -> tuple[dict, list[torch.Tensor]]:
    """What one rank holds, and the positions of its tokens in each response."""
    which = range(dp_rank, len(RESPONSE), dp_size)
    batch = {key: [x[i] for i in which] for key, x in full_batch().items()}
    layout = zigzag(batch["total_lengths"], batch["response_lengths"], cp_size)
    own = [torch.tensor(layout.token_owners(i) == cp_rank) for i in range(len(which))]
    batch["kl"] = [kl[here] for kl, here in zip(batch["kl"], own, strict=True)]
    return batch, own


def expected(cp_rank: int, cp_size: int, dp_rank: int = 0, dp_size: int = 1) -> list[torch.Tensor]:
    """The advantages of one rank that holds everything, cut to what this rank holds."""
    me = dist.new_subgroups(group_size=1)[0]
    one = ContextParallelReturns(WHITENED, cp_group=me, dp_cp_group=me)(**full_batch()).advantages
    _, own = local(cp_rank, cp_size, dp_rank, dp_size)
    return [one[i][here] for i, here in zip(range(dp_rank, len(RESPONSE), dp_size), own, strict=True)]


def assert_close(got, wanted):
    for x, y in zip(got, wanted, strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-6 * 3)


def grid(world: int, **sizes):
    """parallel_state with these sizes on `world` gloo ranks; the module is given no group."""

    def fn(rank, peers):
        from megatron.core import parallel_state as mpu

        if mpu.model_parallel_is_initialized():
            mpu.destroy_model_parallel()
        mpu.initialize_model_parallel(**sizes)
        cp_rank, cp_size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
        dp_rank, dp_size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        batch, _ = local(cp_rank, cp_size, dp_rank, dp_size)
        out = ContextParallelReturns(WHITENED)(**batch)
        assert_close(out.advantages, expected(cp_rank, cp_size, dp_rank, dp_size))
        wide = groups.data_and_context_parallel(None, None, alone)
        assert wide.group is mpu.get_data_parallel_group(with_context_parallel=True)
        return cp_size, dp_size, out.info.whitening.population

    return in_processes(fn, world, megatron=True, timeout=60)


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (1, {}),
        (2, {"context_parallel_size": 2}),
        (2, {}),
        (3, {"context_parallel_size": 3}),
        (4, {"context_parallel_size": 2}),
        (4, {"context_parallel_size": 2, "tensor_model_parallel_size": 2}),
        (4, {"tensor_model_parallel_size": 2}),
    ],
    ids=str,
)
def test_megatron_groups_are_found(mpu, world, sizes):
    tp, cp = (sizes.get(f"{name}_parallel_size", 1) for name in ("tensor_model", "context"))
    valid = sum(int(mask.sum()) for mask in full_batch()["loss_masks"])
    assert grid(world, **sizes) == [(cp, world // (tp * cp), valid)] * world


def test_explicit_groups_and_collections_come_before_megatron(mpu):
    """parallel_state says cp 4; the collection, then the call, say otherwise, and each is used."""

    def fn(rank, peers):
        from megatron.core import process_groups_config as names

        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pair, world = pairs[rank // 2], dist.group.WORLD
        kind = getattr(names, "ProcessGroupCollection", None) or names.ModelCommProcessGroups  # up to 0.14
        collection = kind()
        collection.cp, collection.dp_cp = pair, world
        wanted = expected(rank % 2, 2, rank // 2, 2)
        batch, _ = local(rank % 2, 2, rank // 2, 2)
        by_collection = ContextParallelReturns(WHITENED, pg_collection=collection)
        assert_close(by_collection(**batch).advantages, wanted)
        assert_close(ContextParallelReturns(WHITENED)(**batch, pg_collection=collection).advantages, wanted)
        by_groups = ContextParallelReturns(WHITENED, cp_group=pair, dp_cp_group=world)
        assert_close(by_groups(**batch).advantages, wanted)
        # given per call, a group wins over what the module was built with
        batch, _ = local(rank, 4)
        assert_close(by_collection(**batch, cp_group=world, dp_cp_group=world).advantages, expected(rank, 4))
        # and nothing given: parallel_state
        assert_close(ContextParallelReturns(WHITENED)(**batch).advantages, expected(rank, 4))

    in_processes(fn, 4, cp_size=4, megatron=True, timeout=60)


def test_peers_that_hold_other_data_are_whitened_with():
    """dp_cp_gtp_remat, where a collection has it, is wider than its dp_cp."""

    def fn(rank, peers):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        pair = pairs[rank // 2]
        collection = SimpleNamespace(cp=pair, dp_cp=pair, dp_cp_gtp_remat=dist.group.WORLD)
        batch, _ = local(rank % 2, 2, rank // 2, 2)
        out = ContextParallelReturns(WHITENED)(**batch, pg_collection=collection)
        assert_close(out.advantages, expected(rank % 2, 2, rank // 2, 2))
        collection.dp_cp_gtp_remat = None
        return ContextParallelReturns(WHITENED)(**batch, pg_collection=collection).info.whitening.population

    halves = [sum(int(mask.sum()) for mask in full_batch()["loss_masks"][dp::2]) for dp in (0, 1)]
    assert in_processes(fn, 4, timeout=60) == [halves[0], halves[0], halves[1], halves[1]]


def test_dynamic_context_parallelism_changes_the_group_per_call(mpu):
    """packed_seq_params: its own cp_group; local_cp_size 1 means no context parallelism; else the module's."""

    def fn(rank, peers):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        returns_fn = ContextParallelReturns(ReturnsConfig(gamma=0.9, kl_coef=0.1), cp_group=None)
        one = returns_fn(**full_batch(), packed_seq_params=SimpleNamespace(cp_group=None, local_cp_size=1))
        assert one.info.collectives == 0

        def check(cp_rank, cp_size, packed):
            batch, own = local(cp_rank, cp_size)
            out = returns_fn(**batch, packed_seq_params=packed)
            for x, whole, here in zip(out.returns, one.returns, own, strict=True):
                assert torch.equal(x, whole[here])

        check(rank % 2, 2, SimpleNamespace(cp_group=pairs[rank // 2], local_cp_size=2))
        check(rank, 4, SimpleNamespace(cp_group=None, local_cp_size=None))
        check(rank, 4, None)
        check(rank % 2, 2, SimpleNamespace(cp_group=pairs[rank // 2]))

    in_processes(fn, 4, cp_size=4, megatron=True, timeout=60)


def test_padded_lengths_come_from_cu_seqlens_q_padded():
    """Megatron packs each sample to a multiple of its own; what it says is used, not slime's rule."""

    def fn(rank, peers):
        padded = [24, 64, 24, 16]
        layout = zigzag(TOTAL, RESPONSE, 2, padded_lengths=padded)
        packed = SimpleNamespace(
            cp_group=None, cu_seqlens_q_padded=torch.tensor([0, 24, 88, 112, 128], dtype=torch.int32)
        )
        batch = full_batch()
        own = [torch.tensor(layout.token_owners(i) == rank) for i in range(4)]
        batch["kl"] = [kl[here] for kl, here in zip(batch["kl"], own, strict=True)]
        out = ContextParallelReturns(WHITENED, cp_group=dist.group.WORLD)(**batch, packed_seq_params=packed)
        me = dist.new_subgroups(group_size=1)[0]
        one = ContextParallelReturns(WHITENED, cp_group=me, dp_cp_group=me)(**full_batch())
        assert_close(out.advantages, [x[here] for x, here in zip(one.advantages, own, strict=True)])
        slime_rule = zigzag(TOTAL, RESPONSE, 2).lengths(rank).tolist()
        return slime_rule != layout.lengths(rank).tolist()

    assert in_processes(fn, 2, timeout=60) == [True, True]


def test_a_device_mesh_gives_its_dimensions_groups():
    def fn(rank, peers):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        flat = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp_cp",))
        batch, _ = local(rank % 2, 2, rank // 2, 2)
        for cp_group, dp_cp_group in ((mesh["cp"], flat), (mesh.get_group("cp"), flat.get_group())):
            out = ContextParallelReturns(WHITENED, cp_group=cp_group, dp_cp_group=dp_cp_group)(**batch)
            assert_close(out.advantages, expected(rank % 2, 2, rank // 2, 2))

    in_processes(fn, 4, timeout=60)


def test_more_than_one_process_and_no_group_is_an_error():
    """Never a silent width of one."""

    def fn(rank, peers):
        batch, _ = local(rank, 2)
        with pytest.raises(RuntimeError, match="no context-parallel group among 2 processes: give cp_group"):
            ContextParallelReturns(ReturnsConfig())(**batch)
        pair = dist.new_group([0, 1])
        ContextParallelReturns(WHITENED, cp_group=pair)(**batch)  # as wide as the world: nothing is left out
        me = dist.new_subgroups(group_size=1)[0]
        whole = full_batch()
        with pytest.raises(RuntimeError, match="no group to whiten over among 2 processes: give dp_cp_group"):
            ContextParallelReturns(WHITENED, cp_group=me)(**whole)
        with pytest.raises(TypeError, match="is no process group"):
            ContextParallelReturns(WHITENED, cp_group="world")(**whole)

    in_processes(fn, 2, timeout=60)


def test_a_rank_outside_the_group_is_told_so():
    def fn(rank, peers):
        group = dist.new_group([0])
        if rank == 1:
            ContextParallelReturns(ReturnsConfig(), cp_group=group)(**full_batch())

    with pytest.raises(RankFailure, match="this rank is not in") as caught:
        in_processes(fn, 2, timeout=60)
    assert caught.value.first == 1


def test_one_process_needs_no_group():
    """Neither torch.distributed nor Megatron is set up here."""
    out = ContextParallelReturns(WHITENED)(**full_batch())
    assert out.info.collectives == 0
    assert groups.context_parallel(None, None, None) is alone


def test_threads_are_groups_too():
    def fn(rank, all_gather):
        batch, _ = local(rank, 3)
        return ContextParallelReturns(WHITENED, cp_group=all_gather.cp)(**batch).advantages

    one = ContextParallelReturns(WHITENED)(**full_batch()).advantages
    for rank, got in enumerate(in_threads(fn, 3)):
        _, own = local(rank, 3)
        assert_close(got, [x[here] for x, here in zip(one, own, strict=True)])


def test_a_wrong_length_is_found_over_megatron_groups(mpu):
    def fn(rank, peers):
        batch, _ = local(rank % 2, 2, rank // 2, 2)
        if rank == 1:
            batch["kl"] = [torch.zeros(n) for n in batch["response_lengths"]]
        try:
            ContextParallelReturns(WHITENED)(**batch)
        except CPInputError as error:
            return str(error)

    texts = in_processes(fn, 4, cp_size=2, megatron=True, timeout=60)
    assert texts == [texts[0]] * 4
    assert re.match(r"DP x CP rank 0 of 4: in its CP group, CP rank 1 of 2: sample 0, kl has shape \[9\]", texts[0])
