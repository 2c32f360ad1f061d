"""What several test files need: the golden cases and the one derived tolerance."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch

CASES = Path(__file__).parent / "cases" / "cases.json"


def golden_cases(*estimators: str) -> list[dict]:
    """The golden cases of these estimators (all of them if none is named), with "nan" and "inf" as numbers."""
    cases = _numbers(json.loads(CASES.read_text()))
    return [case for case in cases if not estimators or case["estimator"] in estimators]


def _numbers(x):
    if isinstance(x, dict):
        return {k: v if k in ("id", "source", "estimator", "params", "layout") else _numbers(v) for k, v in x.items()}
    if isinstance(x, list):
        return [_numbers(v) for v in x]
    return float(x) if x in ("nan", "inf", "-inf") else x


def per_sample(case: dict, name: str, default: float = 0.0) -> list[list[float]]:
    """A per-token field of a case as one list a sample; where it is absent, `default` for every response token."""
    return [sample.get(name, [default] * sample["response"]) for sample in case["samples"]]


def assert_as_good_as_serial(got: Sequence[float], exact: Sequence[float], *, bits: int = 24) -> None:
    """`got`, accumulated in float64 and rounded once to `bits` of mantissa, is the float64 serial result `exact`.

    Rounding once errs by at most 2^-bits of the number itself; the float64 sums behind it, whatever their order, by
    far less than as much again of the sample's largest number. float32 has bits=24; 52 is right for
    unrounded float64 results.
    """
    assert len(got) == len(exact), f"{len(got)} numbers; expected {len(exact)}"
    largest = max((abs(v) for v in exact), default=0.0)
    for j, (a, b) in enumerate(zip(got, exact, strict=True)):
        allowed = 2.0**-bits * (abs(b) + largest)
        assert math.isfinite(a), f"token {j}: {a!r}; expected {b!r}"
        assert abs(a - b) <= allowed, f"token {j}: {a!r}; expected {b!r} within {allowed:.3g}, off by {abs(a - b):.3g}"


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal dtype, shape and bits: unlike `torch.equal` it tells 0.0 from -0.0, and a NaN equals itself."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    differ = (got.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)).nonzero()
    assert not len(differ), f"bits differ, first at byte {differ[0].tolist()}: {got} != {expected}"
