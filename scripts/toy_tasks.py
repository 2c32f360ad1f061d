"""Two verifiable tasks for a tiny model, and the batches that come of them.

echo:   offset x SEP -> x x x EOS, a reward a token; with `turns` the environment asks again, up to that many times,
and its
        questions are the gaps of the loss mask. The random offset makes responses straddle the borders of pieces.
repeat: x SEP -> x EOS, one reward at the end, no offset.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

BOS, SEP, EOS, VOCAB = 0, 6, 7, 8  # 1 .. 5 are the symbols


@dataclass(frozen=True)
class Prompts:
    """Rows of one width: what the environment says, which positions the model says, and what it should say there."""

    tokens: torch.Tensor  # [b, width]
    sampled: torch.Tensor  # [b, width] bool
    targets: torch.Tensor  # [b, width]
    prompt_lengths: list[int]
    total_lengths: list[int]

    def part(self, rows: slice) -> "Prompts":
        lists = (self.prompt_lengths[rows], self.total_lengths[rows])
        return Prompts(self.tokens[rows], self.sampled[rows], self.targets[rows], *lists)


@dataclass(frozen=True)
class Batch:
    """Whole responses with their rewards, the same on every CP rank: one entry a sample in every list."""

    tokens: list[torch.Tensor]  # [total]
    prompt_lengths: list[int]
    masks: list[torch.Tensor]  # [response] bool
    rewards: torch.Tensor  # [samples]
    token_rewards: list[torch.Tensor] | None  # [response]
    group_ids: torch.Tensor  # [samples]

    @cached_property
    def total_lengths(self) -> list[int]:
        return [len(t) for t in self.tokens]

    @cached_property
    def response_lengths(self) -> list[int]:
        return [len(m) for m in self.masks]

    @property
    def responses(self) -> list[torch.Tensor]:
        return [t[q:] for t, q in zip(self.tokens, self.prompt_lengths, strict=True)]

    @property
    def full_mask(self) -> torch.Tensor:
        return torch.cat(self.masks)

    def part(self, rows: slice) -> "Batch":
        token_rewards = None if self.token_rewards is None else self.token_rewards[rows]
        lists = (self.tokens[rows], self.prompt_lengths[rows], self.masks[rows])
        return Batch(*lists, self.rewards[rows], token_rewards, self.group_ids[rows])


def echo(integer: Callable[[int, int], int], width: int, turns: int) -> tuple[list[int], list[bool], int]:
    """(what should be said, which of it by the model, prompt length)"""
    said, sampled = [], []
    for _ in range(integer(1, turns)):
        x = integer(1, 5)
        said += [x, SEP, x, x, x, EOS]
        sampled += [False, False, True, True, True, True]
    offset = integer(0, width - len(said))
    return [BOS] * offset + said, [False] * offset + sampled, offset + 2


def repeat(integer: Callable[[int, int], int], width: int, turns: int) -> tuple[list[int], list[bool], int]:
    """As `echo`."""
    x = integer(1, 5)
    return [x, SEP, x, EOS], [False, False, True, True], 2


TASKS = {"echo": echo, "repeat": repeat}


def make_prompts(task: str, seed: int, samples: int, width: int, turns: int, group: int) -> Prompts:
    """`samples` rows, `group` of them for each prompt; the same on every rank for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    integer = lambda low, high: int(torch.randint(low, high + 1, (1,), generator=generator))
    rows = [row for _ in range(samples // group) for row in [TASKS[task](integer, width, turns)] * group]
    said = torch.tensor([row + [BOS] * (width - len(row)) for row, _, _ in rows])
    sampled = torch.tensor([m + [False] * (width - len(m)) for _, m, _ in rows])
    tokens = said.masked_fill(sampled, BOS)
    return Prompts(tokens, sampled, said, [q for _, _, q in rows], [len(row) for row, _, _ in rows])


def grade(task: str, prompts: Prompts, tokens: torch.Tensor, group: int, first: int = 0) -> Batch:
    """The batch of finished rows: echo rewards each right token, repeat the share of right tokens at the end.

    `first` is the place of the first row in the whole batch, from which groups are numbered.
    """
    right = (tokens == prompts.targets) & prompts.sampled
    share = right.sum(1) / prompts.sampled.sum(1)
    rows = list(zip(range(len(tokens)), prompts.prompt_lengths, prompts.total_lengths, strict=True))
    per_token = task == "echo"
    return Batch(
        tokens=[tokens[i, :t] for i, _, t in rows],
        prompt_lengths=prompts.prompt_lengths,
        masks=[prompts.sampled[i, q:t] for i, q, t in rows],
        rewards=share,
        token_rewards=[right[i, q:t].to(torch.get_default_dtype()) for i, q, t in rows] if per_token else None,
        group_ids=(first + torch.arange(len(tokens))) // group,
    )
