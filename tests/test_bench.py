"""The benchmarks: nothing red is timed, what they compare with computes the same, and each runs.

And the guard that needs no clock: how many torch calls, numpy calls and collectives a batch costs. A loop over samples
or tokens shows here on any machine.
"""

import json
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_common as common  # noqa: E402
import bench_exchange as exchange  # noqa: E402
import bench_scan as scan  # noqa: E402
from count_messages import Echo  # noqa: E402

import cp_returns.arrays  # noqa: E402
from cp_returns import reference  # noqa: E402

# ---- the gate


def test_the_gate_lets_float32_rounding_pass_and_nothing_more():
    exact = [1.0, 2.0, 1000.0, 3.0]
    common.check("right", torch.tensor(exact), exact, [3, 1], 23)
    for wrong in ([1.0, 2.0, 1000.0, 3.0001], [1.0, 2.0, 1000.001, 3.0], [1.0, float("nan"), 1000.0, 3.0], [1.0]):
        with pytest.raises(common.Red, match=r"wrong.*Not timed"):
            common.check("wrong", torch.tensor(wrong, dtype=torch.float64), exact, [3, 1], 23)


@pytest.mark.parametrize("name", ["ours", "lfilter", "chunked_matmul"])
def test_a_red_contender_is_not_timed_and_fails_the_run(name, monkeypatch, capsys):
    right = getattr(scan, name)
    spoilt = lambda x, lengths: right(x, lengths) + 0.25 * (torch.arange(len(x)) == len(x) - 1)
    monkeypatch.setattr(scan, name, spoilt)
    contenders = [scan.Contender(c.name, spoilt if c.fn is right else c.fn, c.bits, c.cap) for c in scan.CONTENDERS]
    monkeypatch.setattr(scan, "CONTENDERS", contenders[:2])
    timed = []
    monkeypatch.setattr(scan, "alternate", lambda ours, theirs, budget: timed.append(theirs) or common.Pairs([1], [1]))
    assert common.run("bench_scan", "", scan.measure, ["--quick"]) == 1
    assert "RED" in capsys.readouterr().err
    assert len(timed) == (1 if name == "lfilter" else 0)  # chunked_matmul, green, goes before lfilter


def test_a_red_rank_is_told_from_a_failing_one():
    wrong = lambda group, rank, cp_size: (
        lambda inputs: [x + (rank == 1) for x in exchange.our_call(group, "carry")(inputs)]
    )
    with pytest.raises(common.Red, match="spoilt on rank 1 of 2"):
        exchange.race([exchange.Contender("spoilt", wrong)], exchange.Kind(3, 2000), 2, 1)


def test_bits_that_depend_on_mates_are_red(monkeypatch):
    monkeypatch.setattr(scan, "ours", lambda x, lengths: x + len(lengths))
    with pytest.raises(common.Red, match="batch mates"):
        scan.check_mates(scan.Batch("three", [4, 5, 6]))


def test_a_missed_target_does_not_fail_the_run(capsys):
    row = common.Row("part", "what", 4.0, "ms", common.at_most(2))
    assert common.run("bench_none", "", lambda quick: [row], ["--quick"]) == 0
    assert "missed by 100 %" in capsys.readouterr().out


# ---- what is compared with


@pytest.mark.parametrize("contender", [*scan.CONTENDERS, scan.TORCHRL], ids=lambda c: c.name)
def test_baselines_agree_with_the_oracle(contender):
    if contender is scan.TORCHRL and find_spec("torchrl") is None:
        pytest.skip("NOT RUN: torchrl is not installed")
    batch = scan.Batch("lengths around a chunk", [1, 127, 128, 129, 700, 2, 256])
    got = contender.fn(batch.x, batch.lengths)
    common.check(contender.name, got, batch.exact(), batch.lengths, contender.bits)


def test_todays_practice_agrees_with_the_oracle():
    assert exchange.race([exchange.PRACTICE], exchange.Kind(5, 2000), 2, 1)[exchange.PRACTICE.name].shape == (1,)


def test_the_expectation_is_the_oracles():
    kind = exchange.Kind(3, 2000)
    batch = kind.make(7, 0, 1)
    rows = [
        reference.reinforce_plus_plus(k.tolist(), r, m.tolist(), gamma=exchange.GAMMA, kl_coef=exchange.KL_COEF)
        for k, r, m in zip(batch.kl, batch.rewards, batch.masks, strict=True)
    ]
    shards = [exchange.expected(kind, 7, rank, 2, gae=False, whiten=False).tolist() for rank in range(2)]
    assert sorted(shards[0] + shards[1]) == sorted(x for row in rows for x in row)
    assert all(shards)


# ---- the clock and the memory


def test_contenders_alternate_strictly_and_the_first_pair_is_not_counted():
    calls = []
    pairs = common.alternate(lambda: calls.append("a"), lambda: calls.append("b"), budget=0.0)
    assert [turn for turn, _ in groupby(calls)] == ["a", "b"] * (common.MIN_PAIRS + 1)
    assert len(pairs.ours) == len(pairs.theirs) == common.MIN_PAIRS


