"""Rows of a dataset on the Hugging Face hub, or of a folder that the datasets library has saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from alignment.data.files import SAVED_BY_DATASETS
from alignment.data.schema import Found
from alignment.data.source import RowSource
from alignment.errors import UserError


class Hub(RowSource):
    """A dataset by its name on the hub, a folder written by `save_to_disk`, or a folder in a layout that hubs know.

    config: name of one of the dataset's configurations, None = its default. split: the rows to train on.
    revision: branch, tag or commit. Other keywords: see RowSource; `heldout` as text is another split.
    """

    def __init__(
        self,
        *,
        name: str,
        config: str | None = None,
        split: str = "train",
        revision: str | None = None,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        self.name, self.config, self.split, self.revision = name, config, split, revision

    def __str__(self) -> str:
        return self.name if self.config is None else f"{self.name}/{self.config}"

    def found(self, where: str | None) -> Iterator[Found]:
        split = self.split if where is None else where
        for number, row in enumerate(self._dataset(split, "data.split" if where is None else "data.heldout"), 1):
            yield f"{self}[{split}], row {number}", dict(row)

    def content(self) -> str:
        """The fingerprints that the datasets library keeps of what is read and of all that was done to it."""
        parts = [self._dataset(self.split, "data.split")]
        if isinstance(self.heldout, str):
            parts.append(self._dataset(self.heldout, "data.heldout"))
        return " ".join([str(self), self.split, *(str(part._fingerprint) for part in parts)])

    def _dataset(self, split: str, key: str) -> Any:
        folder = Path(self.name).expanduser()
        if any((folder / name).is_file() for name in SAVED_BY_DATASETS):
            return self._saved(folder, split, key)
        if self.name.startswith(("/", "~", "./", "../")) and not folder.is_dir():
            raise UserError(f"data.name: there is no folder {self.name}: type data.name=<folder or name on the hub>")
        import datasets
        from datasets.exceptions import DatasetNotFoundError

        source = str(folder) if folder.is_dir() else self.name
        try:
            return datasets.load_dataset(source, self.config, split=split, revision=self.revision)
        except DatasetNotFoundError as error:
            raise UserError(f"data.name: {self._unreachable()}. {_first_line(error)}") from error
        except ValueError as error:  # an unknown split or configuration; the message lists those there are
            wrong = "data.config" if "config" in str(error).lower() else key
            raise UserError(f"{wrong}: {self}: {_first_line(error)}: type {wrong}=<one of those>") from error
        except OSError as error:
            raise UserError(
                f"data.name: {self._unreachable()}. {type(error).__name__}: {_first_line(error)}"
            ) from error

    def _saved(self, folder: Path, split: str, key: str) -> Any:
        import datasets

        dataset = datasets.load_from_disk(str(folder))
        if not isinstance(dataset, datasets.DatasetDict):
            if key == "data.heldout" or split != "train":
                instead = "data.heldout=0.05" if key == "data.heldout" else "data.split=train, which takes it"
                raise UserError(f"{key}: {folder} has a single split, not a {split!r} beside others: type {instead}")
            return dataset
        if split not in dataset:
            raise UserError(
                f"{key}: {folder} has no split {split!r}: type {key}=<one of {', '.join(map(str, dataset))}>"
            )
        return dataset[split]

    def _unreachable(self) -> str:
        return (
            f"{self.name} is no folder, and the hub does not give it (no network, no such name, or no access): without "
            "a network, save it elsewhere with save_to_disk and type data.name=<folder>, or type data=jsonl "
            "data.path=<file>"
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
