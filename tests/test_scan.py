"""The one recurrence: against serial float64, the same bits whatever its mates, few calls, little memory and time."""

import itertools
import math
import sys
import time
from statistics import median

import numpy as np
import pytest
import torch
from helpers import assert_as_good_as_serial, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cp_returns import blocks, masks, reference, scan
from cp_returns.scan import reverse_scan

DISCOUNTS = (0.0, 0.5, 0.99, 1.0)
LENGTHS = (1, 127, 128, 129, 1000)
# float64 is not rounded at the end: n multiplies and adds of numbers up to twice the largest, by the scan and by the
# loop, differ by at most n * 2^-50 of it; n is at most 1000 here.
BITS = {torch.float32: 24, torch.float64: 40}


def serial(x: list[float], decay: float, y_next: float = 0.0) -> list[float]:
    """y_j = x_j + decay * y_next in Python floats."""
    y = [0.0] * len(x)
    for j in range(len(x) - 1, -1, -1):
        y[j] = y_next = x[j] + decay * y_next
    return y


def normal(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- the seed's matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("discount", DISCOUNTS)
def test_seed_matrix_one_segment(discount, length, dtype):
    x = normal(length, length, dtype)
    y = reverse_scan(x, [length], discount)
    assert y.dtype == dtype
    assert_as_good_as_serial(y.tolist(), serial(x.tolist(), discount), bits=BITS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("discount", DISCOUNTS)
def test_seed_matrix_variable_lengths_in_one_pack(discount, dtype):
    lengths = [127, 0, 1, 1000, 129, 0, 128, 16, 15, 17]
    x = normal(sum(lengths), 7, dtype)
    y = reverse_scan(x, lengths, discount)
    for ours, theirs in zip(y.split(lengths), x.split(lengths), strict=True):
        assert_as_good_as_serial(ours.tolist(), serial(theirs.tolist(), discount), bits=BITS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("discount", DISCOUNTS)
def test_seed_matrix_right_padding_stays_zero(discount, dtype):
    """A padded rectangle: the padding holds junk, is no step, comes out 0 and changes no bit of what is real."""
    rectangle = normal(len(LENGTHS) * 1000, 3, dtype).view(-1, 1000)
    real = torch.arange(1000) < torch.tensor(LENGTHS)[:, None]
    rectangle[~real] = torch.nan
    y = reverse_scan(rectangle.flatten(), [1000] * len(LENGTHS), discount, step=real.flatten()).view_as(rectangle)
    assert not y[~real].view({torch.float32: torch.int32, torch.float64: torch.int64}[dtype]).any()  # +0, never -0
    for row, x, length in zip(y, rectangle, LENGTHS, strict=True):
        assert_as_good_as_serial(row[:length].tolist(), serial(x[:length].tolist(), discount), bits=BITS[dtype])


# ---- clocks and decays, by hypothesis against the oracle

NUMBERS = st.floats(-1e6, 1e6, width=32)
JUNK = st.sampled_from([math.nan, math.inf, -math.inf, 3e38])


@st.composite
def packs(draw):
    """Ragged segments [(x, step, tick, decay)], junk where there is no step."""
    segments = []
    for _ in range(draw(st.integers(0, 4))):
        n = draw(st.integers(0, 70))
        step = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        tick = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        x = [draw(NUMBERS if step[j] else JUNK) for j in range(n)]
        segments.append((x, step, tick, draw(st.sampled_from([0.0, 1.0]) | st.floats(0, 1))))
    return segments


def packed(segments, field: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(list(itertools.chain.from_iterable(segment[field] for segment in segments)), dtype=dtype)


@given(
    packs(), st.sampled_from([torch.float32, torch.float64]), st.sampled_from([torch.bool, torch.int8, torch.float32])
)
def test_any_steps_ticks_and_decays_per_segment(segments, dtype, mask_dtype):
    x, step, tick = packed(segments, 0, dtype), packed(segments, 1, mask_dtype), packed(segments, 2, mask_dtype)
    lengths = [len(segment[0]) for segment in segments]
    decays = torch.tensor([segment[3] for segment in segments], dtype=torch.float64)
    y = reverse_scan(x, lengths, decays, step=step, tick=tick)
    for ours, (values, steps, ticks, decay) in zip(y.split(lengths), segments, strict=True):
        exact = reference.discounted(values, decay, steps, [int(t) for t in ticks])
        assert_as_good_as_serial(ours.tolist(), exact, bits=BITS[dtype])
        assert all(v == 0 for v, is_step in zip(ours.tolist(), steps, strict=True) if not is_step)
    if len(set(decays.tolist())) == 1:
        assert_same_bits(reverse_scan(x, lengths, decays[0].item(), step=step, tick=tick), y)


@pytest.mark.parametrize("clock", ["token", "trainable", "turn"])
@given(st.lists(st.integers(0, 1), max_size=80), st.floats(0, 1), st.integers(0, 99))
def test_the_three_clocks(clock, mask, decay, seed):
    x = normal(len(mask), seed)
    steps, ticks = reference.clock_of(mask, clock)
    y = reverse_scan(
        x, [len(mask)], decay, step=torch.tensor(steps, dtype=torch.bool), tick=torch.tensor(ticks, dtype=torch.bool)
    )
    assert_as_good_as_serial(y.tolist(), reference.discounted(x.tolist(), decay, steps, ticks))


def test_without_ticks_every_step_decays_and_without_steps_every_token_is_one():
    x = torch.tensor([1.0, 5.0, 2.0])
    assert reverse_scan(x, [3], 0.5).tolist() == [4.0, 6.0, 2.0]
    assert reverse_scan(x, [3], 0.5, step=torch.tensor([1, 0, 1])).tolist() == [2.0, 0.0, 2.0]
    assert reverse_scan(x, [3], 0.5, tick=torch.tensor([0, 1, 1])).tolist() == [7.0, 6.0, 2.0]
    assert reverse_scan(x, [3], 0.0, tick=torch.tensor([0, 1, 1])).tolist() == [6.0, 5.0, 2.0]  # 0^0 is 1


@given(st.lists(st.tuples(st.integers(0, 70), st.floats(0, 1), NUMBERS, NUMBERS, NUMBERS), max_size=5), st.data())
def test_what_enters_a_segment_its_impulse_and_scale(segments, data):
    """begin and finish, as the carry uses them: heads with nothing entering, then all y with what enters."""
    lengths = [s[0] for s in segments]
    at = [data.draw(st.integers(0, max(0, n - 1))) for n in lengths]
    decay, scale, impulse, entering = (
        torch.tensor([s[k] for s in segments], dtype=torch.float64) for k in (1, 2, 3, 4)
    )
    impulse[torch.tensor(lengths) == 0] = 0.0
    x = normal(sum(lengths), len(lengths))
    local = scan.begin(x, lengths, decay, scale=scale, impulse=(torch.tensor(at, dtype=torch.long), impulse))
    heads = local.heads.tolist()
    y = scan.finish(local, entering, dtype=torch.float64)
    for i, (ours, raw) in enumerate(zip(y.split(lengths), x.split(lengths), strict=True)):
        rewards = [scale[i].item() * v for v in raw.tolist()]
        if rewards:
            rewards[at[i]] += impulse[i].item()
        alone = serial(rewards, decay[i].item())
        exact = serial(rewards, decay[i].item(), entering[i].item())
        largest = max(map(abs, [*alone, *exact, *rewards, entering[i].item()]), default=0.0)
        assert abs(heads[i] - (alone[0] if alone else 0.0)) <= 2.0**-44 * largest
        assert all(abs(a - b) <= 2.0**-44 * largest for a, b in zip(ours.tolist(), exact, strict=True))


def test_an_empty_pack():
    assert reverse_scan(torch.zeros(0), [], 0.9).shape == (0,)
    assert reverse_scan(torch.zeros(0, dtype=torch.float64), [0, 0], 0.9).dtype == torch.float64


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"x has shape \[5\]; expected \[4\]"):
        reverse_scan(torch.zeros(5), [4], 0.9)
    with pytest.raises(ValueError, match=r"x has shape \[2, 2\]"):
        reverse_scan(torch.zeros(2, 2), [4], 0.9)
    with pytest.raises(ValueError, match=r"step has shape \[1\]; expected \[4\]"):
        reverse_scan(torch.zeros(4), [4], 0.9, step=torch.ones(1))
    for decay in (1.5, -0.1, math.nan):
        with pytest.raises(ValueError, match="expected a number in \\[0, 1\\]"):
            reverse_scan(torch.zeros(4), [2, 2], decay)
    with pytest.raises(ValueError, match=r"decay has shape \[1\]; expected \[\] or \[2\], one a segment"):
        reverse_scan(torch.zeros(4), [2, 2], torch.ones(1))


def test_a_decay_of_any_float_dtype_and_of_no_dimension():
    """float32 is torch's default for a list of decays; its bits are not those of a float64."""
    x, lengths = normal(40), [10, 30]
    for tick in (None, x > 0):
        half = reverse_scan(x, lengths, 0.5, tick=tick)
        for decay in (torch.tensor([0.5, 0.5]), torch.tensor(0.5), torch.tensor([0.5, 0.5], dtype=torch.bfloat16)):
            assert_same_bits(reverse_scan(x, lengths, decay.requires_grad_(), tick=tick), half)


@pytest.mark.parametrize("decay", [1, np.float32(0.5), True, np.float64(0.25)])
def test_a_decay_of_any_number_type(decay):
    x, tick = normal(40), torch.arange(40) % 7 == 0
    for ticks in (None, tick):
        assert_same_bits(
            reverse_scan(x, [20, 20], decay, tick=ticks), reverse_scan(x, [20, 20], float(decay), tick=ticks)
        )


# ---- numbers


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 0.9999, 1.0])
@pytest.mark.parametrize("kind", ["constant 1e6", "alternating", "spike", "grows", "tiny after huge"])
def test_extreme_rewards(kind, discount):
    n = 5000
    j = torch.arange(n, dtype=torch.float64)
    x = {
        "constant 1e6": torch.full((n,), 1e6),
        "alternating": torch.where(j % 2 == 0, 1e6, -1e6),
        "spike": torch.where(j == 4321, 1e6, 1e-6),
        "grows": 10 ** (j % 13 - 6),
        "tiny after huge": torch.where(j < 2500, 3e38, 1e-30),
    }[kind].float()
    y = reverse_scan(x.double(), [n], discount)
    assert_as_good_as_serial(y.tolist(), serial(x.tolist(), discount), bits=37)  # 5000 * 2^-50
    if kind != "tiny after huge":  # whose sums are no float32
        assert_as_good_as_serial(reverse_scan(x, [n], discount).tolist(), serial(x.tolist(), discount))


@pytest.mark.parametrize("gamma", [1.0, 0.9999, 0.999])
@pytest.mark.parametrize("kind", ["normal", "terminal", "alternating 1e6"])
def test_a_million_tokens_within_1p2e7_of_the_largest_return(gamma, kind):
    n = 1_000_000
    x = {
        "normal": normal(n),
        "terminal": torch.zeros(n).index_fill_(0, torch.tensor([n - 1]), 1.0),
        "alternating 1e6": torch.where(torch.arange(n) % 2 == 0, 1e6, -1e6) + normal(n),
    }[kind]
    exact = torch.tensor(serial(x.tolist(), gamma), dtype=torch.float64)
    error = (reverse_scan(x, [n], gamma).double() - exact).abs().max() / exact.abs().max()
    assert error <= 1.2e-7


def test_gamma_is_not_rounded_to_float32():
    """P6: 0.9999 in float32 is off by 3e-9, which 65,536 powers make 2e-4."""
    x = torch.zeros(65_536)
    x[-1] = 1.0
    assert reverse_scan(x, [len(x)], 0.9999)[0].item() == pytest.approx(0.9999**65_535, rel=1e-6)
    decay = torch.tensor([0.9999], dtype=torch.float64)
    assert_same_bits(reverse_scan(x, [len(x)], decay), reverse_scan(x, [len(x)], 0.9999))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool]
)
def test_other_dtypes_are_promoted_before_anything_is_added(dtype):
    """P4, I73: a bfloat16 running sum would stop at 256."""
    x = torch.ones(1000, dtype=dtype)
    y = reverse_scan(x, [1000], 1.0)
    assert y.dtype == torch.float32
    assert y.tolist() == list(range(1000, 0, -1))


