"""For pytest: `assert_cp_invariant`, batches for it from hypothesis, and real Megatron groups on this machine.

    from cp_returns.pytest_plugin import assert_cp_invariant, rollout_batches

    @given(batch=rollout_batches())
    def test_my_advantages(batch):
        assert_cp_invariant(my_advantages, batch)          # my_advantages(view): see cp_returns.check

The fixture `cp_world` comes with the package (entry point pytest11).
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from cp_returns.batches import filled
from cp_returns.check import View, check_cp_invariance
from cp_returns.rollouts import Rollouts
from cp_returns.simulate import RankGather, in_processes

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def assert_cp_invariant(fn: Callable[[View], Any], batch: Rollouts, **options: Any) -> None:
    """Fail with the report of `check_cp_invariance`, which takes the options, where fn differs from one rank."""
    __tracebackhide__ = True
    report = check_cp_invariance(fn, batch, **options)
    if not report.agrees:
        pytest.fail(str(report), pytrace=False)


@dataclass(frozen=True)
class CPWorld:
    """dp_size x cp_size forked gloo ranks, in each of which megatron.core.parallel_state is initialised."""

    dp_size: int
    cp_size: int
    timeout: float

    def run(self, fn: Callable[[int, RankGather], Any]) -> list[Any]:
        """fn(rank, all_gather) on every rank; the results in rank order. Raises RankFailure."""
        n = self.dp_size * self.cp_size
        return in_processes(fn, n, cp_size=self.cp_size, megatron=True, timeout=self.timeout)

    def assert_cp_invariant(self, fn: Callable[[View], Any], batch: Rollouts, **options: Any) -> None:
        """`assert_cp_invariant` of this world against one rank, which has Megatron's groups (of size 1) too."""
        __tracebackhide__ = True
        sizes = {"dp_sizes": (self.dp_size,), "cp_sizes": (self.cp_size,)}
        assert_cp_invariant(fn, batch, run="processes", timeout=self.timeout, **sizes, **options)


@pytest.fixture
def cp_world() -> Callable[..., CPWorld]:
    """cp_world(dp=1, cp=2): ranks with Megatron's real groups, for functions that look them up in parallel_state."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("NOT RUN: megatron-core is not installed")

    def world(dp: int = 1, cp: int = 2, timeout: float = 120.0) -> CPWorld:
        return CPWorld(dp, cp, timeout)

    return world


MASKED = {"zero": 0.0, "nan": math.nan, "inf": math.inf, "huge": 3e38}


def rollout_batches(
    *,
    min_samples: int = 2,
    max_samples: int = 5,
    max_prompt: int = 40,
    max_response: int = 24,
    scales: tuple[float, ...] = (1.0, 1e-3, 1e3),
    masked: tuple[str, ...] = tuple(MASKED),
    fully_masked: bool = False,
) -> "SearchStrategy[Rollouts]":
    """Batches with one-token responses, long prompts (ranks that own nothing), gaps, masked tails and extreme numbers.

    scales: the size of the numbers per token; rewards reach 1e3 of it. masked: what stands in masked slots: "zero",
    "nan", "inf", "huge" (3e38). fully_masked: also samples without a valid token. Needs hypothesis.
    """
    import torch
    from hypothesis import strategies as st

    @st.composite
    def sample(draw) -> tuple[int, int, torch.Tensor, float]:
        prompt = draw(st.one_of(st.integers(1, min(3, max_prompt)), st.integers(1, max_prompt)))
        response = draw(st.one_of(st.just(1), st.integers(1, max_response)))
        kind = draw(st.sampled_from(["whole", "gaps", "tail", "none"] if fully_masked else ["whole", "gaps", "tail"]))
        mask = torch.full((response,), kind != "none")
        if kind == "gaps":
            bits = draw(st.integers(0, 2**response - 1))
            mask = torch.tensor([bool(bits >> j & 1) for j in range(response)])
        elif kind == "tail":
            mask[draw(st.integers(1, response)) :] = False
        if not mask.any() and not fully_masked:
            mask[draw(st.integers(0, response - 1))] = True
        reward = draw(st.one_of(st.sampled_from([0.0, 1.0, -1.0, 1e3, -1e3]), st.floats(-5, 5, width=32)))
        return prompt + response, response, mask, reward

    @st.composite
    def batch(draw) -> Rollouts:
        samples = draw(st.lists(sample(), min_size=min_samples, max_size=max_samples))
        total, response, masks, rewards = zip(*samples, strict=True)
        scale = draw(st.sampled_from(scales))
        slots = MASKED[draw(st.sampled_from(masked))]
        seed = draw(st.integers(0, 2**31 - 1))
        return filled(total, response, masks, [scale * r for r in rewards], seed=seed, scale=scale, masked=slots)

    return batch()
