"""Over a hundred kinds of verifiable tasks, made by the reasoning-gym package."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar

from alignment.data.messages import turn
from alignment.data.schema import Form
from alignment.errors import UserError

# Entry i of a dataset with seed s is entry i - 1 of the one with seed s + 1: neighbouring seeds must lie far apart.
SEED_STRIDE = 1_000_003
# How many other entries' answers are tried as a wrong answer for an entry.
NUM_TRIES = 50


class ReasoningGym:
    """One task of reasoning-gym, by the name in its gallery.

    config: keys of the task's own configuration (its size and seed are set here).
    num_train, num_heldout: different questions; the held-out ones are the first that come, so that they stay the same
        when num_train changes.
    seed: which questions; not the run's seed, so that runs with other seeds are comparable.

    Every row has `prompt`, `answer`, `task` and `entry`: what `score_answer(answer, entry)` of the task scores with.
    prompts can always be had. demonstrations need an answer that the task itself scores 1; pairs, ranked lists and
    unpaired rows also answers of other entries that it scores lower.
    """

    forms: ClassVar[tuple[str, ...]] = ("prompts", "demonstrations", "pairs", "unpaired", "ranked")

    def __init__(
        self,
        *,
        task: str,
        config: dict[str, Any] | None = None,
        num_train: int = 1000,
        num_heldout: int = 100,
        seed: int = 0,
    ) -> None:
        self.task, self.config, self.seed = task, dict(config or {}), seed
        self.num_train, self.num_heldout = num_train, num_heldout

    def load(self, form: Form) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(train rows, held-out rows) without a question in common. UserError where the task cannot serve the form.

        unpaired: a right and a wrong answer to each question, as two rows.
        ranked: the right answer and two wrong ones, the one that the task scores higher first; all lists have three.
        """
        if form not in self.forms:
            raise UserError(
                f"data: reasoning_gym has {', '.join(self.forms)}, not {form}: type data=jsonl data.path=<file>"
            )
        dataset, entries = self._entries(self.num_heldout + self.num_train)
        rows = [self._rows(dataset, entries, i, form) for i in range(len(entries))]
        parts = rows[: self.num_heldout], rows[self.num_heldout :]
        heldout, train = ([row for of_entry in part for row in of_entry] for part in parts)
        return train, heldout

    def _entries(self, count: int) -> tuple[Any, list[dict[str, Any]]]:
        """The dataset and its first `count` entries with different questions."""
        tries = 10 * count + 100
        dataset = self._dataset(tries)
        entries: dict[str, dict[str, Any]] = {}
        for i in range(tries):
            entry = dataset[i]
            entries.setdefault(entry["question"], entry)
            if len(entries) == count:
                return dataset, list(entries.values())
        raise UserError(
            f"data.num_train: {self.task} gave {len(entries)} different questions in {tries} tries, {count} are "
            f"wanted: type data.num_train={max(1, len(entries) - self.num_heldout)}, or another data.config"
        )

    def _dataset(self, size: int) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self.task not in DATASETS:
            near = difflib.get_close_matches(self.task, DATASETS, n=5, cutoff=0.5) or sorted(DATASETS)
            raise UserError(f"data.task: reasoning-gym has no {self.task!r}: type data.task=<one of {', '.join(near)}>")
        taken = {"size", "seed"} & self.config.keys()
        if taken:
            raise UserError(
                f"data.config.{min(taken)}: follows from other keys: type data.num_train=<n> or data.seed=<n>"
            )
        fields = set(DATASETS[self.task][1].__dataclass_fields__) - {"size", "seed"}
        unknown = sorted(self.config.keys() - fields)
        if unknown:
            known = ", ".join(sorted(fields)) or "no key"
            raise UserError(f"data.config.{unknown[0]}: {self.task} has no such key: use one of {known}")
        try:
            return reasoning_gym.create_dataset(
                self.task, size=size, seed=self.seed * SEED_STRIDE % 2**31, **self.config
            )
        except (AssertionError, TypeError, ValueError) as error:
            raise UserError(f"data.config: {self.task} refuses it ({error}): mend data.config") from error

    def _rows(self, dataset: Any, entries: list[dict[str, Any]], i: int, form: Form) -> list[dict[str, Any]]:
        """The row of a question, or two where its answers are unpaired."""
        entry = entries[i]
        row: dict[str, Any] = {"prompt": turn("user", entry["question"])}
        row |= {"answer": entry["answer"], "task": self.task, "entry": entry}
        if form == "prompts":
            return [row]
        right = turn("assistant", self._right(dataset, entry))
        if form == "demonstrations":
            return [row | {"completion": right}]
        wrong = [turn("assistant", text) for text in self._wrong(dataset, entries, i, 2 if form == "ranked" else 1)]
        if form == "ranked":
            return [row | {"completions": [right, *wrong]}]
        if form == "pairs":
            return [row | {"chosen": right, "rejected": wrong[0]}]
        return [row | {"completion": right, "label": True}, row | {"completion": wrong[0], "label": False}]

    def _right(self, dataset: Any, entry: dict[str, Any]) -> str:
        answer = entry["answer"]
        if not isinstance(answer, str) or not answer.strip() or dataset.score_answer(answer, entry) < 1.0:
            raise UserError(
                f"data.task: {self.task} has no answer of its own that it scores 1 (to {entry['question'][:60]!r}), so "
                "it gives prompts alone: choose an algorithm that samples, such as algorithm=grpo"
            )
        return answer

    def _wrong(self, dataset: Any, entries: list[dict[str, Any]], i: int, count: int) -> list[str]:
        """Different answers of the nearest later entries that score less than 1 here, the best of them first."""
        scores: dict[str, float] = {}
        for step in range(1, min(NUM_TRIES, len(entries) - 1) + 1):
            answer = entries[(i + step) % len(entries)]["answer"]
            if isinstance(answer, str) and answer.strip() and (score := dataset.score_answer(answer, entries[i])) < 1.0:
                scores.setdefault(answer, score)
            if len(scores) == count:
                return sorted(scores, key=lambda text: -scores[text])
        found, what = ("no other answer", "pairs") if count == 1 else (f"{len(scores)} other answer(s)", "ranked lists")
        raise UserError(
            f"data.task: {found} of {self.task} is wrong for {entries[i]['question'][:60]!r}, so it gives no {what}: "
            "choose another algorithm, or more rows"
        )