def test_peak_memory_counts_what_was_freed_again():
    ones = "__import__('torch').ones"
    call = f"lambda: [len({ones}(5_000_000)), {ones}(1_000_000)]"  # 20 MB, dropped, and 4 MB
    assert common.peak_bytes(eval, call) == pytest.approx(20e6, rel=0.03)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="NOT RUN: reads the high-water mark from /proc")
@pytest.mark.parametrize(
    ("lengths", "masked", "at_most"),
    [([131_072] * 8, False, 2), ([131_073] * 8, False, 2), ([1_000_000], False, 2), ([131_072] * 8, True, 3)],
)
def test_peak_memory_of_the_scan_over_that_of_its_input(lengths, masked, at_most):
    """I75. The output is once the input's; one tile is worked on at a time; a mask is staged as bits of a byte each."""
    peak = common.peak_bytes(scan.call_of, scan.masked if masked else scan.ours, "memory", lengths)
    assert 1 <= peak / (4 * sum(lengths)) <= at_most


# ---- the scripts


@pytest.mark.parametrize("name", ["bench_scan", "bench_exchange", "bench_actor"])
def test_each_script_runs(name, tmp_path):
    if name == "bench_actor":
        pytest.importorskip("megatron.core", reason="NOT RUN: megatron-core is not installed")
    command = [sys.executable, SCRIPTS / f"{name}.py", "--quick", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / f"{name}.json").read_text())
    rows = report["rows"]
    assert report["machine"]["torch"] == torch.__version__
    assert all(row["figure"] is None or row["figure"] > 0 for row in rows)
    assert all(bool(row["verdict"]) == (row["target"] is not None) for row in rows)
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    assert rows[0]["what"] in done.stdout
    assert len((tmp_path / f"{name}.md").read_text().splitlines()) == len(rows) + 2


# ---- counted, not timed


class TorchCalls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


NUMPY_CALLS = Counter()


class Counted(np.ndarray):
    """An array that counts the ufuncs called on it and on what comes of it."""

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        NUMPY_CALLS[ufunc.__name__] += 1
        plain = lambda x: x.view(np.ndarray) if isinstance(x, Counted) else x
        if out is not None:
            kwargs["out"] = tuple(map(plain, out))
        result = getattr(ufunc, method)(*map(plain, inputs), **kwargs)
        if out is not None:
            return out[0]
        return result.view(Counted) if isinstance(result, np.ndarray) else result


@pytest.fixture
def count(monkeypatch):
    """count(kind, cp_size, strategy, ..) -> (torch calls, numpy calls, collectives) of one call of the module."""
    native = cp_returns.arrays.native

    def counted(x):
        y = native(x)
        return y.view(Counted) if isinstance(y, np.ndarray) else y

    for module in [m for name, m in sys.modules.items() if name.startswith("cp_returns")]:
        if getattr(module, "native", None) is native:
            monkeypatch.setattr(module, "native", counted)

    def of_call(kind, cp_size, strategy, **options):
        collectives = []

        class Listening(Echo):
            def __call__(self, x):
                collectives.append(x.numel() * x.element_size())
                return super().__call__(x)

        call, inputs = exchange.our_call(Listening(cp_size), strategy, **options), kind.make(0, 0, cp_size)
        NUMPY_CALLS.clear()
        with TorchCalls() as calls:
            call(inputs)
        return calls.names.total(), NUMPY_CALLS.total(), len(collectives)

    return of_call


LIMITS = [  # torch calls and numpy calls of a batch of at most 32k tokens, collectives
    ("carry", {}, 66, 75, 1),
    ("gather", {}, 80, 62, 2),
    ("carry", {"whiten": True}, 90, 95, 2),
    ("carry", {"estimator": "gae", "whiten": True}, 140, 133, 2),
    ("gather", {"estimator": "gae", "whiten": True}, 158, 84, 3),
]
PER_32K = (2, 16)  # more torch calls and numpy calls for each further 32k tokens


@pytest.mark.parametrize(("strategy", "options", "torch_calls", "numpy_calls", "collectives"), LIMITS)
def test_calls_of_a_batch_do_not_grow_with_samples_or_tokens(
    strategy, options, torch_calls, numpy_calls, collectives, count
):
    of = lambda samples, tokens: count(exchange.Kind(samples, tokens, equal=True), 2, strategy, **options)
    few = of(8, 192)
    assert few[0] <= torch_calls
    assert few[1] <= numpy_calls
    assert few[2] == collectives
    assert of(168, 192) == few  # 32k tokens in many samples
    longer = of(8, 4096)  # 32k tokens in few: four more doublings of the block heads in each scan
    assert longer[0] <= few[0]
    assert longer[1] <= few[1] + 2 * 4 * 3
    assert longer[2] == collectives
    tiles = 16
    longest = of(8, tiles * 4096)
    assert longest[0] <= longer[0] + tiles * PER_32K[0]
    assert longest[1] <= longer[1] + tiles * PER_32K[1]
    assert longest[2] == collectives


@pytest.mark.parametrize("cp_size", [1, 4, 32])
def test_calls_of_a_batch_do_not_grow_with_ranks(cp_size, count):
    of = lambda size: count(exchange.Kind(8, 256, equal=True), size, "carry")
    assert of(cp_size)[0] <= of(2)[0]
    assert of(cp_size)[2] == (0 if cp_size == 1 else 1)
