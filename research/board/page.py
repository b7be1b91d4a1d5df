"""The board as one HTML file without any other file: plots, tables and filters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from statistics import fmean, median
from string import Template

from research.board.rows import MIB, MS, BoardRow, BoardSheet, LeftOut
from trappm.profiler.errors import InputError
from trappm.profiler.records import number_text

TEMPLATE = Path(__file__).with_suffix(".html")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 520, 460, 58, 44, 30
"""Size and margins of a plot in pixels."""
BAND = 0.1
FEW = 3
"""Least number of rows of a kind of model in the table of kinds."""
DASH = "–"

Shown = tuple[BoardSheet, BoardRow]


def page(sheets: Sequence[BoardSheet], left_out: Sequence[LeftOut], made: str) -> str:
    """Return the page.

    Args:
        sheets: Sheets to show.
        left_out: Sheets that are not shown.
        made: What made the page: version, snapshot and time.

    Raises:
        InputError: No sheet has a row.
    """
    shown = [(sheet, row) for sheet in sheets for row in sheet.rows]
    if not shown:
        raise InputError("no row may be shown; see: python -m research data")
    held_out = [row.error for sheet, row in shown if not sheet.fitted]
    cards = Counter(row.card for _, row in shown)
    kinds = Counter(row.kind for _, row in shown)
    headline = (
        f"The page has {len(shown):,} public rows of {len(cards)} cards, {len(kinds)} kinds of "
        f"models and {len(sheets)} sources."
    )
    if held_out:
        headline = (
            f"On {len(held_out):,} public rows that were held out, half of the errors are below "
            f"<b>{_percent(held_out)} %</b>. {headline}"
        )
    about = (
        "Measured against predicted, for published measurements whose licence allows to show "
        "them, and for labels that users sent in. The formulas were developed on some of these "
        "sheets, so errors of held-out rows are somewhat optimistic."
    )
    plots = "".join(
        _plot(title, [pair for pair in shown if pair[1].unit == unit], unit)
        for title, unit in (("Time", MS), ("Memory", MIB))
    )
    return Template(TEMPLATE.read_text()).substitute(
        headline=headline,
        about=about,
        cards=_options("All cards", cards),
        kinds=_options("All kinds", kinds),
        count=f"{len(shown):,}",
        plots=plots,
        by_card=_by_card(sheets),
        by_kind=_by_kind(shown, kinds),
        sheets=_sources(sheets),
        left_out="; ".join(f"{escape(x.title)} ({escape(x.reason)})" for x in left_out) or DASH,
        made=escape(made),
    )


def _percent(errors: Iterable[float]) -> str:
    return number_text(median(errors), 2)


def _options(all_: str, counts: Counter[str]) -> str:
    rows = [f'<option value="">{all_}</option>']
    rows += [
        f'<option value="{escape(name)}">{escape(name)} ({counts[name]:,})</option>'
        for name in sorted(counts, key=str.lower)
    ]
    return "".join(rows)


def _plot(title: str, shown: Sequence[Shown], unit: str) -> str:
    """Return a plot of measured against predicted values on logarithmic axes."""
    if not shown:
        return ""
    values = [x for _, row in shown for x in (row.measured, row.predicted)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    width, height = WIDTH - LEFT - 12, HEIGHT - BOTTOM - TOP

    def across(value: float) -> float:
        return LEFT + width * (math.log10(value) - low) / (high - low)

    def up(value: float) -> float:
        return TOP + height * (1 - (math.log10(value) - low) / (high - low))

    first, last = 10.0**low, 10.0**high
    band = " ".join(
        f"{across(x):.1f},{up(min(max(y, first), last)):.1f}"
        for x, y in (
            (first, first), (first, first * (1 + BAND)), (last / (1 + BAND), last),
            (last, last), (last, last * (1 - BAND)), (first / (1 - BAND), first),
        )
    )  # fmt: skip
    parts = [f'<polygon points="{band}" fill="#0b5cad" fill-opacity=".08"/>']
    for power in range(low, high + 1):
        x, y, name = across(10.0**power), up(10.0**power), f"{10.0**power:,g}"
        parts.append(
            f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}M{LEFT} {y:.1f}H{LEFT + width}" '
            'stroke="#e6ebf0"/>'
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" '
            f'text-anchor="{"end" if power == high else "middle"}">{name}</text>'
            f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{name}</text>'
        )
    parts.append(
        f'<path d="M{across(first):.1f} {up(first):.1f}L{across(last):.1f} {up(last):.1f}" '
        'stroke="#9aa8b5"/>'
        f'<text x="{LEFT + width / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">measured, {unit}'
        f'</text><text transform="translate(13 {TOP + height / 2:.0f}) rotate(-90)" '
        f'text-anchor="middle">predicted, {unit}</text>'
        f'<text x="{LEFT}" y="18" style="font-weight:600;fill:#1c2733">{title}</text>'
    )
    for sheet, row in shown:
        fitted = ' class="fitted"' if sheet.fitted else ""
        text = (
            f"{row.model} on {row.card}: {row.quantity} {number_text(row.measured, 3)} {unit} "
            f"measured, {number_text(row.predicted, 3)} predicted ({', '.join(sheet.sources)})"
        )
        parts.append(
            f'<circle cx="{across(row.measured):.1f}" cy="{up(row.predicted):.1f}" r="3"{fitted} '
            f'data-c="{escape(row.card)}" data-k="{escape(row.kind)}">'
            f"<title>{escape(text)}</title></circle>"
        )
    return (
        f'<div class="panel"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{title}: measured against predicted">{"".join(parts)}</svg></div>'
    )


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Return a table; the first column is text, as are those whose head begins with a space.

    Args:
        heads: Heads of the columns.
        rows: Attributes of each row, and its cells in HTML.
    """
    marks = ["" if head.startswith(" ") else ' class="n"' for head in heads]
    lines = ["".join(f"<th{m}>{h.strip()}</th>" for h, m in zip(heads, marks, strict=True))]
    body = [
        f"<tr{attributes}>"
        + "".join(f"<td{m}>{cell}</td>" for cell, m in zip(cells, marks, strict=True))
        + "</tr>"
        for attributes, cells in rows
    ]
    return f"<table><thead><tr>{lines[0]}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def _errors(rows: Sequence[BoardRow]) -> list[str]:
    """Return the number of rows, mean and median error, and the share inside the intervals."""
    bounded = [row for row in rows if not math.isnan(row.low)]
    inside = [100 * (row.low <= row.measured <= row.high) for row in bounded]
    errors = [row.error for row in rows]
    return [
        f"{len(rows):,}",
        f"{fmean(errors):.1f}",
        f"{median(errors):.1f}",
        f"{fmean(inside):.0f}" if inside else DASH,
    ]


