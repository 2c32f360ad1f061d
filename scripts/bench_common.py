"""What the benchmarks share: the gate, the clock, the table.

Nothing red is timed: a contender first agrees with the serial float64 oracle on the batch that will be timed. Two
contenders are timed in strictly alternating pairs, on one thread and without the garbage collector, so that whatever
else the machine does meets both. A target stands beside its figure; missing one never fails a run.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Measurement, TaskSpec

MIN_PAIRS = 5


class Red(AssertionError):
    """A contender that computes something else: it is not timed."""


@dataclass(frozen=True)
class Target:
    """A bound on a figure: "at most" or "at least" the limit."""

    bound: str
    limit: float

    def verdict(self, figure: float) -> str:
        """In words: met, or missed and by how much."""
        met = figure <= self.limit if self.bound == "at most" else figure >= self.limit
        off = abs(figure / self.limit - 1)
        return f"{self.bound} {self.limit:g}: " + ("met" if met else f"missed by {100 * off:.0f} %")


@dataclass(frozen=True)
class Row:
    """One line of a report. figure: a number in `unit`, None where nothing was measured and `note` says why."""

    part: str
    what: str
    figure: float | None
    unit: str
    target: Target | None = None
    note: str = ""


def at_most(limit: float) -> Target:
    return Target("at most", limit)


def at_least(limit: float) -> Target:
    return Target("at least", limit)


# ---- the gate


def check(name: str, got: Tensor, exact: Sequence[float] | Tensor, lengths: Sequence[int], bits: float) -> None:
    """`got` is `exact` within 2^-bits of each sample's largest number; raises Red with the first token that is not."""
    got, exact = got.double().numpy(), np.asarray(exact, dtype=np.float64)
    if got.shape != exact.shape:
        raise Red(f"{name} gives {list(got.shape)} tokens; expected {list(exact.shape)}. Not timed.")
    stops = np.cumsum(lengths)
    for i, (start, stop) in enumerate(zip(stops - lengths, stops, strict=True)):
        largest = np.abs(exact[start:stop]).max(initial=0.0)
        off = np.abs(got[start:stop] - exact[start:stop])
        if not (off <= 2.0**-bits * largest).all():
            j = int(np.argmax(~(off <= 2.0**-bits * largest)))
            raise Red(f"{name}: sample {i}, token {j}: {got[start + j]!r}; expected {exact[start + j]!r}. Not timed.")


# ---- the clock


@contextmanager
def quiet():
    """One thread, and no garbage collection inside a measurement (as timeit does it)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        torch.set_num_threads(threads)


def timed(fn: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call; what it returns is dropped after the clock has stopped."""
    start = clock()
    kept = fn()
    seconds = clock() - start
    del kept
    return seconds


@dataclass(frozen=True)
class Pairs:
    """Seconds of two contenders, one pair a round."""

    ours: list[float]
    theirs: list[float]

    @property
    def ratio(self) -> float:
        """Median over the pairs of theirs / ours."""
        return float(np.median(np.array(self.theirs) / np.array(self.ours)))


def alternate(
    ours: Callable[[], Any], theirs: Callable[[], Any], *, budget: float, clock=time.perf_counter, most: int = 200
) -> Pairs:
    """ours, theirs, ours, theirs, .. for `budget` seconds, at least MIN_PAIRS pairs; the first pair is not counted.

    In its turn the faster one runs up to ten times while the slower one runs once, and the median counts: else it
    would always find the caches as a long run of the other left them.
    """
    pairs = Pairs([], [])
    with quiet():
        first, second = timed(ours), timed(theirs)
        often, theirs_often = (max(1, min(10, int(a / b))) for a, b in ((second, first), (first, second)))
        end = time.perf_counter() + budget
        while len(pairs.ours) < MIN_PAIRS or (time.perf_counter() < end and len(pairs.ours) < most):
            pairs.ours.append(median([timed(ours, clock) for _ in range(often)]))
            pairs.theirs.append(median([timed(theirs, clock) for _ in range(theirs_often)]))
    return pairs


def median(seconds: Sequence[float]) -> float:
    return statistics(seconds).median


def noisy(seconds: Sequence[float]) -> str:
    """ "noisy" where the middle half of the measurements spreads over more than 10 % of the median."""
    return "noisy" if statistics(seconds).has_warnings else ""


def statistics(seconds: Sequence[float]) -> Measurement:
    return Measurement(1, list(seconds), TaskSpec(stmt="", setup="", num_threads=1))


# ---- memory


