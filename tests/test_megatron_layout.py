"""Megatron-core's own slicing of a batch over its own context-parallel groups, asked who holds a position."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from cp_returns.layout import zigzag
from cp_returns.simulate import in_processes

pytest.importorskip("megatron.core", reason="NOT RUN: megatron-core is not installed")

LENGTHS = [(1, 1), (1, 0), (2, 3), (3, 5), (8, 7)]  # (pieces' length, response's share in eighths of the total)


class NoCuda(TorchFunctionMode):
    """Old versions pin the index of a batch's slices and send it to a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.cuda:
            return args[0]
        return func(*args, **{key: value for key, value in (kwargs or {}).items() if key != "pin_memory"})


def held_positions(rank, all_gather) -> dict[int, list[int]]:
    """Of each total length, the positions that Megatron leaves this rank."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    assert parallel_state.get_context_parallel_world_size() == all_gather.cp_size
    assert parallel_state.get_context_parallel_rank() == all_gather.cp_rank
    held = {}
    for piece, _ in LENGTHS:
        total = 2 * all_gather.cp_size * piece
        with NoCuda():
            batch = get_batch_on_this_cp_rank({"tokens": torch.arange(total)[None], "labels": None})
        held[total] = batch["tokens"][0].tolist()
    return held


@pytest.mark.parametrize(("n", "cp_size"), [(2, 2), (3, 3), (4, 4), (4, 2)])
def test_owners_are_those_of_megatron(n, cp_size):
    """Token j is where position prompt - 1 + j is; Megatron's shards are this layout's local packs, in their order."""
    for rank, held in enumerate(in_processes(held_positions, n, cp_size=cp_size, megatron=True)):
        for piece, eighths in LENGTHS:
            total = 2 * cp_size * piece
            response = min(total - 1, max(0, total * eighths // 8))
            first = total - response - 1
            expected = [p - first for p in held[total] if first <= p < first + response]
            layout = zigzag([total], [response], cp_size)
            assert layout.index(rank % cp_size).tolist() == expected
            # a total that Megatron pads up to this length is cut in the same places
            for short in {max(response + 1, total - 1), max(response + 1, total - piece)}:
                first = short - response - 1
                expected = [p - first for p in held[total] if first <= p < first + response]
                padded = zigzag([short], [response], cp_size, padded_lengths=[total])
                assert padded.index(rank % cp_size).tolist() == expected
