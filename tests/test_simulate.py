"""simulate.py: ranks in threads and in processes see their peers, and nothing that a rank does can hang the caller."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from cp_returns import simulate
from cp_returns.simulate import RankDied, RankFailure, RankHung, group_ranks, in_processes, in_threads, run

ROOT = Path(__file__).resolve().parents[1]
WAYS = pytest.mark.parametrize("way", [in_threads, in_processes])


def ranks_seen(rank, all_gather):
    me = torch.tensor([rank])
    seen = [gather(me).flatten().tolist() for gather in (all_gather, all_gather.cp, all_gather.dp)]
    return [*seen, (all_gather.cp_rank, all_gather.cp_size, all_gather.dp_rank, all_gather.dp_size)]


@WAYS
def test_ranks_are_numbered_as_megatron_numbers_them(way):
    results = way(ranks_seen, 6, cp_size=3)
    assert results[2] == [[0, 1, 2, 3, 4, 5], [0, 1, 2], [2, 5], (2, 3, 0, 2)]
    assert results[3] == [[0, 1, 2, 3, 4, 5], [3, 4, 5], [0, 3], (0, 3, 1, 2)]
    assert way(ranks_seen, 1) == [[[0], [0], [0], (0, 1, 0, 1)]]


def test_the_groups_are_those_of_real_parallel_state():
    def fn(rank, all_gather):
        import torch.distributed as dist
        from megatron.core import parallel_state as mpu

        cp = dist.get_process_group_ranks(mpu.get_context_parallel_group())
        dp = dist.get_process_group_ranks(mpu.get_data_parallel_group())
        both = dist.get_process_group_ranks(mpu.get_data_parallel_group(with_context_parallel=True))
        assert all_gather.cp_group is mpu.get_context_parallel_group()
        return cp, dp, both, ranks_seen(rank, all_gather)[:3]

    pytest.importorskip("megatron.core", reason="NOT RUN: megatron-core is not installed")
    cp_groups, dp_groups = group_ranks(4, 2)
    for rank, (cp, dp, both, seen) in enumerate(in_processes(fn, 4, cp_size=2, megatron=True)):
        assert cp in cp_groups
        assert rank in cp
        assert dp in dp_groups
        assert rank in dp
        assert seen == [both, cp, dp]


def test_eight_ranks_with_megatron_start_in_seconds():
    pytest.importorskip("megatron.core.parallel_state", reason="NOT RUN: megatron-core is not installed")
    start = time.monotonic()
    in_processes(ranks_seen, 8, cp_size=8, megatron=True)
    assert time.monotonic() - start < 20  # 0.7 s on two idle cores; importing in every rank would take 25 s and more


@WAYS
def test_what_a_rank_raises_is_reported_with_every_ranks_state(way):
    def fn(rank, all_gather):
        all_gather(torch.ones(1))
        if rank == 1:
            raise ValueError("boom")
        return all_gather.cp(torch.ones(2, 3))

    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1: ValueError: boom") as caught:
        way(fn, 3)
    assert time.monotonic() - start < 8
    failure = caught.value
    assert (failure.first, failure.kind) == (1, "raised")
    assert isinstance(failure.outcomes[1].error, ValueError)
    assert 'raise ValueError("boom")' in str(failure)
    assert failure.outcomes[0].last_collective == "all_gather over CP, float32 [2, 3]"
    assert [o.collectives for o in failure.outcomes] == [2, 1, 2]


@WAYS
def test_a_rank_that_skips_a_collective_is_a_hang_found_at_once(way):
    def fn(rank, all_gather):
        all_gather(torch.ones(1))
        if rank != 2:
            all_gather(torch.ones(1))
        return rank

    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        way(fn, 3, timeout=60)
    assert time.monotonic() - start < 10
    assert caught.value.kind == "hang"
    assert caught.value.outcomes[2].value == 2
    assert all(caught.value.outcomes[rank].error is not None for rank in (0, 1))


@WAYS
def test_a_rank_that_never_comes_is_stopped_in_time_and_its_stack_shown(way):
    def sleeps_for_ever(rank, all_gather):
        all_gather(torch.ones(1))
        if rank == 1:
            wait_for_nothing()
        all_gather(torch.ones(1))

    def wait_for_nothing():
        time.sleep(30)

    start = time.monotonic()
    with pytest.raises(RankFailure, match="wait_for_nothing") as caught:
        way(sleeps_for_ever, 2, timeout=2)
    assert time.monotonic() - start < 10
    assert (caught.value.first, caught.value.kind) == (1, "hang")
    assert isinstance(caught.value.outcomes[1].error, RankHung)


def test_a_killed_process_is_named_with_its_signal():
    def fn(rank, all_gather):
        all_gather(torch.ones(1))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        all_gather(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1: RankDied: was killed by SIGKILL") as caught:
        in_processes(fn, 3)
    assert time.monotonic() - start < 10
    assert (caught.value.first, caught.value.kind) == (1, "died")
    assert isinstance(caught.value.outcomes[1].error, RankDied)
    assert caught.value.outcomes[1].collectives == 1


def test_a_failure_does_not_wait_for_ranks_that_are_busy(monkeypatch):
    """The others get PATIENCE seconds, not the whole time."""
    monkeypatch.setattr(simulate, "PATIENCE", 1.0)

    def fn(rank, all_gather):
        if rank == 0:
            raise ValueError("boom")
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 0: ValueError: boom") as caught:
        in_processes(fn, 2, timeout=60)
    assert time.monotonic() - start < 20
    assert (caught.value.first, caught.value.kind) == (0, "raised")


def test_nothing_is_left_behind():
    def fn(rank, all_gather):
        if rank == 0:
            raise ValueError("boom")
        if rank == 1:
            time.sleep(60)
        all_gather(torch.ones(1))

    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(RankFailure):
            in_processes(fn, 3, timeout=1)
        in_processes(ranks_seen, 2)
    assert multiprocessing.active_children() == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_an_error_that_cannot_travel_still_arrives_as_text():
    class Awkward(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    def fn(rank, all_gather):
        raise Awkward(1, 2)

    with pytest.raises(RankFailure, match="Awkward: 1 and 2"):
        in_processes(fn, 2)


def test_a_rank_stopped_while_its_result_is_on_its_way_is_not_waited_for():
    """The rank stops itself once the parent has read some of its 100 MB; after 20 s it would be killed."""

    def fn(rank, all_gather):
        def read_by_parent() -> int:
            return int(Path(f"/proc/{os.getppid()}/io").read_text().split()[1])  # rchar

        def stop():
            while read_by_parent() - start < 5_000_000:
                pass
            os.kill(os.getpid(), signal.SIGSTOP)

        if rank == 1:
            start = read_by_parent()
            threading.Thread(target=stop, daemon=True).start()
            return bytes(100_000_000)
        return rank

    watchdog = threading.Timer(20, lambda: [process.kill() for process in multiprocessing.active_children()])
    watchdog.start()
    start = time.monotonic()
    try:
        assert [type(value) for value in in_processes(fn, 2, timeout=5)] == [int, bytes]
    finally:
        watchdog.cancel()
    assert time.monotonic() - start < 15


class Unreadable:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return unreadable, (self.error,)


def unreadable(error):
    raise error


@pytest.mark.parametrize("error", [ValueError("boom"), EOFError("boom")])
def test_a_result_that_cannot_be_unpickled_is_the_ranks_failure(error):
    text = f"rank 1: RuntimeError: its result cannot be unpickled: {type(error).__name__}: boom"
    with pytest.raises(RankFailure, match=text) as caught:
        in_processes(lambda rank, all_gather: Unreadable(error) if rank else rank, 2)
    assert (caught.value.first, caught.value.kind) == (1, "raised")
    assert caught.value.outcomes[0].value == 0


def test_a_failure_can_be_a_result():
    def fn(rank, all_gather):
        try:
            in_threads(lambda rank, all_gather: 1 // rank, 2)
        except RankFailure as failure:
            return failure

    for failure in in_processes(fn, 2):
        assert (failure.first, failure.kind) == (0, "raised")
        assert isinstance(failure.outcomes[0].error, ZeroDivisionError)
        assert "integer division" in str(failure)


def test_threads_need_one_shape_and_dtype_and_get_copies():
    with pytest.raises(
        RankFailure, match=r"one dtype and shape on all ranks, got \{0: 'float32 \[1\]', 1: 'float32 \[2\]'"
    ):
        in_threads(lambda rank, all_gather: all_gather(torch.ones(1 + rank)), 2)

    def fn(rank, all_gather):
        mine = torch.tensor([float(rank)], requires_grad=True)
        got = all_gather(mine)
        got += 1
        return got.requires_grad, mine.item(), all_gather(got)[:, 0, 0].tolist()

    assert in_threads(fn, 2) == [(False, 0.0, [1.0, 1.0]), (False, 1.0, [1.0, 1.0])]


def test_threads_keep_calls_apart_when_ranks_run_ahead():
    """500 calls without a pause, an uneven load, one buffer: each call gives the messages of that call."""

    def fn(rank, all_gather):
        buffer = torch.tensor([0, rank])
        for i in range(500):
            if i % 7 == rank:
                time.sleep(0.0005)
            buffer[0] = i
            got = all_gather(buffer)
            buffer[0] = -1
            assert got.tolist() == [[i, r] for r in range(4)]

    before = set(threading.enumerate())
    in_threads(fn, 4)
    assert set(threading.enumerate()) <= before


def test_an_interrupt_stops_the_ranks_at_once():
    def interrupted(finished):
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        in_processes(lambda rank, all_gather: time.sleep(60), 4, tick=interrupted)
    assert time.monotonic() - start < 8
    assert multiprocessing.active_children() == []


def test_bad_calls_are_refused():
    with pytest.raises(ValueError, match="cp_size must divide the number of ranks"):
        in_threads(ranks_seen, 4, cp_size=3)
    with pytest.raises(ValueError, match="cp_size must divide the number of ranks"):
        in_processes(ranks_seen, 0)


def test_a_process_in_a_group_does_not_fork(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="in a process group already"):
            in_processes(ranks_seen, 2)
    finally:
        dist.destroy_process_group()


SCRIPT = """
import sys
sys.path.insert(0, "tests")
from test_simulate import ranks_seen
from cp_returns.simulate import run
results = run(ranks_seen, 2)
sys.stdout.write(f"results {results and [r[0] for r in results]}\\n")  # one write a rank, so that lines stay whole
"""


def test_under_torchrun_rank_0_gets_all_results():
    """`run` starts processes itself, or is one rank of those that torchrun started."""
    assert [r[0] for r in run(ranks_seen, 2)] == [[0, 1], [0, 1]]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*command, sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("results")) == [
        "results None",
        "results [[0, 1], [0, 1]]",
    ]