def peak_bytes(make: Callable[..., Callable[[], Any]], *args: Any) -> int:
    """The most resident memory that one call of make(*args) adds, measured by the kernel in a child.

    tracemalloc does not see torch. The child comes of a fresh interpreter, since what another benchmark left in the
    heap would be counted or not as it happens to fit. It returns freed memory at once (no thresholds, no huge pages),
    calls once to have it warm, resets the kernel's high-water mark and calls again. Good to about 100 KiB.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["numpy", "torch"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_peak_in_child, args=(make, args, theirs))
    process.start()
    theirs.close()
    if not ours.poll(300):
        process.kill()
    peak = ours.recv()
    process.join(10)
    return peak


def _peak_in_child(make: Callable[..., Callable[[], Any]], args: tuple, pipe) -> None:
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold, thp_disable = -1, -3, 41
    libc.mallopt(mmap_threshold, 64 * 1024)
    libc.mallopt(trim_threshold, 64 * 1024)
    libc.prctl(thp_disable, 1, 0, 0, 0)
    fn = make(*args)
    for _ in range(2):
        fn()
    gc.collect()
    gc.disable()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    kept = fn()
    pipe.send(_status("VmHWM") - before)
    del kept
    os._exit(0)


def _status(name: str) -> int:
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


# ---- batches


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def skewed(samples: int, longest: int, seed: int = 0) -> list[int]:
    """Most responses short, some very long: longest * u^6, at least 1."""
    return np.maximum(1, longest * rng(seed).random(samples) ** 6).astype(int).tolist()


def ragged(samples: int, longest: int, seed: int = 0) -> list[int]:
    """Uniform in [1, longest]; one has the longest."""
    lengths = rng(seed).integers(1, longest + 1, samples)
    lengths[seed % samples] = longest
    return lengths.tolist()


def gaps(tokens: int, seed: int = 0, mean: int = 200) -> Tensor:
    """A mask of alternating valid and masked runs of random lengths (4 of 5 tokens valid), as turns with tools."""
    r = rng(seed)
    runs = max(2, 2 * int(tokens / mean) + 2)
    sizes = np.maximum(1, r.exponential(mean, runs) * np.where(np.arange(runs) % 2, 0.4, 1.6)).astype(int)
    edges = np.repeat(np.arange(runs) % 2 == 0, sizes)[:tokens]
    mask = np.ones(tokens, dtype=bool)
    mask[: len(edges)] = edges
    return torch.from_numpy(mask)


# ---- the report


def arguments(doc: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small batches and few rounds: does it run, not how fast")
    parser.add_argument("--out", type=Path, help="write NAME.json, NAME.md and NAME.png into this folder")
    return parser.parse_args(argv)


def machine() -> dict[str, str]:
    """What a figure holds for."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": cpu[1] if cpu else platform.processor(),
        "cores": str(os.cpu_count()),
        "load": " ".join(f"{x:.1f}" for x in os.getloadavg()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads a process": "1",
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def run(name: str, doc: str, measure: Callable[[bool], list[Row]], argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 when a contender is red, 0 whatever the times are."""
    args = arguments(doc, argv)
    about = machine() | ({"quick": "yes: figures of small batches, not to be quoted"} if args.quick else {})
    try:
        rows = measure(args.quick)
    except Red as red:
        print(f"RED: {red}", file=sys.stderr)
        return 1
    show(name, about, rows)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": name, "machine": about, "rows": [as_json(row) for row in rows]}
        (args.out / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        (args.out / f"{name}.md").write_text(markdown(rows))
        draw(args.out / f"{name}.png", name, rows)
        print(f"wrote {name}.json, {name}.md and {name}.png to {args.out}")
    return 0


def say(what: str) -> None:
    """What is measured now: a run takes minutes."""
    print(f"measuring {what}", file=sys.stderr, flush=True)


def as_json(row: Row) -> dict[str, object]:
    return asdict(row) | {"verdict": row.target.verdict(row.figure) if row.target and row.figure is not None else None}


def show(name: str, about: dict[str, str], rows: Sequence[Row]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console() if Console().is_terminal else Console(width=140)
    console.print(f"[bold]{name}[/bold]: " + ", ".join(f"{k} {v}" for k, v in about.items()), highlight=False)
    for part in dict.fromkeys(row.part for row in rows):
        table = Table(box=box.SIMPLE, title=f"[bold]{part}[/bold]", title_justify="left", show_header=False)
        for width, justify in ((40, "left"), (8, "right"), (18, "left"), (32, "left"), (30, "left")):
            table.add_column(width=width, justify=justify)
        for row in rows:
            if row.part == part:
                verdict = row.target.verdict(row.figure) if row.target and row.figure is not None else ""
                style = "green" if verdict.endswith("met") else "red"
                figure = "-" if row.figure is None else number(row.figure)
                told = f"[{style}]{verdict}[/{style}]" if verdict else ""
                table.add_row(row.what, figure, row.unit, told, row.note)
        console.print(table)


def markdown(rows: Sequence[Row]) -> str:
    """The table of a report, as the README shows it."""
    lines = ["| | | figure | target | |", "|---|---|---|---|---|"]
    for row in rows:
        measured = row.figure is not None
        figure = f"{number(row.figure)} {row.unit}" if measured else "-"
        verdict = row.target.verdict(row.figure) if row.target and measured else ""
        lines.append("| " + " | ".join([row.part, row.what, figure, verdict, row.note]) + " |")
    return "\n".join(lines) + "\n"


def number(x: float) -> str:
    """Three significant digits, with separators."""
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"


def draw(path: Path, name: str, rows: Sequence[Row]) -> None:
    """Bars of every figure, one panel a unit, log scale; a target is a tick on its bar."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = [row for row in rows if row.figure]
    units = list(dict.fromkeys(row.unit for row in shown))
    panels = [[row for row in shown if row.unit == unit][::-1] for unit in units]
    figure, axes = plt.subplots(
        len(units), 1, figsize=(11, 1.2 * len(units) + 0.22 * len(shown)), layout="constrained", squeeze=False
    )
    for axis, unit, panel in zip(axes[:, 0], units, panels, strict=True):
        axis.barh(range(len(panel)), [row.figure for row in panel], color="tab:blue", height=0.6)
        for i, row in enumerate(panel):
            axis.annotate(number(row.figure), (row.figure, i), (3, 0), textcoords="offset points", va="center", size=7)
            if row.target:
                axis.plot([row.target.limit] * 2, [i - 0.4, i + 0.4], color="tab:red")
        axis.set_yticks(range(len(panel)), [f"{row.part}: {row.what}" for row in panel], size=7)
        axis.set(xscale="log", xlabel=unit)
    figure.suptitle(f"{name} (red: target)")
    figure.savefig(path, dpi=110)
    plt.close(figure)
