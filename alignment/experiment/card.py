"""README.md of an exported model: what it is, how it was trained, what was measured, whom to cite."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from alignment.experiment.citations import papers_of
from alignment.experiment.record import without_secrets

# Sections of the config that say how a model was trained; the others say where and how it was watched.
SECTIONS = ("seed", "algorithm", "ref_strategy", "model", "data", "encoding", "cleaning", "rollout", "optimizer")
PACKAGES = ("torch", "transformers", "peft", "lightning", "bitsandbytes", "datasets")
# <owner>/<name>; a folder that is no run's own is known by its absolute path.
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
PIPELINES = {"language model": "text-generation", "scorer": "text-classification"}
# First lines of licences, for bases that have the text but no card.
LICENCES = {"Apache License": "apache-2.0", "MIT License": "mit"}

USE = {
    "language model": """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{place}")
model = AutoModelForCausalLM.from_pretrained("{place}")
messages = [{{"role": "user", "content": "What is 2 + 3?"}}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))""",
    "scorer": """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{place}")
model = AutoModelForSequenceClassification.from_pretrained("{place}")
# A text ends with the end token, without the line break that many templates put behind it.
texts = [tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\\n")]
inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
print(model(**inputs).logits[:, 0])""",
    "step scorer": """\
from transformers import AutoModelForTokenClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{place}")
model = AutoModelForTokenClassification.from_pretrained("{place}")
# Read at the last token of each step's separator: the probability of label 1 is that the step is right.""",
    "critic": """\
from transformers import AutoModelForTokenClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{place}")
model = AutoModelForTokenClassification.from_pretrained("{place}")
# The logit at a token is the value of the state after it: the reward still to come before the next one is drawn.""",
    "adapter": """\
from peft import PeftModel
from transformers import {imports}

base = {auto}.from_pretrained("{base}"{options})
model = PeftModel.from_pretrained(base, "{place}")""",
}
AUTO = {"language model": "AutoModelForCausalLM", "scorer": "AutoModelForSequenceClassification"}


@dataclass
class Facts:
    """All that a card says. kind: language model, scorer, step scorer, critic. base: name on the hub, or folder."""

    name: str
    kind: str
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    manifest: Mapping[str, Any]
    step: int | None
    dtype: str
    merged: bool
    base: str
    licence: str | None
    num_labels: int = 1
    notes: list[str] = field(default_factory=list)
    place: str = "path/to/this/folder"  # what to load it by

    @property
    def algorithm(self) -> str:
        return _class(self.config.get("algorithm"))

    @property
    def quantised(self) -> bool:
        return _class(self.config.get("strategy")) == "QLoRA"

    @property
    def base_on_hub(self) -> str | None:
        """Only such a name is one to the hub."""
        return self.base if HUB_NAME.fullmatch(self.base) else None


def model_card(facts: Facts) -> str:
    """The whole text: YAML between dashes, then Markdown."""
    front = yaml.safe_dump(_front(facts), sort_keys=False, allow_unicode=True, width=120)
    parts = [f"---\n{front}---", f"# {facts.name}", _about(facts), *_usage(facts), *_training(facts), *_results(facts)]
    if papers := papers_of(facts.config):
        text = "\n\n".join(paper.bibtex for paper in papers)
        parts += ["## Citations", f"```bibtex\n{text}\n```"]
    return "\n\n".join(parts) + "\n"


def _front(facts: Facts) -> dict[str, Any]:
    """What the hub reads. A key of which nothing is known is left out: the hub refuses empty ones."""
    found: dict[str, Any] = {"library_name": "transformers" if facts.merged else "peft"}
    found["pipeline_tag"] = PIPELINES.get(facts.kind, "token-classification")
    if facts.base_on_hub:
        found |= {"base_model": facts.base, "base_model_relation": "finetune" if facts.merged else "adapter"}
    if facts.licence:
        found["license"] = facts.licence
    tags = ["alignment", _tag(facts.algorithm), *([] if facts.kind == "language model" else [_tag(facts.kind)])]
    if facts.config.get("model", {}).get("adapter") == "lora":
        tags.append("qlora" if facts.quantised else "lora")
    found["tags"] = tags
    if datasets := sorted(set(_datasets(facts.config.get("data")))):
        found["datasets"] = datasets
    return found


def _datasets(node: Any) -> Iterator[str]:
    """Hub names of the data, of every source of a mixture."""
    if not isinstance(node, Mapping):
        return
    name = str(node.get("name"))
    if str(node.get("_target_")).startswith("alignment.data.hub.") and HUB_NAME.fullmatch(name):
        yield name
    for inner in (node.get("sources") or {}).values() if isinstance(node.get("sources"), Mapping) else ():
        yield from _datasets(inner)


