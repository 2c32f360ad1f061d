"""Run one function on n ranks of this machine: in threads, in gloo processes, or as one rank under torchrun.

    results = in_threads(fn, 4)                              # fn(rank, all_gather) -> anything
    results = in_processes(fn, 4, cp_size=2, megatron=True)  # DP 2 x CP 2 with real parallel_state groups

`all_gather` is called as everywhere in this package ([..] -> [W, ..]) and spans all n ranks; `all_gather.cp` spans the
context-parallel group of this rank and `all_gather.dp` the ranks that hold the same slice of other samples. Ranks are
numbered as Megatron numbers them: rank = cp_rank + cp_size * dp_rank. Nothing here waits without a bound: a rank that
raises, dies, or leaves while others wait for it ends the run with a `RankFailure` that says where every rank was.
"""

import contextlib
import faulthandler
import importlib
import itertools
import mmap
import os
import pickle
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cp_returns.collectives import AllGather, over
from cp_returns.errors import CPCollectiveError

PATIENCE = 10.0  # seconds that the other ranks get to finish or to fail by themselves once one has failed
_NOTE_BYTES = 256


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: `value` if it returned, else `error` and `where`, its stack; `collectives` counts calls."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    where: str = ""
    collectives: int = 0
    last_collective: str = "none"


class RankDied(RuntimeError):
    """The process of a rank ended without a result."""


class RankHung(RuntimeError):
    """A rank did not return within the time given, or waited for a rank that had left."""


class RankFailure(RuntimeError):
    """At least one rank raised, died or hung; `outcomes` has one entry a rank, with the values of those that returned.

    `first` is the rank to look at: one that raised an error of its own, else one that died, else the one that joined
    the fewest collectives. `kind` is "raised", "died" or "hang" accordingly; a rank that left while others waited for
    it is a hang.
    """

    def __init__(self, outcomes: Sequence[Outcome]):
        self.outcomes = tuple(outcomes)
        failed = [o for o in self.outcomes if o.error is not None]
        first = min(failed, key=lambda o: (_blame(o.error), o.collectives))
        self.first = first.rank
        self.kind = ("raised", "died", "hang", "hang")[_blame(first.error)]
        lines = [f"{len(failed)} of {len(self.outcomes)} ranks failed ({self.kind}), rank {self.first} first:"]
        for o in self.outcomes:
            state = "returned" if o.error is None else f"{type(o.error).__name__}: {o.error}"
            lines.append(f"  rank {o.rank}: {state} (collectives: {o.collectives}, last: {o.last_collective})")
        if first.where:
            lines.append(f"rank {self.first} was at\n{first.where}")
        super().__init__("\n".join(lines))

    def __reduce__(self):
        return type(self), (self.outcomes,)


def _blame(error: BaseException | None) -> int:
    """The order in which failures are looked at: own error, death, hang, then what only a lost peer causes."""
    if isinstance(error, RankDied):
        return 1
    if isinstance(error, RankHung):
        return 2
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return 3 if isinstance(error, CPCollectiveError) or any(text in str(error) for text in lost) else 0


