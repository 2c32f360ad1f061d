"""Made-up rollouts that are hard on context parallelism, for `cp-returns check` without a file and for tests."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cp_returns.rollouts import Rollouts


def filled(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    rewards: Sequence[float],
    *,
    seed: int = 0,
    scale: float = 1.0,
    masked: float = 0.0,
) -> Rollouts:
    """A batch with seeded numbers of size `scale` in every list per token, and `masked` in the slots that masks drop.

    Log-probs are at most 0; token rewards stand on every fourth token. Two samples after each other share a group.
    """
    generator = torch.Generator().manual_seed(seed)

    def numbers(make) -> list[Tensor]:
        full = [make(int(n)) for n in response_lengths]
        return [
            torch.where(mask.bool(), x, torch.full_like(x, masked)) for x, mask in zip(full, loss_masks, strict=True)
        ]

    def normal(n: int) -> Tensor:
        return scale * torch.randn(n, generator=generator)

    token_rewards = [normal(int(n)) for n in response_lengths]
    for x, mask in zip(token_rewards, loss_masks, strict=True):
        x[torch.arange(len(x)) % 4 != 0] = 0.0
        x[~mask.bool()] = math.nan if math.isnan(masked) else 0.0
    return Rollouts(
        total_lengths=[int(n) for n in total_lengths],
        response_lengths=[int(n) for n in response_lengths],
        loss_masks=list(loss_masks),
        rewards=[float(x) for x in rewards],
        group_ids=[i // 2 for i in range(len(response_lengths))],
        ids=[str(i) for i in range(len(response_lengths))],
        note=f"made-up numbers (seed {seed})",
        log_probs=numbers(lambda n: -normal(n).abs()),
        ref_log_probs=numbers(lambda n: -normal(n).abs()),
        values=numbers(normal),
        token_rewards=token_rewards,
    )


def hard_batch(seed: int = 0) -> Rollouts:
    """Eight small samples: one token, ranks that own nothing, gaps, a masked tail, lengths that divide by nothing.

    Masked slots hold NaN, which a product with the mask lets through.
    """
    shapes = [(41, 33), (13, 1), (97, 9), (50, 40), (45, 30), (26, 25), (71, 64), (30, 12)]
    dropped = {3: [(5, 9), (20, 33)], 4: [(21, 30)], 7: [(3, 5)]}
    masks = []
    for i, (_, n) in enumerate(shapes):
        mask = torch.ones(n, dtype=torch.bool)
        for start, end in dropped.get(i, []):
            mask[start:end] = False
        masks.append(mask)
    total, response = zip(*shapes, strict=True)
    rewards = [1.0, -0.5, 2.0, 0.25, -1.0, 0.75, -2.0, 1.5]
    return filled(total, response, masks, rewards, seed=seed, masked=math.nan)
