"""Pictures for people who debug context parallelism: who owns which token, one response's returns by owner, and where
the ranks differ from one rank.

matplotlib belongs to the `cli` extra and is imported by the functions. Each returns the bytes of a PNG.
"""

import io
import math
from collections.abc import Sequence

import numpy as np

from cp_returns.layout import Layout

# Okabe and Ito's colours, told apart by colour-blind eyes; more than eight ranks take steps of a colour map.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6BB1", "#B8A300")


def colours(cp_size: int) -> list[str]:
    """One colour a rank, as hex."""
    if cp_size <= len(COLOURS):
        return list(COLOURS[:cp_size])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["turbo"](0.05 + 0.9 * rank / (cp_size - 1))) for rank in range(cp_size)]


def layout_png(layout: Layout, sample: int = 0, *, title: str = "") -> bytes:
    """A lane a rank: its pieces of one sample over the positions of the sequence; prompt grey, padding hatched."""
    figure, axes = _figure(1, height=1.7 + 0.42 * layout.cp_size)
    (axis,) = axes
    total, response = int(layout.total_lengths[sample]), int(layout.response_lengths[sample])
    prompt, ink = total - response, colours(layout.cp_size)
    for piece, owner in enumerate(layout.owners.tolist()):
        start, end = positions(layout, sample, piece)
        held, low, high = min(end, total), *response_span(layout, sample, piece)
        axis.barh(
            owner, end - start, left=start, height=0.78, color="#ffffff", edgecolor="#c8c8c8", hatch="////", lw=0.6
        )
        axis.barh(owner, max(0, held - start), left=start, height=0.78, color="#dcdcdc", edgecolor="#b0b0b0", lw=0.6)
        if high > low:
            left = prompt - 1 + low
            axis.barh(owner, high - low, left=left, height=0.78, color=ink[owner], edgecolor="#ffffff", lw=0.6)
            label = f"{low}..{high - 1}" if high - low > 1 else f"{low}"
            roomy = (high - low) * 95 > len(label) * max(total, 1)
            if roomy:
                axis.text(
                    left + (high - low) / 2,
                    owner,
                    label,
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=_readable(ink[owner]),
                )
    axis.axvline(prompt - 1, color="#333333", lw=1)
    axis.set_yticks(range(layout.cp_size), [f"rank {rank}" for rank in range(layout.cp_size)])
    axis.set_ylim(layout.cp_size - 0.05, -0.6)
    axis.set_xlabel(
        "position in the sequence (colour: its logit predicts that response token; grey: none; hatched: padding)"
    )
    axis.set_title(title, loc="left", fontsize=10, parse_math=False)
    axis.annotate(
        "predicts response token 0", (prompt - 1, layout.cp_size - 0.12), (4, 0), textcoords="offset points", fontsize=8
    )
    return _png(figure)


def returns_png(
    layout: Layout,
    sample: int,
    got: Sequence[float],
    alone: Sequence[float],
    trained: Sequence[bool],
    *,
    title: str = "",
) -> bytes:
    """One response's returns over its tokens, coloured by the rank that owns them, and below the same from one rank.

    `got` are the returns put together from all ranks, `alone` those of W = 1, both of the whole response; masked tokens
    are left out of the lines.
    """
    figure, (upper, lower) = _figure(2, height=5.2)
    ink = colours(layout.cp_size)
    mask = np.asarray(trained, dtype=bool)
    above, below = (np.where(mask, np.asarray(y, dtype=float), np.nan) for y in (got, alone))
    named = set()
    dots = {"marker": ".", "markersize": 4} if len(mask) <= 400 else {}
    for piece, owner in enumerate(layout.owners.tolist()):
        low, high = response_span(layout, sample, piece)
        if high == low:
            continue
        label = None if owner in named else f"rank {owner}"
        named.add(owner)
        to_next = slice(low, high + 1)  # to the first token of the next piece, whose own line is drawn over it
        upper.plot(np.arange(len(mask))[to_next], above[to_next], color=ink[owner], lw=1.6, label=label, **dots)
        for axis in (upper, lower):
            axis.axvspan(low - 0.5, high - 0.5, color=ink[owner], alpha=0.10, lw=0)
    lower.plot(np.arange(len(mask)), below, color="#444444", lw=1.2, label="one rank (W = 1)", **dots)
    upper.set_title(title, loc="left", fontsize=10, parse_math=False)
    upper.set_ylabel(f"returns, {layout.cp_size} ranks")
    lower.set_ylabel("returns, one rank")
    lower.set_xlabel("response token (gaps: tokens that the loss mask leaves out)")
    lower.sharex(upper)
    lower.set_ylim(upper.get_ylim())
    _token_axis(upper, len(mask))
    upper.tick_params(labelbottom=False)
    handles, labels = upper.get_legend_handles_labels()
    by_rank = sorted(zip(labels, handles, strict=True), key=lambda pair: int(pair[0].split()[1]))
    upper.legend(
        [h for _, h in by_rank],
        [text for text, _ in by_rank],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=9,
    )
    return _png(figure)


