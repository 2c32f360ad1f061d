"""What a call of ContextParallelReturns gives back."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Whitening:
    """The population of the whitening, the same on every rank: its weight (tokens, or samples), mean and variance."""

    population: float
    mean: float
    var: float


@dataclass(frozen=True)
class Info:
    """What a call saw and did. `scope` says over what a number is complete, so that nobody sums it twice."""

    samples: int
    valid_tokens: int
    fully_masked: int
    missing_rewards: int
    kl_in_reward: bool
    kl_sum: float
    kl_mean: float
    whitening: Whitening | None
    bytes_sent: int
    collectives: int
    scope: Mapping[str, str]


@dataclass(frozen=True)
class Returns:
    """This rank's shards, in the order and lengths of the input."""

    returns: list[Tensor]
    advantages: list[Tensor]
    packed_mask: Tensor  # the local mask that was used, all shards in one
    info: Info

    @cached_property
    def masks(self) -> list[Tensor]:
        """The local masks that were used; cut when they are first read, for many actors never do."""
        return list(self.packed_mask.split([len(shard) for shard in self.returns]))