def test_gamma_one_is_the_reverse_cumulative_sum():
    x = normal(32_768, 5)
    exact = x.double().flip(0).cumsum(0).flip(0)
    assert (reverse_scan(x, [len(x)], 1.0).double() - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_matmul_precision_flags_do_not_reach_the_scan():
    x = normal(100_000, 1)
    expected = reverse_scan(x, [60_000, 40_000], 0.999)
    before = torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            assert_same_bits(reverse_scan(x, [60_000, 40_000], 0.999), expected)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cuda.matmul.allow_tf32 = before[1]


# ---- a sample's bits depend on nothing but its own tokens


def bits_alone_and_with_mates(lengths, decays, *, steps: bool, dtype=torch.float32) -> None:
    """Each segment in three packs (as given, reversed, each segment behind its neighbour) and alone."""
    x = list(normal(sum(lengths), 11, dtype).split(lengths))
    x = [torch.where(v > 1.5, -0.0, v) for v in x]
    step = [v > -1.0 for v in x] if steps else None
    tick = [v < 0.5 for v in x] if steps else None

    def run(order):
        pick = lambda parts: None if parts is None else torch.cat([parts[i] for i in order])
        decay = decays if isinstance(decays, float) else decays[torch.tensor(order)]
        own = [lengths[i] for i in order]
        y = reverse_scan(pick(x), own, decay, step=pick(step), tick=pick(tick))
        return dict(zip(order, y.split(own), strict=True))

    n = len(lengths)
    alone = {i: run([i])[i] for i in range(n)}
    for order in (list(range(n)), list(range(n))[::-1], [*range(1, n), 0]):
        for i, y in run(order).items():
            assert_same_bits(y, alone[i])


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("tile", [2, 64])
def test_bits_do_not_depend_on_batch_mates_nor_on_tiles(tile, steps, monkeypatch):
    lengths = [1, 128, 129, 1000, 16, 0, 1500, 17]
    decays = torch.linspace(0.9, 1.0, len(lengths), dtype=torch.float64)
    x = normal(sum(lengths), 2)
    expected = [reverse_scan(x, lengths, decay) for decay in (0.99, decays)]
    monkeypatch.setattr(blocks, "TILE", tile)
    for decay, y in zip((0.99, decays), expected, strict=True):
        assert_same_bits(reverse_scan(x, lengths, decay), y)
        bits_alone_and_with_mates(lengths, decay, steps=steps)
    bits_alone_and_with_mates(lengths, 1.0, steps=steps, dtype=torch.float64)


@pytest.mark.parametrize("ticks", ["none", "often", "one in a tile's first block"])
@pytest.mark.parametrize("decay", [0.99, torch.linspace(0.9, 1.0, 7, dtype=torch.float64)], ids=["one", "many"])
def test_what_enters_runs_through_all_tiles_of_a_segment(decay, ticks, monkeypatch):
    """As if it were one more token at the segment's end."""
    lengths = [5, 100, 0, 1003, 1, 33, 16]
    x, entering = normal(sum(lengths), 5).double(), normal(len(lengths), 6).double()
    tick = normal(len(x), 7) > 0
    if ticks.startswith("one"):  # of the tiles of 3 blocks below
        tick = torch.cat([torch.arange(n, 0, -1) % 48 == 40 for n in lengths])
    one_more = lambda y, ends: torch.cat(
        [part for pair in zip(y.split(lengths), ends.split(1), strict=True) for part in pair]
    )
    longer = [n + 1 for n in lengths]
    end_tick = one_more(tick, torch.zeros(len(lengths), dtype=torch.bool))
    # At ticks the decay, elsewhere another one, as the inner clock of GAE and the turn clock have it.
    rate, odd = (0.5, (tick.nonzero()[:, 0].numpy(), decay)) if ticks != "none" else (decay, None)
    end_odd = (end_tick.nonzero()[:, 0].numpy(), decay) if ticks != "none" else None
    whole = scan.scan(one_more(x, entering), longer, rate, odd=end_odd, dtype=torch.float64)
    expected = torch.cat([part[:-1] for part in whole.split(longer)])
    alone = scan.scan(x, lengths, rate, odd=odd, dtype=torch.float64)
    for tile in (blocks.TILE, 3):
        monkeypatch.setattr(blocks, "TILE", tile)
        begun = scan.begin(x, lengths, rate, odd=odd)
        heads = [part[0].item() if len(part) else 0.0 for part in alone.split(lengths)]
        assert begun.heads.tolist() == pytest.approx(heads, rel=1e-12)
        torch.testing.assert_close(scan.finish(begun, entering, dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)


def test_bits_do_not_depend_on_mates_in_several_real_tiles():
    lengths = [100_001, 300_000, 7, 199_999, 65_536]
    bits_alone_and_with_mates(lengths, 0.9999, steps=True)


def test_a_mate_that_overflows_on_the_way_spoils_nobody():
    """Its partial sums reach infinity while the block heads are chained, though its tokens are finite."""
    ones, mate = torch.ones(32, dtype=torch.float64), torch.zeros(48, dtype=torch.float64)
    mate[0], mate[16], mate[32] = -1.5e308, 1e308, 1e308
    assert reverse_scan(torch.cat([ones, mate]), [32, 48], 1.0)[:32].tolist() == list(range(32, 0, -1))
    assert reverse_scan(torch.cat([mate, ones]), [48, 32], 1.0)[48:].tolist() == list(range(32, 0, -1))


def test_lengths_may_be_small_integers():
    lengths = np.array([200, 200], dtype=np.uint8)
    assert_same_bits(reverse_scan(normal(400), lengths, 0.5), reverse_scan(normal(400), [200, 200], 0.5))


def test_the_sign_of_a_zero_does_not_depend_on_mates():
    """A long mate makes the block heads double more often, and -0.0 + 0.0 is 0.0."""
    zeros = torch.full((48,), -0.0)
    together = reverse_scan(torch.cat([zeros, normal(1000)]), [48, 1000], 0.9)
    assert_same_bits(together[:48], reverse_scan(zeros, [48], 0.9))


def test_the_sign_of_a_zero_between_blocks_does_not_depend_on_mates():
    """0 * -7 is -0.0. A block's first y that is -0.0 would stay so beside a mate with negative numbers only."""
    x = torch.full((64,), -0.0)
    x[[20, 32]] = torch.tensor([-5.0, -7.0])  # in the second and the third block of the first segment
    x[48:] = -1.0
    assert_same_bits(reverse_scan(x, [48, 16], 0.0)[:48], reverse_scan(x[:48], [48], 0.0))


def test_bits_do_not_depend_on_the_number_of_threads():
    x = normal(500_000, 4)
    expected = reverse_scan(x, [300_000, 200_000], 0.9999)
    try:
        torch.set_num_threads(2)
        assert_same_bits(reverse_scan(x, [300_000, 200_000], 0.9999), expected)
    finally:
        torch.set_num_threads(1)


def test_a_strided_input_gives_the_same_bits():
    x = normal(2000, 6)
    assert_same_bits(reverse_scan(x[::2], [400, 600], 0.9), reverse_scan(x[::2].clone(), [400, 600], 0.9))
    step = (x > 0)[::2]
    assert_same_bits(
        reverse_scan(x[::2], [400, 600], 0.9, step=step),
        reverse_scan(x[::2].clone(), [400, 600], 0.9, step=step.clone()),
    )


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("decay", [0.0, 0.9, 1.0])
def test_nan_and_inf_spoil_their_own_segment_only(junk, decay):
    lengths = [1000, 500, 33, 700]
    x = normal(sum(lengths), 8)
    expected = reverse_scan(x, lengths, decay).split(lengths)
    x[1000 + 250] = junk
    got = reverse_scan(x, lengths, decay).split(lengths)
    for i in (0, 2, 3):
        assert_same_bits(got[i], expected[i])
    assert_same_bits(got[1][251:], expected[1][251:])
    assert not got[1][250].isfinite()
    if decay:
        assert not got[1][:250].isfinite().any()


def test_sums_that_overflow_spoil_their_own_segment_only():
    x = torch.ones(1200, dtype=torch.float64).index_fill_(0, torch.arange(400, 800), 1e308)
    y = reverse_scan(x, [400] * 3, 1.0).split(400)
    assert y[0].tolist() == y[2].tolist() == list(range(400, 0, -1))
    assert y[1][-1] == 1e308
    assert y[1][0].isinf()


# ---- what goes in and comes out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("step", [None, torch.ones(64, dtype=torch.bool)])
@pytest.mark.parametrize("lengths", [[64], [16, 48], [1] * 64, [64, 0]])
def test_inputs_unchanged_outputs_alias_nothing(dtype, step, lengths):
    x = torch.arange(64).to(dtype)
    before = x.clone()
    for decay in (0.0, 0.5, 1.0):
        y = reverse_scan(x, lengths, decay, step=step, tick=step)
        assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert not y.requires_grad
        y.fill_(-1)
    assert_same_bits(x, before)
    assert step is None or bool(step.all())


def test_no_autograd_graph_leaves():
    x = torch.ones(20, requires_grad=True)
    decay = torch.full((1,), 0.5, dtype=torch.float64, requires_grad=True)
    assert not reverse_scan(x, [20], decay).requires_grad
    assert not reverse_scan(x, [20], 0.5, step=torch.ones(20)).requires_grad


# ---- how many calls, how much memory, how long


class Calls(TorchDispatchMode):
    """Counts the calls of torch, and the lines of the scan that run, each of which makes at most one call of numpy."""

    def __init__(self):
        super().__init__()
        self.torch, self.lines = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.torch += 1
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return super().__enter__()

    def __exit__(self, *error):
        sys.settrace(self.before)
        return super().__exit__(*error)

    def trace(self, frame, event, argument):
        if frame.f_code.co_filename not in (scan.__file__, blocks.__file__, masks.__file__):
            return None
        self.lines += event == "line"
        return self.trace


def calls(x, lengths, *args, **kwargs) -> Calls:
    with Calls() as counted:
        reverse_scan(x, lengths, *args, **kwargs)
    return counted


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [1, 1000, 32_768, 300_000, 1_000_000])
def test_calls_are_at_most_a_constant_per_32k_tokens(tokens, masked):
    x = torch.zeros(tokens)
    some = torch.ones(tokens, dtype=torch.bool) if masked else None
    for lengths in ([tokens], [tokens // 64] * 64 + [tokens % 64], [min(tokens, 7), max(0, tokens - 7)]):
        for decay in (0.9, torch.full((len(lengths),), 0.9, dtype=torch.float64)):
            counted = calls(x, lengths, decay, step=some, tick=some)
            assert counted.torch <= 48 * math.ceil(tokens / 32_768)
            views = 12 * len(lengths)  # of each segment's tokens, where pads lie between them
            assert counted.lines <= 500 * math.ceil(tokens / 32_768) + views


def test_calls_do_not_grow_with_the_number_of_segments():
    x = torch.zeros(65_536)
    few = calls(x, [16_384] * 4, 0.9)
    for lengths in ([16] * 4096, [8] * 8192, [17] * 3855 + [1]):
        many = calls(x, lengths, 0.9)
        assert many.torch <= few.torch + 2
        if lengths[0] == 16:
            assert many.lines <= few.lines  # else the views of its tokens: one a segment


def per_token_loop(rewards: torch.Tensor, lengths: list[int], gamma: float) -> torch.Tensor:
    """What slime's rows are measured against: a Python loop over 0-dim tensors, sample by sample, token by token."""
    out = []
    for row in rewards.split(lengths):
        returns = torch.zeros_like(row)
        running = 0.0
        for t in reversed(range(row.size(0))):
            running = row[t] + gamma * running
            returns[t] = running
        out.append(returns)
    return torch.cat(out)


@pytest.mark.parametrize(("lengths", "at_least"), [([1024], 22), ([4096] * 8, 357)])
def test_faster_than_the_per_token_loop(lengths, at_least):
    """The two rows of the seed's benchmark. Both sides alternate in one process, so that a busy machine slows both.

    A loaded machine is measured again, at most three times; a real regression fails all of them.
    """
    x = normal(sum(lengths), 9)
    assert torch.allclose(reverse_scan(x, lengths, 0.99), per_token_loop(x, lengths, 0.99), atol=1e-4)
    ratios = []
    for _ in range(3):
        loop, ours = [], []
        for _ in range(3):
            start = time.perf_counter()
            per_token_loop(x, lengths, 0.99)
            loop.append(time.perf_counter() - start)
            for _ in range(20):
                start = time.perf_counter()
                reverse_scan(x, lengths, 0.99)
                ours.append(time.perf_counter() - start)
        ratios.append(median(loop) / median(ours))
        if ratios[-1] >= at_least:
            break
    assert max(ratios) >= at_least, f"{[round(r, 1) for r in ratios]} times the loop; expected {at_least}"