def differences_png(
    excess: np.ndarray, rank: np.ndarray, sample: np.ndarray, ranks: Sequence[str], *, title: str = ""
) -> bytes:
    """Where a batch differs from one rank: tokens of the pack across, one row a rank, coloured by how much.

    excess: each token's difference over what is allowed, so that 1 is the border; NaN where a number is none. rank: the
    row that owns the token. Many tokens share a column, which shows the largest of each rank.
    """
    from matplotlib.colors import LogNorm

    columns = min(1200, max(1, len(excess)))
    column = np.arange(len(excess)) * columns // max(1, len(excess))
    finite = np.where(np.isfinite(excess), excess, 0.0)
    grid = np.full((len(ranks), columns), -1.0)  # -1: no token of this rank
    np.maximum.at(grid, (rank, column), finite)
    figure, (axis,) = _figure(1, height=1.9 + 0.36 * len(ranks))
    # "under" is any number that agrees; what a rank does not own stays white
    shades = _shades("#d8e4ee")
    norm = LogNorm(1.0, max(10.0, float(finite.max(initial=0.0))))
    shown = np.ma.masked_where(grid < 0, np.maximum(grid, 1e-9))
    mesh = axis.pcolormesh(
        np.linspace(0, len(excess), columns + 1), np.arange(len(ranks) + 1), shown, cmap=shades, norm=norm
    )
    bad = np.flatnonzero(~np.isfinite(excess))
    axis.plot(bad + 0.5, rank[bad] + 0.5, "x", color="#c000c0", markersize=4, label="NaN or inf")
    starts = np.flatnonzero(np.diff(sample, prepend=-1))
    labelled = -1.0
    for start in starts:
        axis.axvline(start, color="#666666", lw=0.5)
        if labelled < 0 or start - labelled > 0.025 * len(sample):
            at = {"xytext": (2, 2), "textcoords": "offset points", "fontsize": 7, "color": "#444444"}
            axis.annotate(str(sample[start]), (start, 0), **at)
            labelled = float(start)
    axis.set_yticks(np.arange(len(ranks)) + 0.5, ranks)
    axis.set_ylim(len(ranks), 0)
    axis.set_xlabel(
        "response tokens of the batch, sample after sample (its number above; pale: agrees; white: not this rank's)"
    )
    axis.set_title(title, loc="left", fontsize=10, pad=14, parse_math=False)
    if len(bad):
        axis.legend(loc="upper right", fontsize=8)
    figure.colorbar(mesh, ax=axis, label="difference / allowed", extend="min", pad=0.01)
    return _png(figure)


def sample_png(
    expected: np.ndarray, got: np.ndarray, rank: np.ndarray, piece: np.ndarray, off: np.ndarray, *, title: str = ""
) -> bytes:
    """One response: its numbers from many ranks over those from one, by owner, and below their difference.

    off: which tokens differ by more than is allowed; a cross on the axis stands for NaN or inf.
    """
    figure, (upper, lower) = _figure(2, height=5.2)
    ink = colours(int(rank.max(initial=0)) + 1)
    tokens = np.arange(len(expected))
    of_rank = np.array(ink)[rank]
    # markers, so that a response of one token shows too; open, so that equal numbers of a rank show inside
    dots = {"marker": "o", "markersize": 8, "fillstyle": "none"} if len(tokens) <= 100 else {}
    upper.plot(tokens, expected, color="#444444", lw=1.2, label="one rank", **dots)
    for r in np.unique(rank):
        mine = rank == r
        upper.plot(tokens[mine], got[mine], ".", color=ink[r], markersize=6, label=f"rank {r}")
    finite = np.isfinite(got - expected)
    lower.vlines(tokens[finite], 0, (got - expected)[finite], colors=of_rank[finite], lw=2)
    for axis in (upper, lower):
        bad = tokens[~np.isfinite(got)]
        axis.plot(bad, np.zeros(len(bad)), "x", color="#c000c0", markersize=5, label="NaN or inf" if len(bad) else None)
        for start in np.flatnonzero(np.diff(piece)) + 0.5:
            axis.axvline(start, color="#bbbbbb", lw=0.8, ls="--", zorder=0)
        if off.any():
            axis.axvline(tokens[off][0], color="#d00000", lw=1.0, alpha=0.7, zorder=0)
    labelled = -math.inf
    for start in np.flatnonzero(np.diff(piece, prepend=-1)):
        if start - labelled > 0.025 * len(tokens):
            at = {"xycoords": ("data", "axes fraction"), "xytext": (2, 3), "textcoords": "offset points", "fontsize": 8}
            lower.annotate(str(piece[start]), (start - 0.5, 1), **at)
            labelled = start
    lower.axhline(0, color="#444444", lw=0.8)
    lower.sharex(upper)
    _token_axis(upper, len(tokens))
    upper.tick_params(labelbottom=False)
    upper.set_title(title, loc="left", fontsize=10, parse_math=False)
    upper.set_ylabel("value")
    lower.set_ylabel("difference")
    lower.set_xlabel("response token (red line: the first that differs; dashed: borders of pieces, numbered above)")
    upper.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    return _png(figure)


def _token_axis(axis, tokens: int) -> None:
    """All tokens of a response and no more, with ticks at whole ones."""
    from matplotlib.ticker import MaxNLocator

    axis.set_xlim(-0.5, max(tokens, 1) - 0.5)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _shades(under: str):
    """Yellow to dark red, and one colour for what is below the scale."""
    from matplotlib import colormaps

    return colormaps["YlOrRd"].with_extremes(under=under)


def _readable(background: str) -> str:
    red, green, blue = (int(background[i : i + 2], 16) for i in (1, 3, 5))
    return "#111111" if 0.3 * red + 0.6 * green + 0.1 * blue > 130 else "#ffffff"


def positions(layout: Layout, sample: int, piece: int) -> tuple[int, int]:
    """[start, end) of a piece in positions of its sample, padding included."""
    start = piece * int(layout.piece[sample]) - int(layout.begin[sample])
    return max(0, start), max(0, start + int(layout.piece[sample]))


def response_span(layout: Layout, sample: int, piece: int) -> tuple[int, int]:
    """[start, end) of a piece in response tokens."""
    return int(layout.cuts[sample, piece]), int(layout.cuts[sample, piece + 1])


def _figure(rows: int, *, height: float):
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(10, height), dpi=120, layout="constrained")
    axes = figure.subplots(rows, squeeze=False)[:, 0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
