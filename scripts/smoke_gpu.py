"""Every estimator, strategy and clock on one GPU against the CPU, in simulated ranks: python scripts/smoke_gpu.py

For whoever has a GPU: the tests run without one. Exit code 1 if a result is off by more than 2^-23 of the largest one.
"""

import sys

import torch

from cp_returns import CPContext, carry, gae, gather, reinforce_plus_plus, whiten, zigzag
from cp_returns.clocks import CLOCKS
from cp_returns.simulate import in_threads

BOUND = 2.0**-23


def batch() -> dict:
    """Seeded responses with gaps in the mask, one of one token and one that leaves ranks without a token."""
    generator = torch.Generator().manual_seed(0)
    response, total = [1, 3, 500, 40_000], [9, 400, 777, 41_000]
    tokens = sum(response)
    return {
        "total": total,
        "response": response,
        "mask": torch.rand(tokens, generator=generator) < 0.7,
        "kl": torch.randn(tokens, generator=generator),
        "values": torch.randn(tokens, generator=generator),
        "rewards": torch.randn(len(response), generator=generator),
    }


def compute(data: dict, device: str, strategy, clock: str, cp_size: int) -> torch.Tensor:
    """REINFORCE++ returns, GAE advantages and whitened returns of all ranks, reassembled: [3, tokens] on the CPU."""
    layout = zigzag(data["total"], data["response"], cp_size)
    mask, rewards = data["mask"].to(device), data["rewards"].to(device)

    def rank_returns(rank, all_gather):
        index = layout.index(rank)
        cp = CPContext(layout, rank, all_gather, strategy)
        kl, values = data["kl"][index].to(device), data["values"][index].to(device)
        g = reinforce_plus_plus(kl, rewards, mask, cp=cp, gamma=0.999, kl_coef=0.01, clock=clock)
        a = gae(kl, rewards, values, mask, cp=cp, gamma=0.999, lam=0.95, kl_coef=0.01, clock=clock).advantages
        w = whiten(g, cp.take(mask), all_gather=all_gather)
        return torch.stack([g, a, w]).cpu()

    whole = torch.zeros(3, sum(data["response"]))
    for rank, shard in enumerate(in_threads(rank_returns, cp_size)):
        whole[:, layout.index(rank)] = shard
    return whole


def main() -> int:
    """Compare and say so, a line a case."""
    if not torch.cuda.is_available():
        print("no GPU that torch can use")
        return 1
    data, failed = batch(), False
    for clock in CLOCKS:
        expected = compute(data, "cpu", gather, clock, 1)
        scale = expected.abs().amax(dim=1)
        for strategy in (gather, carry):
            for cp_size in (1, 2, 4):
                off = (
                    ((compute(data, "cuda", strategy, clock, cp_size) - expected).abs().amax(dim=1) / scale)
                    .max()
                    .item()
                )
                failed |= off > BOUND
                print(f"{clock:9} {strategy.__name__:6} W = {cp_size}: off by {off:.2e} of the largest value")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
