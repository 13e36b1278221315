"""Tables of a report: Markdown and LaTeX (booktabs), and the tidy ones as CSV and Parquet."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pandas as pd

from alignment.experiment.runs import Table
from alignment.experiment.settings import Comparison, Setting

LATEX = {"\\": r"\textbackslash{}", **{c: f"\\{c}" for c in "&%$#_{}"}, "~": r"\textasciitilde{}", "^": r"\^{}"}
MINUS = "\N{MINUS SIGN}"


def write_tables(comparison: Comparison, curves: Table, folder: Path) -> list[Path]:
    """runs and curves (.csv, .parquet), settings.csv, table.md and table.tex. Returns what was written."""
    written = []
    for name, frame in (("runs", comparison.table), ("curves", curves)):
        frame.to_csv(folder / f"{name}.csv", index=False)
        _same_types(frame).to_parquet(folder / f"{name}.parquet", index=False)
        written += [folder / f"{name}.csv", folder / f"{name}.parquet"]
    settings_frame(comparison).to_csv(folder / "settings.csv", index=False)
    (folder / "table.md").write_text(markdown(comparison), encoding="utf-8")
    (folder / "table.tex").write_text(latex(comparison), encoding="utf-8")
    return [*written, folder / "settings.csv", folder / "table.md", folder / "table.tex"]


def _same_types(frame: Table) -> Table:
    """Parquet columns have one type: those with words and numbers become text."""
    mixed = {
        name: frame[name].map(lambda value: None if value is None or value != value else str(value))
        for name in frame
        if frame[name].dtype == object and len({type(v) for v in frame[name] if v is not None and v == v}) > 1
    }
    return frame.assign(**mixed)


def settings_frame(comparison: Comparison) -> Table:
    """One row per setting, numbers unrounded."""
    rows = []
    for setting in comparison.settings:
        row = dict(setting.levels) | {"num_seeds": setting.num_seeds, "mean": setting.estimate.value}
        row |= {"low": setting.estimate.low, "high": setting.estimate.high}
        if setting.difference is not None:
            d = setting.difference
            row |= {"difference": d.value, "difference_low": d.low, "difference_high": d.high}
            row |= {"num_pairs": d.n, "p": d.p, "p_holm": d.p_corrected}
        rows.append(row)
    return pd.DataFrame(rows)


def cells(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the printed table."""
    within = f"{100 * comparison.level:g}% interval"
    header = [*comparison.factors, "seeds", comparison.metric, within, "difference", within, "p (Holm)"]
    return header, [_cells(setting, comparison) for setting in comparison.settings]


def _cells(setting: Setting, comparison: Comparison) -> list[str]:
    levels = [_level(setting.levels.get(name)) for name in comparison.factors]
    estimate, d = setting.estimate, setting.difference
    row = [*levels, str(setting.num_seeds), number(estimate.value), interval(estimate.low, estimate.high)]
    if d is None:
        return [*row, "baseline", "", ""]
    return [*row, number(d.value, sign=True), interval(d.low, d.high, sign=True), p_value(d.p_corrected)]


def _level(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def number(value: float, *, sign: bool = False) -> str:
    """Four decimals, or three digits for what is smaller or larger; empty for NaN."""
    if math.isnan(value):
        return ""
    text = f"{value:+.4f}" if sign else f"{value:.4f}"
    if value and not 1e-3 <= abs(value) < 1e4:
        text = f"{value:+.3g}" if sign else f"{value:.3g}"
    return text.replace("-", MINUS)


def interval(low: float, high: float, *, sign: bool = False) -> str:
    return "" if math.isnan(low) else f"[{number(low, sign=sign)}, {number(high, sign=sign)}]"


def p_value(p: float) -> str:
    return "" if math.isnan(p) else "< 0.001" if p < 1e-3 else f"{p:.3f}"


def markdown(comparison: Comparison) -> str:
    """A table for a README, its caption and cautions below."""
    header, rows = cells(comparison)
    numeric = len(comparison.factors)
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("|" + "|".join("---" if place < numeric else "---:" for place in range(len(header))) + "|")
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([*lines, "", caption(comparison), *([comparison.caution] if comparison.caution else [])]) + "\n"


def latex(comparison: Comparison) -> str:
    """The same with booktabs."""
    header, rows = cells(comparison)
    columns = "l" * len(comparison.factors) + "r" * (len(header) - len(comparison.factors))
    body = [" & ".join(map(_tex, row)) + r" \\" for row in rows]
    return "\n".join(
        [
            "% needs \\usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_tex(caption(comparison))}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            " & ".join(map(_tex, header)) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _tex(text: str) -> str:
    escaped = "".join(LATEX.get(character, character) for character in text)
    return re.sub(f"{MINUS}([0-9])", r"$-$\1", escaped).replace("<", "$<$")


def caption(comparison: Comparison) -> str:
    """How the numbers were made."""
    direction = "higher" if comparison.higher_is_better else "lower"
    overall = comparison.overall
    comparisons = max(len(comparison.settings) - 1, 0)
    return (
        f"Mean of {comparison.metric} over seeds ({direction} is better) with an expanded percentile bootstrap "
        f"interval (level {comparison.level:g}); difference to the baseline ({comparison.baseline}) on matched seeds, "
        f"p of the paired t-test corrected for {comparisons} comparison(s) (Holm). Interquartile mean over all runs: "
        f"{number(overall.value)} {interval(overall.low, overall.high)}."
    )
