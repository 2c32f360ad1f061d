"""What one rank sends for REINFORCE++ returns, counted at the all-gather of one simulated rank: the README's table.

    python scripts/count_messages.py

Sizes follow from the layout alone, so one rank speaks for all: its all-gather hands back its own message W times.
"""

from dataclasses import dataclass

import torch

from cp_returns import ContextParallelReturns, ReturnsConfig, zigzag

CP_SIZES = (2, 8, 32, 128)
BATCHES = ((64, 32_768), (8, 1_000_000), (1, 10_000_000))  # responses, tokens of each
PROMPT = 1_000


@dataclass(frozen=True)
class Echo:
    """The all-gather of a rank whose peers all say what it says."""

    size: int
    rank: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self.size, *x.shape)


@dataclass(frozen=True)
class Count:
    """Bytes that one rank sends, and in how many collectives."""

    bytes_sent: int
    collectives: int

    def __str__(self) -> str:
        for unit, size in (("MB", 1e6), ("kB", 1e3)):
            if self.bytes_sent >= size:
                return f"{self.bytes_sent / size:.1f} {unit} in {self.collectives}"
        return f"{self.bytes_sent} B in {self.collectives}"


def count(strategy: str, cp_size: int, samples: int, tokens: int) -> Count:
    """What the library itself counts (`info`) for one call."""
    response, total = [tokens] * samples, [tokens + PROMPT] * samples
    local = zigzag(total, response, cp_size).lengths(0).tolist()
    returns = ContextParallelReturns(ReturnsConfig(kl_coef=0.01, strategy=strategy), cp_group=Echo(cp_size))
    info = returns(
        kl=[torch.zeros(n) for n in local],
        rewards=[1.0] * samples,
        loss_masks=[torch.ones(tokens, dtype=torch.bool)] * samples,
        response_lengths=response,
        total_lengths=total,
    ).info
    return Count(info.bytes_sent, info.collectives)


def count_all_reduce(samples: int, tokens: int) -> Count:
    """One all-reduce a sample of a zero-padded float32 response."""
    return Count(4 * samples * tokens, samples)


def rows() -> list[str]:
    """The table in Markdown."""
    lines = ["| responses x tokens | W | carry | gather | one all-reduce a sample |", "|---|---|---|---|---|"]
    for samples, tokens in BATCHES:
        for cp_size in CP_SIZES:
            counts = [count(strategy, cp_size, samples, tokens) for strategy in ("carry", "gather")]
            cells = [f"{samples} x {tokens:,}", cp_size, *counts, count_all_reduce(samples, tokens)]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("\n".join(rows()))