def _about(facts: Facts) -> str:
    what = {"language model": "A language model", "scorer": "A reward model", "step scorer": "A process reward model"}
    article = what.get(facts.kind, "A critic (a value for every token)")
    words = f"{article}, trained with {facts.algorithm} from `{_without_folder(facts.base)}`"
    words += f", after {facts.step} optimizer steps" if facts.step is not None else ""
    words += f". {'Whole weights' if facts.merged else 'The adapter alone'}, in {facts.dtype}."
    return "\n".join([words, *facts.notes])


def _usage(facts: Facts) -> list[str]:
    if facts.merged:
        text = USE[facts.kind].format(place=facts.place)
    else:
        auto = AUTO.get(facts.kind, "AutoModelForTokenClassification")
        imports = f"{auto}, BitsAndBytesConfig" if facts.quantised else auto
        options = f", num_labels={facts.num_labels}" if facts.kind != "language model" else ""
        text = USE["adapter"].format(
            place=facts.place,
            base=_without_folder(facts.base),
            auto=auto,
            imports=imports,
            options=options + _in_4_bit(facts),
        )
    return ["## Use", f"```python\n{text}\n```"]


def _in_4_bit(facts: Facts) -> str:
    """The adapter was trained on rounded weights."""
    if not facts.quantised:
        return ""
    double = facts.config["strategy"].get("double_quant", True)
    settings = f'load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant={double}'
    return f", quantization_config=BitsAndBytesConfig({settings})"


def _training(facts: Facts) -> list[str]:
    """What it takes to train it again."""
    rows = [("algorithm", f"`{facts.config.get('algorithm', {}).get('_target_')}`")]
    rows += [("reference", f"`{_class(facts.config.get('ref_strategy'))}`")]
    rows += [("scored by", ", ".join(f"`{name}` ({w:g})" for name, w in _rewards(facts.config)) or "-")]
    for name, told in (facts.manifest.get("data") or {}).items():
        rows += [(f"data, {name}", str(told))] if isinstance(told, str) else []
    if commit := (facts.manifest.get("git") or {}).get("commit"):
        dirty = " with changes that were not committed" if facts.manifest["git"].get("dirty") else ""
        rows += [("code", f"commit `{commit}`{dirty}")]
    installed = facts.manifest.get("packages") or {}
    rows += [("packages", ", ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed) or "-")]
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
    shown = {name: shareable(facts.config[name]) for name in SECTIONS if name in facts.config}
    text = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=120).rstrip()
    return ["## Training", table, f"<details><summary>Config</summary>\n\n```yaml\n{text}\n```\n\n</details>"]


def _rewards(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, node in (config.get("reward") or {}).items():
        yield name, float(node.get("weight", 1.0))


def _results(facts: Facts) -> list[str]:
    """Held-out metrics before and after, then the last ones of training."""
    numbers = {name: value for name, value in facts.summary.items() if _finite(value)}
    names = sorted({name.partition("/")[2] for name in numbers if name.startswith(("before/", "val/"))})
    others = {name: value for name, value in sorted(numbers.items()) if name.startswith(("train/", "rollout/"))}
    if not names and not others:
        return []
    lines = ["| held out | before | after |", "|---|---|---|"] if names else []
    for name in names:
        cells = [numbers.get(f"{phase}/{name}") for phase in ("before", "val")]
        lines.append(f"| {name} | {' | '.join('-' if value is None else f'{value:.4g}' for value in cells)} |")
    if others:
        last = "\n".join(["| last step | |", "|---|---|", *(f"| {name} | {v:.4g} |" for name, v in others.items())])
        lines.append(f"\n<details><summary>Training metrics</summary>\n\n{last}\n\n</details>")
    return ["## Results", "\n".join(lines).lstrip("\n")]


def shareable(value: Any, key: str = "") -> Any:
    """A part of a config without keys, passwords and the folders of the machine it ran on."""
    if isinstance(value, Mapping):
        return {name: shareable(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [shareable(inner, key) for inner in value]
    if not isinstance(value, str):
        return value
    masked = without_secrets([f"{key}={value}"])[0].partition("=")[2] if key else value
    return _without_folder(masked)


def _without_folder(text: str) -> str:
    """The last part of a path that only this machine has."""
    return Path(text).name if text.startswith(("/", "~")) and "\n" not in text else text


def licence_of(folder: Path) -> str | None:
    """What the card of a model in `folder` says, or the first lines of its licence; None where neither is there."""
    card = folder / "README.md"
    match = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8"), re.DOTALL) if card.is_file() else None
    front = yaml.safe_load(match[1]) if match else None
    if isinstance(front, dict) and isinstance(front.get("license"), str):
        return front["license"]
    for file in sorted(folder.glob("LICENSE*")):
        head = file.read_text(encoding="utf-8", errors="replace")[:400]
        if found := next((name for words, name in LICENCES.items() if words in head), None):
            return found
    return None


def _class(node: Any) -> str:
    return str((node or {}).get("_target_", "")).rpartition(".")[2]


def _tag(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower())


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
