"""The one collective of this library, an even all-gather; the only module that calls torch.distributed collectives."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch import Tensor

from cp_returns.errors import CPCollectiveError

SMALL = 128 * 1024  # bytes a rank: a third of the time at 4 and 8 ranks of one machine
AllGather = Callable[[Tensor], Tensor]
"""[..] on each rank -> [W, ..] on all, in rank order. Injected everywhere, so tests can use threads or `torch.stack`.
"""


def alone(x: Tensor) -> Tensor:
    """The all-gather of one rank: x[None]."""
    return x[None]


@dataclass(frozen=True)
class over:  # noqa: N801 - reads as the function it is: over(group)
    """`over(group)` is the all-gather over a torch.distributed process group (gloo or NCCL), on the device of its
    input.

    No autograd: what goes in is detached, what comes out requires no grad.
    """

    group: dist.ProcessGroup

    @cached_property
    def rank(self) -> int:
        return self.group.rank()

    @cached_property
    def size(self) -> int:
        return self.group.size()

    def __call__(self, x: Tensor) -> Tensor:
        x = x.detach().contiguous()
        flat = x.new_empty(self.size * x.numel())  # gloo wants the output flat
        _all_gather(flat, x.view(-1), self.group)
        return flat.view(self.size, *x.shape)

    def __str__(self) -> str:
        ranks = dist.get_process_group_ranks(self.group)
        shown = str(ranks) if len(ranks) <= 16 else f"[{ranks[0]}, {ranks[1]}, .. {ranks[-1]}]"
        return f"the {dist.get_backend(self.group)} group of ranks {shown}"


def _all_gather(flat: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    size = len(flat) // max(len(x), 1)
    if size > 2 and x.numel() * x.element_size() <= SMALL and dist.get_backend(group) == "gloo":
        # gloo passes an all-gather round a ring, in size - 1 turns; these messages go all at once.
        dist.all_to_all_single(flat, x.repeat(size), group=group)
        return
    # torch 2.13 renames the function and deprecates the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(flat, x, group=group)


@dataclass
class Counted:
    """An all-gather that counts what passes through it: calls, and the bytes that this rank sent."""

    all_gather: AllGather
    collectives: int = 0
    bytes_sent: int = 0

    def __call__(self, x: Tensor) -> Tensor:
        if self.all_gather is not alone:
            self.collectives += 1
            self.bytes_sent += x.nbytes
        return self.all_gather(x)

    def __str__(self) -> str:
        return _name(self.all_gather)


def call(all_gather: AllGather, x: Tensor, step: str) -> Tensor:
    """all_gather(x) for a named step of this library, so that a peer that dies is reported as that step.

    Raises CPCollectiveError from the backend's own error, within the group's timeout.
    """
    try:
        return all_gather(x)
    except (RuntimeError, ConnectionError, TimeoutError) as error:
        raise CPCollectiveError(
            f"cp_returns: the all-gather of step '{step}' ({x.numel() * x.element_size()} bytes a rank) over "
            f"{_name(all_gather)} did not end; a peer died, timed out or is not in the same call: {error}"
        ) from error


def _name(all_gather: AllGather) -> str:
    return str(all_gather) if isinstance(all_gather, over | Counted) else f"an injected collective ({all_gather!r})"
