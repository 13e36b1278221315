"""Which algorithm goes with which reference strategy: the table of docs/reference.md, from what the classes declare.

    python scripts/reference_grid.py            # writes it anew
    python scripts/reference_grid.py --check    # says whether the printed one is current

Asked of the rules that refuse a run (`alignment/rules.py`), so that the page cannot say anything else than the program.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from alignment import rules  # noqa: E402

CONF, PAGE = ROOT / "conf", ROOT / "docs" / "reference.md"
START, END = "<!-- made by scripts/reference_grid.py -->", "<!-- end -->"
MARKS = "abcdefghij"


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def node(group: str, name: str) -> dict[str, Any]:
    """An option's own keys over those of the options it extends."""
    own = yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))
    bases = [re.sub(r"@.*", "", base) for base in own.pop("defaults", []) if isinstance(base, str) and base != "_self_"]
    merged: dict[str, Any] = {}
    for base in bases:
        merged |= node(group, base)
    return merged | own


def refusal(algorithm: dict[str, Any], strategy: dict[str, Any], adapter: str = "lora") -> str | None:
    """Why the two do not go together, without the advice; None where they do."""
    cfg = {"algorithm": algorithm, "ref_strategy": strategy, "model": {"adapter": adapter}}
    name = rules.algorithm_name(cfg)
    for message in rules.problems(cfg):
        if message.startswith("ref_strategy: "):
            reason = message.removeprefix("ref_strategy: ").split(": type ")[0]
            return re.sub(rf"\b{name}\b", "it", reason)
    return None


def table() -> str:
    """The grid in Markdown, and under it the reasons."""
    strategies, reasons = options("ref_strategy"), list[str]()

    def mark(reason: str) -> str:
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({MARKS[reasons.index(reason)]})"

    def cell(algorithm: dict[str, Any], strategy: dict[str, Any]) -> str:
        reason = refusal(algorithm, strategy)
        if reason is None:
            return "yes"
        if needs(algorithm) == "if beta > 0":
            for beta, words in ((0.0, "with `algorithm.beta=0`"), (0.1, "with `algorithm.beta` > 0")):
                if refusal(algorithm | {"beta": beta}, strategy) is None:
                    return words
        return mark(reason)

    lines = [f"| `algorithm=` | reference | {' | '.join(f'`{name}`' for name in strategies)} |"]
    lines.append("|---" * (len(strategies) + 2) + "|")
    nodes = {name: node("ref_strategy", name) for name in strategies}
    for name in options("algorithm"):
        algorithm = node("algorithm", name)
        cells = [cell(algorithm, nodes[strategy]) for strategy in strategies]
        lines.append(f"| `{name}` | {needs(algorithm)} | {' | '.join(cells)} |")
    lines += ["", *(f"- ({MARKS[i]}) {reason}" for i, reason in enumerate(reasons))]
    return "\n".join([*lines, *whole_weights(nodes)])


def needs(algorithm: dict[str, Any]) -> str:
    need = rules.says({"algorithm": algorithm}, "algorithm", "reference_need", "optional")
    return {"required": "always", "beta": "if beta > 0", "optional": "never"}[need]


def whole_weights(strategies: dict[str, dict[str, Any]]) -> list[str]:
    """What changes where all weights are trained."""
    dpo = node("algorithm", "dpo")
    found = {
        name: refusal(dpo, strategy, "none") for name, strategy in strategies.items() if not refusal(dpo, strategy)
    }
    return [f"- `{name}` with `model.adapter=none`: {reason}" for name, reason in found.items() if reason]


def page_with(grid: str) -> str:
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    return f"{before}{START}\n\n{grid}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    fresh = page_with(table())
    if "--check" in sys.argv[1:]:
        sys.exit(fresh != PAGE.read_text(encoding="utf-8") and f"{PAGE} is old: type python scripts/reference_grid.py")
    PAGE.write_text(fresh, encoding="utf-8")