@dataclass(frozen=True)
class Peers:
    """The all-gather over some of the ranks; `rank` and `size` count among them, as `ContextParallelReturns` asks.

    Before each call `note(name, message)` is told, for the report of a hang.
    """

    gather: AllGather = field(repr=False)
    name: str
    rank: int
    size: int
    note: Callable[[str, torch.Tensor], None] = field(repr=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.note(self.name, x)
        return self.gather(x)


@dataclass(frozen=True)
class RankGather:
    """The `all_gather` of one simulated rank over all ranks, with `cp` and `dp`, those of its two groups.

    Each can be given to `ContextParallelReturns` as a group: `cp_group=all_gather.cp, dp_cp_group=all_gather`. Its own
    `cp_group` and `dp_cp_group` are the process groups themselves, None in threads.
    """

    everyone: Peers
    cp: Peers
    dp: Peers
    cp_group: Any = None
    dp_cp_group: Any = None

    rank = property(lambda self: self.everyone.rank)
    size = property(lambda self: self.everyone.size)
    cp_rank = property(lambda self: self.cp.rank)
    cp_size = property(lambda self: self.cp.size)
    dp_rank = property(lambda self: self.dp.rank)
    dp_size = property(lambda self: self.dp.size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.everyone(x)


def group_ranks(n: int, cp_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """The CP groups and the DP groups of n ranks in Megatron's order (CP is the inner index)."""
    if n < 1 or cp_size < 1 or n % cp_size:
        raise ValueError(f"cp_size must divide the number of ranks, got cp_size={cp_size} and {n} ranks")
    cp = [list(range(start, start + cp_size)) for start in range(0, n, cp_size)]
    dp = [list(range(start, n, cp_size)) for start in range(cp_size)]
    return cp, dp


def _rank_gather(rank: int, n: int, cp_size: int, gathers, note: Callable[[int, str], None], groups=()) -> RankGather:
    """From the all-gathers over all ranks, CP and DP; `note(number of the call, text)` hears of every call."""
    calls = itertools.count(1)

    def noted(name: str, x: torch.Tensor) -> None:
        note(next(calls), f"all_gather over {name}, {str(x.dtype).removeprefix('torch.')} {list(x.shape)}")

    everyone, cp, dp = gathers
    return RankGather(
        Peers(everyone, "all ranks", rank, n, noted),
        Peers(cp, "CP", rank % cp_size, cp_size, noted),
        Peers(dp, "DP", rank // cp_size, n // cp_size, noted),
        *groups,
    )


# In threads


class _Meeting:
    """All-gather among threads; each call has a box of its own, so a fast rank cannot disturb the call before."""

    def __init__(self, ranks: Sequence[int], deadline: float):
        self.ranks, self.deadline = list(ranks), deadline
        self.box: dict[int, torch.Tensor] = {}
        self.left: set[int] = set()
        self.changed = threading.Condition()

    def leave(self, rank: int) -> None:
        with self.changed:
            self.left.add(rank)
            self.changed.notify_all()

    def gather(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        with self.changed:
            box = self.box
            box[rank] = x.detach().clone()
            if len(box) == len(self.ranks):
                self.box = {}
                self.changed.notify_all()

            def over() -> bool:
                return len(box) == len(self.ranks) or bool(self.left - box.keys())

            self.changed.wait_for(over, self.deadline - time.monotonic())
            absent = [r for r in self.ranks if r not in box]
            gone = sorted(self.left - box.keys())
        if gone:
            raise RankHung(f"waited in all_gather for ranks {absent}, of which {gone} had already left")
        if absent:
            raise RankHung(f"waited in all_gather for ranks {absent} until the time was up")
        sent = {r: f"{str(box[r].dtype).removeprefix('torch.')} {list(box[r].shape)}" for r in self.ranks}
        if len(set(sent.values())) > 1:
            raise ValueError(f"all_gather needs one dtype and shape on all ranks, got {sent}")
        return torch.stack([box[r] for r in self.ranks])


def in_threads(
    fn: Callable[[int, RankGather], Any], n: int, *, cp_size: int | None = None, timeout: float = 60.0
) -> list[Any]:
    """Run fn(rank, all_gather) on n threads and return the results in rank order.

    A rank that leaves (returns or raises) while others wait for it is noticed at once; `timeout`, in seconds, bounds
    everything else. Messages travel detached.

    Raises:
        RankFailure: a rank raised, or waited for one that never came.
    """
    cp_size = n if cp_size is None else cp_size
    cp, dp = group_ranks(n, cp_size)
    deadline = time.monotonic() + timeout
    everyone = _Meeting(range(n), deadline)
    cp_meetings, dp_meetings = [_Meeting(g, deadline) for g in cp], [_Meeting(g, deadline) for g in dp]
    outcomes: list[Outcome | None] = [None] * n
    notes: list[tuple[int, str]] = [(0, "none")] * n

    def run(rank: int) -> None:
        meetings = everyone, cp_meetings[rank // cp_size], dp_meetings[rank % cp_size]
        gathers = [lambda x, m=m: m.gather(rank, x) for m in meetings]
        peers = _rank_gather(rank, n, cp_size, gathers, lambda *note: notes.__setitem__(rank, note))
        try:
            value = fn(rank, peers)
            outcomes[rank] = Outcome(rank, value, None, "", *notes[rank])
        except BaseException as error:
            where = "".join(traceback.format_tb(error.__traceback__))
            outcomes[rank] = Outcome(rank, None, error, where, *notes[rank])
        finally:
            for meeting in meetings:
                meeting.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        # half a second more than the waits inside, so that a rank that waits tells its own story
        thread.join(max(0.0, deadline + 0.5 - time.monotonic()))
    ended = [outcomes[r] or _stuck_thread(r, threads[r], notes[r], timeout) for r in range(n)]
    return _values(ended)


def _stuck_thread(rank: int, thread: threading.Thread, note: tuple[int, str], timeout: float) -> Outcome:
    frame = sys._current_frames().get(thread.ident or -1)
    where = "".join(traceback.format_stack(frame)) if frame is not None else ""
    return Outcome(rank, None, RankHung(f"did not return in {timeout:g} s"), where, *note)


def _values(outcomes: Sequence[Outcome]) -> list[Any]:
    if any(o.error is not None for o in outcomes):
        failure = RankFailure(outcomes)
        raise failure from outcomes[failure.first].error
    return [o.value for o in outcomes]


# In processes


def in_processes(
    fn: Callable[[int, RankGather], Any],
    n: int,
    *,
    cp_size: int | None = None,
    megatron: bool = False,
    timeout: float = 120.0,
    tick: Callable[[int], None] | None = None,
) -> list[Any]:
    """Run fn(rank, all_gather) on n forked gloo processes and return the (pickled) results in rank order.

    The ranks are forked, so what is imported is imported once, and fn may be a closure; they run torch on one thread
    each. `megatron=True` sets up megatron.core.parallel_state (dp = n / cp_size) before fn is called. The ranks meet in
    a temporary file, so no port is chosen in advance. `timeout` in seconds bounds the whole run; after a first failure
    the other ranks get `PATIENCE` seconds. `tick(finished)` is called about ten times a second.

    Raises:
        RankFailure: a rank raised, died (with its exit code or signal) or hung (with its stack).
        RuntimeError: this process is itself in a process group: call `run` there.
    """
    cp_size = n if cp_size is None else cp_size
    group_ranks(n, cp_size)
    if dist.is_initialized():
        raise RuntimeError("in_processes starts ranks of its own, but this process is in a process group already")
    if megatron:
        _parallel_state()  # imported once here, not once in every rank
    sys.stdout.flush()
    sys.stderr.flush()
    context = get_context("fork")
    with tempfile.TemporaryDirectory(prefix="cp_returns_") as folder:
        notes = [mmap.mmap(-1, _NOTE_BYTES) for _ in range(n)]
        pipes, processes = [], []
        try:
            for rank in range(n):
                ours, theirs = context.Pipe()
                args = (fn, rank, n, cp_size, megatron, timeout, folder, notes[rank], theirs)
                process = context.Process(target=_child, args=args, name=f"rank {rank}", daemon=True)
                with warnings.catch_warnings():
                    # Python 3.12 warns when a process with threads forks; a rank uses none of what those threads hold.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            outcomes = _collect(processes, pipes, folder, timeout, tick)
        except BaseException:  # an interrupt, or no process to be had: do not wait for the ranks
            for process in processes:
                process.kill()
            raise
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                _stop(process)
                pipe.close()
        return _values([_explained(o, folder, notes[o.rank]) for o in outcomes])


def _child(fn, rank, n, cp_size, megatron, timeout, folder, note, pipe) -> None:
    """One rank: join the group, run fn, leave the outcome in a file, wait for the others before the sockets close.

    Only the word that the file is complete goes through the pipe: reading a long message from it would wait without a
    bound for a rank that is stopped in mid-sentence.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stack = open(Path(folder, f"stack{rank}"), "w")  # noqa: SIM115  (faulthandler needs it open to the end)
    faulthandler.enable(file=stack)
    # A rank whose parent was killed must end too.
    faulthandler.dump_traceback_later(timeout + 2 * PATIENCE, exit=True, file=stack)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder, "store")), n)
        gather = _join(rank, n, cp_size, megatron, timeout, store, lambda *text: _write_note(note, *text))
        message, returned = pickle.dumps((True, fn(rank, gather))), True
    except BaseException as error:
        message, returned = _failure(error), False
    Path(folder, f"outcome{rank}").write_bytes(message)
    pipe.send_bytes(b"complete")
    if returned:
        pipe.poll(1.0)  # peers may still be reading what this rank sent last
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's shutdown: exit handlers copied from the parent are not this process's to run.
    os._exit(0)


def _join(rank, n, cp_size, megatron, timeout, store, note=lambda *text: None) -> RankGather:
    """Become a rank: the process group, Megatron's groups when asked for, and the all_gathers over them."""
    if store is not None:
        # every rank is on this machine: do not wait for a name server to say so
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback
    limit = timedelta(seconds=timeout + PATIENCE)  # the run's own bound comes first: it has the better report
    dist.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
    groups: list[Any]
    if megatron:
        mpu = _parallel_state()
        minutes = -(-limit // timedelta(minutes=1))
        mpu.initialize_model_parallel(context_parallel_size=cp_size, distributed_timeout_minutes=minutes)
        everyone = mpu.get_data_parallel_group(with_context_parallel=True)
        groups = [everyone, mpu.get_context_parallel_group(), mpu.get_data_parallel_group()]
    else:
        groups = [dist.group.WORLD, *(_mine(rank, of_kind, limit) for of_kind in group_ranks(n, cp_size))]
    return _rank_gather(rank, n, cp_size, [over(group) for group in groups], note, (groups[1], groups[0]))


def _parallel_state() -> Any:
    """megatron.core.parallel_state, without its remarks on GPU libraries that a CPU does not have."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Apex (are|is) not installed", category=UserWarning)
        return importlib.import_module("megatron.core.parallel_state")


def _mine(rank: int, groups: list[list[int]], limit: timedelta) -> Any:
    """Every rank makes every group, as torch.distributed asks; returns the one that holds `rank`."""
    made = [dist.new_group(ranks, timeout=limit) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)


def _failure(error: BaseException) -> bytes:
    where = "".join(traceback.format_tb(error.__traceback__))
    error.__traceback__ = error.__cause__ = error.__context__ = None
    try:
        message = pickle.dumps((False, (error, where)))
        pickle.loads(message)
    except Exception:
        message = pickle.dumps((False, (RuntimeError(f"{type(error).__name__}: {error}"), where)))
    return message


def _collect(processes, pipes, folder: str, timeout: float, tick) -> list[Outcome]:
    """Every rank's outcome: waits `timeout` seconds, `PATIENCE` after the first failure, then stops who is left."""
    start = time.monotonic()
    deadline = start + timeout
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(pipes) and time.monotonic() < deadline:
        waiting = {pipes[r]: r for r in range(len(pipes)) if r not in outcomes}
        ready = connection.wait(list(waiting), timeout=min(0.1, max(0.0, deadline - time.monotonic())))
        for pipe in ready:
            rank = waiting[pipe]
            outcomes[rank] = _received(rank, pipe, processes[rank], folder)
            if outcomes[rank].error is not None:
                deadline = min(deadline, time.monotonic() + PATIENCE)
        if tick:
            tick(len(outcomes))
    for rank, pipe in enumerate(pipes):
        if rank not in outcomes:
            error = RankHung(f"did not return in {time.monotonic() - start:.1f} s and was stopped")
            outcomes[rank] = Outcome(rank, error=error)
            os.kill(processes[rank].pid, signal.SIGABRT)  # faulthandler writes its stack, then it ends
        elif outcomes[rank].error is None:
            _release(pipe)
    return [outcomes[r] for r in range(len(pipes))]


def _received(rank: int, pipe, process, folder: str) -> Outcome:
    try:
        pipe.recv_bytes()
    except (EOFError, OSError):
        process.join(1.0)
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
        return Outcome(rank, error=RankDied(f"{how} before it had a result"))
    try:
        returned, content = pickle.loads(Path(folder, f"outcome{rank}").read_bytes())
    except Exception as error:  # whatever the value's own code raises
        unread = RuntimeError(f"its result cannot be unpickled: {type(error).__name__}: {error}")
        return Outcome(rank, error=unread)
    if returned:
        return Outcome(rank, value=content)
    return Outcome(rank, error=content[0], where=content[1])


def _release(pipe) -> None:
    with contextlib.suppress(OSError):  # it waits a second only and may have gone by itself
        pipe.send_bytes(b"go")


def _stop(process) -> None:
    process.join(3.0)
    if process.exitcode is None:
        process.kill()
        process.join(3.0)
    if process.exitcode is not None:
        process.close()


def _write_note(note: mmap.mmap, calls: int, text: str) -> None:
    note[:] = f"{calls} {text}".encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")


def _explained(outcome: Outcome, folder: str, note: mmap.mmap) -> Outcome:
    """The outcome with what the rank left behind: its last collective, and its stack if it could not tell itself."""
    calls, _, last = bytes(note).rstrip(b"\0").decode(errors="replace").partition(" ")
    stack = Path(folder, f"stack{outcome.rank}")
    written = stack.read_text(errors="replace") if outcome.error and stack.exists() else ""
    where = outcome.where or written.partition("\nExtension modules")[0]
    return replace(outcome, where=where, collectives=int(calls or 0), last_collective=last or "none")


# Under torchrun


def under_torchrun() -> bool:
    """Whether a launcher (torchrun, or anything that sets its four variables) made this process one rank of several."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def run(fn, n: int, *, cp_size=None, megatron=False, timeout: float = 120.0, tick=None) -> list[Any] | None:
    """`in_processes`, or under torchrun this process's part of it: there rank 0 gets all results and the others None.

    Raises:
        ValueError: torchrun started another number of ranks than n.
    """
    if not under_torchrun():
        return in_processes(fn, n, cp_size=cp_size, megatron=megatron, timeout=timeout, tick=tick)
    rank, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if started != n:
        raise ValueError(f"torchrun started {started} ranks, but {n} were asked for")
    torch.set_num_threads(1)
    gather = _join(rank, n, n if cp_size is None else cp_size, megatron, timeout, None)
    value = fn(rank, gather)
    values: list[Any] | None = [None] * n if rank == 0 else None
    dist.gather_object(value, values)
    dist.destroy_process_group()
    return values
