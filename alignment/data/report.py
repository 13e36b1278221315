"""What a set of examples is like, in numbers, and which of them promise trouble. Pure functions, one pass over rows.

Memory does not grow with the rows beyond eight bytes each: lengths are counted, not kept.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from alignment.batch import Example

Numbers = dict[str, Any]

QUANTILES = {"min": 0.0, "p05": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}
NUM_BINS = 40
# Names of the completions of an example where their place means something; else each is a "completion".
SIDES: dict[str, tuple[str, ...]] = {"pairs": ("chosen", "rejected")}
# Columns that say where a row is from, in the order in which they are looked for.
ORIGINS = ("source", "dataset", "data_source", "subset")
MAX_ORIGINS = 50

# From here on a number is worth a warning.
CUT_SHARE = 0.05
DUPLICATE_SHARE = 0.1
CONFLICT_SHARE = 0.01
LONGER_SHARE = 0.7  # of pairs whose chosen answer is the longer (or the shorter) one
MIN_PAIRS = 50  # of fewer, shares say little
LABEL_RATIO = 4.0  # KTO asks for weights that bring the classes within 4/3 of each other (2402.01306, section 4.2)
FEW_HELDOUT = 20  # an accuracy of that many has a standard error of 0.11

LEARNED, UNSEEN, OFF = "\033[32m", "\033[2m", "\033[0m"
MARKS = "[[", "]]"


def data_report(sets: Mapping[str, Sequence[Example]], summaries: Mapping[str, Numbers]) -> Numbers:
    """Everything of `sets` (train, heldout, heldout_prompts) and their `encode` summaries that fits into a file."""
    numbers = {name: summaries[name] | survey(examples, summaries[name]["form"]) for name, examples in sets.items()}
    for part in numbers.values():
        part["identical_pairs"] = part["dropped"].get("two completions are the same tokens", 0)
    form = numbers["train"]["form"]
    return {"form": form, "sets": numbers, "warnings": pitfalls(form, numbers)}


# ---- numbers -------------------------------------------------------------------------------------------------------
class Lengths:
    """How often which length occurs."""

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        self.counts = Counter(lengths)

    def quantiles(self) -> Numbers:
        """QUANTILES (each a length that occurs, the lower of two neighbours) and the mean; {} without any."""
        total = self.counts.total()
        if not total:
            return {}
        ordered, places = sorted(self.counts.items()), {name: int(q * (total - 1)) for name, q in QUANTILES.items()}
        found: Numbers = {}
        for name, place in places.items():
            for length, count in ordered:
                if place < count:
                    found[name] = length
                    break
                place -= count
        return found | {"mean": sum(length * count for length, count in ordered) / total}

    def histogram(self) -> Numbers:
        """At most NUM_BINS bins of equal width from 0 on: their width, and how many lengths are in each."""
        width = max(self.counts, default=0) // NUM_BINS + 1
        bins = Counter(dict.fromkeys(range(max(self.counts, default=0) // width + 1), 0))
        for length, count in self.counts.items():
            bins[length // width] += count
        return {"width": width, "counts": [bins[place] for place in sorted(bins)]}


def survey(examples: Iterable[Example], form: str) -> Numbers:
    """Of examples as they are learned from: lengths in tokens (cut ones as they are now), duplicates, balance.

    tokens, histogram: prompt, and completion or chosen and rejected -> quantiles, counts. loss_tokens: that count in
    the loss. duplicates: examples that repeat the tokens of an earlier one. chosen_longer, chosen_shorter: shares of
    pairs. labels: how many of each. sources: of rows that name one.
    """
    lengths: dict[str, Lengths] = {}
    content, labels, origins, longer = array("q"), Counter[str](), Counter[str](), Counter[str]()
    count = loss_tokens = 0
    for example in examples:
        count += 1
        loss_tokens += sum(example.loss_tokens)
        for name, ids in _parts(example, form):
            lengths.setdefault(name, Lengths()).counts[len(ids)] += 1
        content.append(hash((tuple(example.prompt_ids), *map(tuple, example.completions))))
        labels.update(_labels(example.columns, form))
        origins.update(_origin(example.columns))
        if form == "pairs":
            chosen, rejected = map(len, example.completions)
            longer["chosen_longer"] += chosen > rejected
            longer["chosen_shorter"] += chosen < rejected
    found: Numbers = {
        "examples": count,
        "loss_tokens": loss_tokens,
        "tokens": {name: part.quantiles() for name, part in lengths.items()},
        "histogram": {name: part.histogram() for name, part in lengths.items()},
        "duplicates": count - len(torch.frombuffer(content, dtype=torch.int64).unique()) if count else 0,
    }
    found |= {name: longer[name] / count for name in longer if count}
    found |= {"labels": dict(labels)} if labels else {}
    return found | ({"sources": dict(origins.most_common(MAX_ORIGINS))} if origins else {})


def _parts(example: Example, form: str) -> Iterator[tuple[str, Sequence[int]]]:
    yield "prompt", example.prompt_ids
    names = SIDES.get(form, ("completion",) * len(example.completions))
    yield from zip(names, example.completions, strict=True)


def _labels(columns: Mapping[str, Any], form: str) -> list[str]:
    labels = {"unpaired": [columns.get("label")], "stepwise": columns.get("labels") or []}.get(form, [])
    return [str(bool(label)).lower() for label in labels if label is not None]


def _origin(columns: Mapping[str, Any]) -> list[str]:
    return [columns[name] for name in ORIGINS if isinstance(columns.get(name), str)][:1]


# ---- what may go wrong ---------------------------------------------------------------------------------------------
def pitfalls(form: str, sets: Mapping[str, Numbers]) -> list[str]:
    """One sentence for each number of the training and held-out sets that promises trouble, with what to do."""
    train = sets.get("train", {})
    found = [*_cut(train), *_repeated(train), *_conflicting(train)]
    found += {"pairs": _length_bias, "unpaired": _imbalance}.get(form, lambda _: [])(train)
    return found + _few_heldout(sets)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _cut(train: Numbers) -> list[str]:
    """Cut completions learn no end; cut prompts may lose the question."""
    found, examples = [], train.get("examples", 0)
    completions = sum(sum(part["counts"]) for name, part in train.get("histogram", {}).items() if name != "prompt")
    for name, whole in (("completions", completions), ("prompts", examples)):
        share = _share(train.get(f"cut_{name}", 0), whole)
        if share > CUT_SHARE:
            why = "a cut one learns no end" if name == "completions" else "what is asked may be gone"
            key = f"max_{name.removesuffix('s')}_tokens"
            p95 = train[f"{name.removesuffix('s')}_tokens"]["p95"]  # of whole ones
            found.append(f"{share:.0%} of the {name} are cut, {why}: encoding.{key}={p95} would cut one in twenty")
    return found


def _repeated(train: Numbers) -> list[str]:
    dropped = train.get("dropped", {}).get("the same as an earlier row", 0)
    share = _share(dropped + train.get("duplicates", 0), train.get("rows", 0))
    if share <= DUPLICATE_SHARE:
        return []
    kept = train.get("duplicates", 0)
    rest = f", {kept} of them are still there" if kept else ", they were left out"
    return [f"{share:.0%} of the rows repeat earlier ones{rest}: check how the data was put together"]


def _conflicting(train: Numbers) -> list[str]:
    share = _share(train.get("conflicts", 0), train.get("rows", 0))
    what = f"{share:.0%} of the questions are answered in two ways that exclude each other: clean the labels"
    return [what] if share > CONFLICT_SHARE else []


def _length_bias(train: Numbers) -> list[str]:
    if train.get("examples", 0) < MIN_PAIRS:
        return []
    for name, word in (("chosen_longer", "longer"), ("chosen_shorter", "shorter")):
        if train.get(name, 0.0) >= LONGER_SHARE:
            means = {side: train["tokens"][side]["mean"] for side in SIDES["pairs"]}
            what = f"in {train[name]:.0%} of the pairs the chosen answer is the {word} one"
            sizes = f"(means of {means['chosen']:.0f} and {means['rejected']:.0f} tokens)"
            return [f"{what} {sizes}, so length may be what is learned: algorithm=ld_dpo or simpo, or balanced pairs"]
    return []


def _imbalance(train: Numbers) -> list[str]:
    good, bad = (train.get("labels", {}).get(name, 0) for name in ("true", "false"))
    if not good or not bad:
        return (
            [f"all {good + bad} labels are {'true' if good else 'false'}: nothing is told apart"] if good + bad else []
        )
    if max(good, bad) < LABEL_RATIO * min(good, bad):
        return []
    key, weight = ("undesirable_weight", good / bad) if good > bad else ("desirable_weight", bad / good)
    return [
        f"{good} completions are desirable and {bad} are not: KTO weighs them alike with algorithm.{key}={weight:.3g}"
    ]


def _few_heldout(sets: Mapping[str, Numbers]) -> list[str]:
    heldout = {name: numbers["examples"] for name, numbers in sets.items() if name != "train"}
    if not heldout:
        rows = max(1, round(sets["train"]["examples"] / 10))
        return [
            f"nothing is held out, so nothing will be measured on unseen rows: data.heldout={rows} is a tenth of them"
        ]
    few = {name: count for name, count in heldout.items() if count < FEW_HELDOUT}
    return [
        f"{count} {name.replace('_', ' ')} examples are few: a share measured on them has a standard error of up to "
        f"{0.5 / count**0.5:.2f}: data.heldout=<more>"
        for name, count in few.items()
        if count
    ]


# ---- one example ---------------------------------------------------------------------------------------------------
def shown_example(example: Example, form: str, tokenizer: PreTrainedTokenizerBase, *, colour: bool) -> str:
    """The example as text, what counts in the loss in green, the rest dim; without colour between [[ and ]]."""
    masks = example.loss_masks or [[True] * len(ids) for ids in example.completions]
    blocks = [f"prompt ({len(example.prompt_ids)} tokens, none learned):"]
    blocks.append(_masked(example.prompt_ids, [False] * len(example.prompt_ids), tokenizer, colour))
    names = [name for name, _ in _parts(example, form)][1:]
    for name, ids, mask in zip(names, example.completions, masks, strict=True):
        blocks.append(f"{name} ({len(ids)} tokens, {sum(mask)} learned):")
        blocks.append(_masked(ids, mask, tokenizer, colour))
    return "\n".join(blocks)


def _masked(ids: Sequence[int], mask: Sequence[bool], tokenizer: PreTrainedTokenizerBase, colour: bool) -> str:
    learned, unseen = ((LEARNED, OFF), (UNSEEN, OFF)) if colour else (MARKS, ("", ""))
    runs = ((key, [i for i, _ in run]) for key, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]))
    pieces = []
    for is_learned, run in runs:
        text = tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        before, after = learned if is_learned else unseen
        pieces.append(f"{before}{_printable(str(text))}{after}")
    return "".join(pieces)


def _printable(text: str) -> str:
    """Without the control characters with which data could take hold of a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


