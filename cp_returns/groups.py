"""Which process groups a call uses, resolved per call because dynamic context parallelism changes them per micro-batch.

megatron-core is never imported: where nobody has imported it, it has no groups either.
"""

import sys
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from cp_returns.collectives import AllGather, alone, over

Group = Any
"""A process group, a one-dimensional DeviceMesh, or an all-gather that knows its `rank` and `size` (as `over(group)`
does).
"""


def context_parallel(cp_group: Group, packed_seq_params: Any, pg_collection: Any) -> AllGather:
    """The all-gather over the CP group.

    In this order: cp_group, packed_seq_params.cp_group, packed_seq_params.local_cp_size == 1 (no CP), pg_collection.cp,
    Megatron's parallel_state. Raises RuntimeError with more than one process and none of these: never a silent cp_size
    1.
    """
    if cp_group is not None:
        return _over(cp_group)
    if getattr(packed_seq_params, "cp_group", None) is not None:
        return _over(packed_seq_params.cp_group)
    if getattr(packed_seq_params, "local_cp_size", None) == 1:
        return alone
    if getattr(pg_collection, "cp", None) is not None:
        return _over(pg_collection.cp)
    state = _megatron_state()
    if state is not None:
        return _over(state.get_context_parallel_group())
    if _world_size() == 1:
        return alone
    raise RuntimeError(
        f"no context-parallel group among {_world_size()} processes: give cp_group (or pg_collection, or "
        "packed_seq_params with one), or initialise megatron.core.parallel_state"
    )


def data_and_context_parallel(dp_cp_group: Group, pg_collection: Any, cp: AllGather) -> AllGather:
    """The all-gather over DP x CP, whose tokens are whitened together.

    In this order: dp_cp_group, pg_collection.dp_cp_gtp_remat (its peers hold other data, and newer `dp_cp` leaves them
    out), pg_collection.dp_cp, Megatron's get_data_parallel_group(with_context_parallel=True), the CP group when it is
    the whole world.
    """
    if dp_cp_group is not None:
        return _over(dp_cp_group)
    for name in ("dp_cp_gtp_remat", "dp_cp"):
        if getattr(pg_collection, name, None) is not None:
            return _over(getattr(pg_collection, name))
    state = _megatron_state()
    if state is not None:
        return _over(state.get_data_parallel_group(with_context_parallel=True))
    if getattr(cp, "size", 1) == _world_size() or not (cp is alone or isinstance(cp, over)):
        return cp
    raise RuntimeError(
        f"no group to whiten over among {_world_size()} processes: give dp_cp_group (or pg_collection), or initialise "
        "megatron.core.parallel_state"
    )


def given(group: Group) -> AllGather:
    """The all-gather over a group that may be absent."""
    return alone if group is None else _over(group)


def rank_and_size(all_gather: AllGather) -> tuple[int, int]:
    return getattr(all_gather, "rank", 0), getattr(all_gather, "size", 1)


def device_of(all_gather: AllGather, *given: object) -> torch.device:
    """Where a batch lives: with the first tensor given, and an empty one on the GPU for NCCL, whose messages must."""
    for x in given:
        if isinstance(x, Tensor) and not x.is_meta:
            return x.device
    if isinstance(all_gather, over) and dist.get_backend(all_gather.group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _over(group: Group) -> AllGather:
    if isinstance(group, dist.ProcessGroup):
        return over(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError("this rank is not in the process group that it was given")
    if hasattr(group, "get_group"):  # DeviceMesh
        return over(group.get_group())
    if callable(group) and hasattr(group, "rank") and hasattr(group, "size"):
        return cast("AllGather", group)
    raise TypeError(f"{group!r} is no process group, one-dimensional DeviceMesh, or all-gather with a rank and a size")


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _megatron_state():
    """megatron.core.parallel_state where it is initialised, else None."""
    state = sys.modules.get("megatron.core.parallel_state")
    return state if state is not None and state.model_parallel_is_initialized() else None
