"""Plots as inline SVG: no script, no file, no address, and colours that follow the page's light or dark scheme."""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Stand-ins that the page's style sheet replaces; matplotlib wants real colours.
_COLOURS = {
    "#0000a1": "--ink",
    "#0000a2": "--line",
    "#0000b1": "--series-1",
    "#0000b2": "--series-2",
    "#0000b3": "--series-3",
    "#0000b4": "--series-4",
    "#0000b5": "--series-5",
    "#0000b6": "--series-6",
}
_INK, _LINE, *_SERIES = _COLOURS
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "eagle3",  # equal figures, equal files
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.5,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "axes.prop_cycle": matplotlib.cycler(color=_SERIES),
}

_PANEL_INCHES = 4.4

Line = tuple[Sequence[float], Sequence[float]]


def curves(
    panels: Mapping[str, Mapping[str, Line]], x_label: str, name: str, title: str, *, share: bool = False
) -> str:
    """Draw one panel per key, each with its lines (label: x and y values); `name` is the plot's own in the page.

    With `share` the values are shares of 1, and the axis shows all of it.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_size(panels), layout="constrained")
        for axes, (y_label, lines) in zip(_row(figure, len(panels)), panels.items(), strict=True):
            for label, (x, y) in lines.items():
                axes.plot(x, y, label=label, marker="o" if len(x) < 20 else None, markersize=4)
            axes.set_xlabel(x_label)
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_ylabel(y_label)
            if share:
                axes.set_ylim(0, 1.03)
            if len(lines) > 1:
                _legend(axes)
        return _svg(figure, name, title)


def bars(panels: Mapping[str, Mapping[str, Mapping[str, float | None]]], name: str, title: str) -> str:
    """Draw one panel per key, each with groups of bars (series: group: value); `name` is the plot's own in the page."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_size(panels), layout="constrained")
        for axes, (y_label, series) in zip(_row(figure, len(panels)), panels.items(), strict=True):
            groups = list(dict.fromkeys(group for values in series.values() for group in values))
            width = 0.8 / len(series)
            for index, (label, values) in enumerate(series.items()):
                drawn = [(at, values[group]) for at, group in enumerate(groups) if values.get(group) is not None]
                offset = (index - (len(series) - 1) / 2) * width
                heights = [value for _, value in drawn]
                patches = axes.bar([at + offset for at, _ in drawn], heights, width * 0.92, label=label)
                axes.bar_label(patches, fmt="%.2f", fontsize=7, padding=1)
            slant: dict[str, Any] = {"rotation": 40, "ha": "right"} if len(groups) > 8 else {"rotation": 20}
            axes.set_xticks(range(len(groups)), groups, **(slant if len(groups) > 5 else {}))
            axes.grid(axis="x", visible=False)
            axes.set_ylabel(y_label)
            if len(series) > 1:
                _legend(axes)
        return _svg(figure, name, title)


def intervals(rows: Mapping[str, tuple[float, tuple[float, float] | None]], x_label: str, name: str, title: str) -> str:
    """Draw one row per key, the first on top: a value with its interval, and a line at 1."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.8, 0.9 + 0.32 * len(rows)), layout="constrained")
        (axes,) = _row(figure, 1)
        axes.axvline(1.0, color=_INK, linewidth=0.8)
        for at, (value, span) in enumerate(rows.values()):
            if span is not None:
                axes.plot(span, (at, at), color=_SERIES[0])
            axes.plot((value,), (at,), color=_SERIES[0], marker="o", markersize=5)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(x_label)
        return _svg(figure, name, title)


def _size(panels: Mapping[str, Collection[str]]) -> tuple[float, float]:
    """Return a figure's inches: what a panel's legend needs beyond two rows is added to its height."""
    rows = max(-(-len(labels) // _columns(labels)) for labels in panels.values())
    return _PANEL_INCHES * len(panels), 2.9 + 0.16 * max(0, rows - 2)


def _columns(labels: Collection[str]) -> int:
    """Return how many labels of a legend fit side by side."""
    widest = 0.45 + 0.065 * max(len(label) for label in labels)
    return max(1, min(3, int(0.9 * _PANEL_INCHES / widest)))


def _legend(axes: Axes) -> None:
    """Put the legend above the panel, where it covers nothing."""
    columns = _columns(axes.get_legend_handles_labels()[1])
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=columns, fontsize=8, columnspacing=1.2, handlelength=1.4
    )


def _row(figure: Figure, count: int) -> list[Axes]:
    found: Any = figure.subplots(1, count, squeeze=False)
    return list(found[0])


def _svg(figure: Figure, name: str, title: str) -> str:
    """Return the figure as an SVG element that scales, its ids prefixed by `name`, with a title for screen readers."""
    text = io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
    for colour, variable in _COLOURS.items():
        svg = svg.replace(colour, f"var({variable})")
    return re.sub(r"<svg([^>]*)>", rf'<svg\1 role="img"><title>{title}</title>', svg, count=1)
