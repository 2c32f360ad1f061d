"""What the command line shows on a terminal: a progress bar, the report of a simulation, a layout.

Needs rich (the `cli` extra), so that `cli` imports this module only inside its commands.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cp_returns import check
from cp_returns.layout import Layout
from cp_returns.pictures import colours, positions, response_span
from cp_returns.rollouts import Rollouts
from cp_returns.scenario import Report, Result, Scenario

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """tick(what, done, total) for the work inside, drawn on stderr if that is a terminal.

    Drawn by `tick` alone: a drawing thread would hold locks while ranks are forked.
    """
    console = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    tasks: dict[str, progress.TaskID] = {}
    bar = progress.Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    )

    def tick(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done, refresh=True)

    with bar:
        yield tick


def _console() -> Console:
    """stdout; where that is a file or a pipe, a width that holds the tables."""
    return Console() if Console().is_terminal else Console(width=100)


def print_report(settings: Scenario, batch: Rollouts, report: Report) -> None:
    """The batch, what each rank held and sent, and how far the results are from one rank and from the oracle."""
    console = _console()
    tokens = sum(batch.response_lengths)
    trained = sum(int(mask.sum()) for mask in batch.trained_masks)
    missing = sum(map(math.isnan, batch.rewards))
    left_out = f" (samples without a reward, fully masked: {missing})" if missing else ""
    rectangle = batch.num_samples * max(batch.response_lengths, default=0)
    kl = "KL as given" if batch.log_probs is None else settings.kl
    verdict = "[green]the ranks agree[/green]" if report.agrees else "[bold red]the ranks DISAGREE[/bold red]"
    lines = (
        f"[bold]REINFORCE++ returns, {settings.layout} over {report.layout.cp_size} ranks[/bold] ({report.groups})",
        f"gamma {settings.gamma:g}, {settings.clock} clock, kl_coef {settings.kl_coef:g} ({kl})",
        f"{batch.num_samples} samples, {tokens:,} response tokens, {trained:,} of them trained{left_out}; {batch.note}",
        f"padded to the longest response the batch would have {rectangle / max(tokens, 1):.2f} times as many tokens",
    )
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    console.print(_rank_table(report))
    console.print(_difference_table(report))
    console.print(f"{verdict} (gather: bit for bit; carry: within 2^-23 = 1.19e-07 of max |G|)", highlight=False)


def _rank_table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, caption="of one call: bytes sent, collectives joined, milliseconds (median)")
    measures = [f"{what}\n{name}" for what in ("bytes", "coll.", "ms") for name in report.strategies]
    for column in ("rank", "tokens", "pieces", *measures):
        table.add_column(column, justify="right", no_wrap=True)
    results = report.strategies.values()
    for rank in range(report.layout.cp_size):
        pieces = report.layout.piece_lengths[:, report.layout.pieces(rank)]
        table.add_row(
            str(rank),
            f"{int(pieces.sum()):,}",
            f"{int((pieces > 0).sum()):,}",
            *(f"{result.bytes_sent[rank]:,}" for result in results),
            *(str(result.collectives[rank]) for result in results),
            *(f"{result.milliseconds[rank]:.2f}" for result in results),
        )
    return table


def _difference_table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, caption="off: the largest difference in a sample, over its largest |G|")
    for column in ("", "one rank", *report.strategies):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    results = (report.alone, *report.strategies.values())
    table.add_row("off from one rank", *(_from_alone(result) for result in results))
    table.add_row("off from the float64 oracle", *(f"{result.from_oracle:.2e}" for result in results))
    table.add_row("milliseconds, slowest rank", *(f"{max(result.milliseconds):.2f}" for result in results))
    return table


def _from_alone(result: Result) -> str:
    return "same bits" if result.bit_equal else f"{result.from_alone:.2e}"


def print_layout(layout: Layout, title: str) -> None:
    """Pieces, owners and tokens of the layout's first sample, and a strip with the owner of each response token."""
    console = _console()
    ink = colours(layout.cp_size)
    console.print(title, highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("piece", "rank", "positions", "response tokens", "count"):
        table.add_column(column, justify="right")
    for piece, owner in enumerate(layout.owners.tolist()):
        low, high = response_span(layout, 0, piece)
        start, end = positions(layout, 0, piece)
        held = f"{low}..{high - 1}" if high > low else "-"
        style = f"bold {ink[owner]}" if high > low else "dim"
        table.add_row(str(piece), str(owner), f"{start}..{end - 1}", held, str(high - low), style=style)
    console.print(table)
    owners = layout.token_owners(0).tolist()
    each = max(1, -(-len(owners) // (8 * console.width)))  # at most eight lines
    scale = "one character a token" if each == 1 else f"one character every {each} tokens"
    console.print(f"owner of each response token ({scale}; ranks in base 36):", highlight=False)
    strip = Text()
    for owner in owners[::each]:
        strip.append(DIGITS[owner] if owner < len(DIGITS) else "#", style=f"bold #ffffff on {ink[owner]}")
    console.print(strip)
    for rank in range(layout.cp_size):
        count = int(layout.lengths(rank)[0])
        console.print(Text(f"rank {rank}: {count or 'no'} tokens", style=ink[rank] if count else "dim"))


def print_check(title: str, report: "check.Report") -> None:
    """One row for each (dp, cp) and output, then what was found, in full."""
    console = _console()
    console.print(title, highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, caption="largest: difference from one rank, over what is allowed")
    for column in ("dp", "cp", "output", "compared", "differ", "largest", "seconds", "verdict"):
        table.add_column(column, justify="left" if column in ("output", "verdict") else "right", no_wrap=True)
    for world in report.worlds:
        found = {finding.output or "": finding for finding in world.findings}
        rows = dict.fromkeys([*world.outputs, *found]) or {"": None}
        for number, name in enumerate(rows):
            case, finding = world.outputs.get(name), found.get(name)
            sizes = (str(world.dp_size), str(world.cp_size)) if number == 0 else ("", "")
            differ = finding.differ if finding else int(case.off.sum()) if case else 0
            reference = "one rank" if (world.dp_size, world.cp_size) == (1, 1) else "agrees"
            table.add_row(
                *sizes,
                name,
                f"{len(case.off):,}" if case else f"{finding.compared:,}" if finding and finding.output else "",
                f"{differ:,}" if name else "",
                f"{case.excess.max(initial=0.0):.2g}" if case else "",
                f"{world.seconds:.2f}" if number == 0 else "",
                Text(finding.kind, style="bold red") if finding else Text(reference, style="green"),
            )
    console.print(table)
    verdict = "[green]agrees[/green] with" if report.agrees else "[bold red]DIFFERS[/bold red] from"
    verdict = "[bold red]HANGS[/bold red] beside" if report.hangs else verdict
    console.print(f"the function {verdict} one rank (ranks in {report.run})", highlight=False)
    if not report.agrees:
        console.print(Text("\n" + "\n\n".join(str(report).split("\n\n")[1:])), soft_wrap=True)