# ---- the report as text --------------------------------------------------------------------------------------------
def as_text(report: Numbers) -> str:
    """The report's numbers and warnings, a block for each set."""
    blocks = [_block(name, numbers) for name, numbers in report["sets"].items()]
    if report["warnings"]:
        blocks.append("\n".join(["look at:", *(f"  - {warning}" for warning in report["warnings"])]))
    return "\n".join(blocks)


def _block(name: str, numbers: Numbers) -> str:
    lines = [f"{name.replace('_', ' ')}: {numbers['examples']} examples of {numbers['rows']} rows"]
    lines += [f"  dropped: {count} ({reason})" for reason, count in numbers["dropped"].items()]
    for part, values in numbers["tokens"].items():
        spread = ", ".join(f"{key} {value:.1f}" if key == "mean" else f"{key} {value}" for key, value in values.items())
        lines.append(f"  {part} tokens: {spread}")
    lines.append(f"  cut: {numbers['cut_prompts']} prompts, {numbers['cut_completions']} completions")
    lines.append(f"  duplicates: {numbers['duplicates']}; answered in two ways: {numbers['conflicts']}")
    if "chosen_longer" in numbers:
        shares = f"longer in {numbers['chosen_longer']:.1%}, shorter in {numbers['chosen_shorter']:.1%}"
        lines.append(f"  chosen: {shares} of the pairs; identical pairs: {numbers['identical_pairs']}")
    for key in ("labels", "sources"):
        if key in numbers:
            lines.append(f"  {key}: " + ", ".join(f"{value} {count}" for value, count in numbers[key].items()))
    return "\n".join(lines)
