"""KL estimators against the oracle; masked slots are never read."""

import math

import pytest
import torch
from helpers import assert_same_bits, golden_cases
from hypothesis import given
from hypothesis import strategies as st

from cp_returns import reference
from cp_returns.errors import CPInputError
from cp_returns.kl import approx_kl

KINDS = ("k1", "k2", "k3")
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("case", golden_cases("kl"), ids=lambda case: case["id"])
def test_golden(case):
    tensors = [torch.tensor(case[k], dtype=torch.float64) for k in ("log_probs", "ref_log_probs", "mask")]
    got = approx_kl(*tensors, **case["params"])
    assert got.tolist() == pytest.approx(case["expect"]["kl"], rel=1e-14)


log_probs = st.floats(-80, 0)


@given(
    st.lists(st.tuples(log_probs, log_probs, st.booleans()), max_size=20),
    st.sampled_from(KINDS),
    st.sampled_from([None, 0.5, 10.0]),
)
def test_equals_the_oracle_in_float64(tokens, kind, clamp):
    logp, ref, mask = ([t[i] for t in tokens] for i in range(3))
    got = approx_kl(
        torch.tensor(logp, dtype=torch.float64),
        torch.tensor(ref, dtype=torch.float64),
        torch.tensor(mask, dtype=torch.bool),
        kind=kind,
        clamp=clamp,
    )
    assert got.tolist() == pytest.approx(reference.approx_kl(logp, ref, mask, kind=kind, clamp=clamp), rel=1e-14)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [NAN, INF, -INF, 3e38, -1e10])
def test_masked_slots_change_no_bit(kind, poison):
    logp, ref, mask = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.5, -1.0]), torch.tensor([1, 0, 1])
    expected = approx_kl(logp, ref, mask, kind=kind)
    for poisoned in (logp, ref):
        poisoned[1] = poison
        assert_same_bits(approx_kl(logp, ref, mask, kind=kind), expected)
    assert expected[1] == 0
    assert expected[0] != 0


def test_k3_neither_overflows_nor_loses_a_small_difference():
    d = torch.tensor([-200.0, 200.0, 1e-3, -1e-3])
    got = approx_kl(d, torch.zeros(4), torch.ones(4), kind="k3")
    assert got.isfinite().all()
    # d^2 / 2 - d^3 / 6: float32 exp(-d) - 1 + d would be off by 6e-8, an eighth of the value.
    assert got[2:].tolist() == pytest.approx([4.998334e-7, 5.001667e-7], rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_computed_in_float32_and_integer_masks_are_as_good_as_bool(kind):
    logp, ref = torch.tensor([-1.25, -2.0]).bfloat16(), torch.tensor([-1.0, -0.0078125]).bfloat16()
    expected = approx_kl(logp.float(), ref.float(), torch.tensor([True, True]), kind=kind)
    assert expected.dtype == torch.float32
    for dtype in (torch.int32, torch.uint8, torch.float16, torch.float64, torch.bool):
        assert torch.equal(approx_kl(logp, ref, torch.ones(2, dtype=dtype), kind=kind), expected)
    assert approx_kl(logp.double(), ref, torch.ones(2), kind=kind).dtype == torch.float64
    assert approx_kl(logp, ref.double(), torch.ones(2), kind=kind).dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_no_graph_no_alias_inputs_unchanged_any_shape(kind):
    logp, ref = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    before = [logp.detach().clone(), ref.clone()]
    got = approx_kl(logp, ref, torch.ones(2, 3), kind=kind)
    assert got.shape == (2, 3)
    assert not got.requires_grad
    got.fill_(7.0)
    assert torch.equal(logp.detach(), before[0])
    assert torch.equal(ref, before[1])
    assert approx_kl(torch.empty(0), torch.empty(0), torch.empty(0), kind=kind).shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": torch.tensor([1.0, 0.5])}, "other than 0 and 1"),
        ({"mask": torch.tensor([1.0, NAN])}, "other than 0 and 1"),
        ({"mask": torch.ones(3)}, r"\[2\], \[2\], \[3\]"),
        ({"kind": "k4"}, "'k4'; expected 'k1', 'k2' or 'k3'"),
        ({"clamp": 0.0}, "clamp is 0.0; expected a positive number"),
        ({"clamp": NAN}, "clamp is nan"),
    ],
)
def test_wrong_calls_say_what_is_wrong(change, message):
    call = {"log_probs": torch.zeros(2), "ref_log_probs": torch.zeros(2), "mask": torch.ones(2), **change}
    with pytest.raises(CPInputError, match=message):
        approx_kl(call.pop("log_probs"), call.pop("ref_log_probs"), call.pop("mask"), **call)