def _peers(rows: Sequence[BoardRow]) -> str:
    """Return the mean errors of the peers, and in brackets that of TraPPM on the same rows."""
    texts: dict[str, list[str]] = {}
    for name in dict.fromkeys(peer for row in rows for peer in row.peers):
        common = [row for row in rows if name in row.peers]
        theirs = fmean(100 * abs(row.peers[name] / row.measured - 1) for row in common)
        ours = fmean(row.error for row in common)
        texts.setdefault(f"{ours:.1f}", []).append(f"{escape(name)} {theirs:.1f}")
    return "; ".join(f"{', '.join(names)} ({ours})" for ours, names in texts.items()) or DASH


def _by_card(sheets: Sequence[BoardSheet]) -> str:
    groups: dict[tuple[str, str, str], list[Shown]] = {}
    for sheet in sheets:
        for row in sheet.rows:
            groups.setdefault((row.card, row.quantity, sheet.title), []).append((sheet, row))
    lines = []
    for (card, quantity, _), shown in sorted(groups.items(), key=lambda item: item[0]):
        sheet, rows = shown[0][0], [row for _, row in shown]
        spread = DASH if math.isnan(sheet.spread) else f"{sheet.spread:.1f}"
        seen = '<span class="dot">fitted</span>' if sheet.fitted else "held out"
        cells = [
            f"<b>{escape(card)}</b>", escape(quantity), *_errors(rows), spread, _peers(rows),
            _linked_all(sheet.sources), seen,
        ]  # fmt: skip
        lines.append((f' data-c="{escape(card)}"', cells))
    heads = (
        " Card", " Quantity", "Rows", "Mean, %", "Median, %", "Inside 90 %", "Spread, %",
        " Peers, mean % (TraPPM)", " Measured by", " Rows",
    )  # fmt: skip
    return _table(heads, lines)


def _by_kind(shown: Sequence[Shown], kinds: Counter[str]) -> str:
    lines = []
    for kind, count in kinds.most_common():
        rows = [row for _, row in shown if row.kind == kind]
        cards = ", ".join(sorted({row.card for row in rows}))
        if count >= FEW:
            cells = [escape(kind), *_errors(rows), escape(cards)]
            lines.append((f' data-k="{escape(kind)}"', cells))
    heads = (" Kind", "Rows", "Mean, %", "Median, %", "Inside 90 %", " Cards")
    return _table(heads, lines)


def _sources(sheets: Sequence[BoardSheet]) -> str:
    lines = []
    for sheet in sheets:
        notes = [sheet.note, f"fitted to these rows: {sheet.fitted}" if sheet.fitted else ""]
        cells = [
            escape(sheet.title), _linked_all(sheet.sources), escape(sheet.licence),
            f"{len(sheet.rows):,}", f"{sheet.total:,}",
            escape("; ".join(filter(None, notes))) or DASH,
        ]  # fmt: skip
        lines.append(("", cells))
    heads = (" Sheet", " Measured by", " Licence", "Shown", "Of", " How")
    return _table(heads, lines)


def _linked_all(sources: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(map(_linked, sources)))


def _linked(source: str) -> str:
    text = escape(source)
    if not source.startswith("https://"):
        return text
    name = "/".join(source.split("/")[3:5])
    return f'<a href="{text}" rel="noreferrer">{escape(name)}</a>'
