"""The score of a trained reward model, read as it was trained: at the end token of the completion."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from alignment.batch import Batch, Example, collate
from alignment.errors import UserError
from alignment.model.adapters import REWARD, add_reward_adapter, use_adapter
from alignment.model.hf import HFModel, named
from alignment.model.scorer import completion_scores

log = logging.getLogger("alignment")


class Tokens(NamedTuple):
    """Ids of a prompt and a completion; mask: where the model says something, None = it is not asked for."""

    prompt: list[int]
    completion: list[int]
    mask: list[bool] | None = None


class RewardModel:
    """A model with a score head of one label, as `algorithm=reward_model` saves it, or any other of transformers.

    What is scored is text: the prompt and the completion under the reward model's own chat template and tokenizer, up
    to its end token, whatever the policy's are. A completion that was cut off is scored as if it ended there.

    `adapter/` in that folder is the reward model as an adapter. Where the policy has an adapter on the same base, it
    joins that one (`share`): policy, reference, critic and reward model hold one copy of the weights, and it is
    computed in the run's precision, as the policy is. Elsewhere it loads its base for itself.

    path: folder or hub name. batch_size: completions of one forward pass. dtype: of the weights, auto = as saved.
    device: where it is kept; None = the accelerator if there is one. weight: factor of this reward in the total.
    """

    key: ClassVar[str] = "reward.model"

    def __init__(
        self,
        *,
        path: str,
        batch_size: int = 64,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        device: str | None = None,
        weight: float = 1.0,
    ) -> None:
        self.name, self.batch_size, self.device, self.weight = path, batch_size, device, weight
        self.adapter = self._adapter(Path(path).expanduser())
        base, template = (path, None) if self.adapter is None else _base_of(self.adapter)
        self.source = HFModel(base, adapter="none", dtype=dtype, chat_template=template)
        with named(self.key):
            self.source.folder  # noqa: B018 (told at once, not at the first rollout)
        self.head: nn.Linear | None = None
        self._context: Callable[[], AbstractContextManager] = nullcontext

    def _adapter(self, folder: Path) -> str | None:
        """The folder, where it holds an adapter with a head and not a whole model."""
        return str(folder) if (folder / "adapter_config.json").is_file() else None

    def share(self, policy: nn.Module | None, source: HFModel, context: Callable[[], AbstractContextManager]) -> None:
        """Join the policy's base, if this is an adapter on it; once, before anything is scored.

        source: what the policy was built from. context: what the policy's passes run in.
        """
        if self.adapter is None or "model" in vars(self) or not isinstance(policy, PeftModel):
            return
        if self.source.folder != source.folder:
            log.info("%s: its base is %s, not the policy's: it loads its own copy", self.key, self.source.folder)
            return
        with named(self.key):
            self.head = add_reward_adapter(policy, self.adapter).to(next(policy.parameters()).device)
        self.model, self._context = policy, context

    @cached_property
    def model(self) -> nn.Module:
        """The weights, loaded when they are first needed."""
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        with named(self.key):
            if self.adapter is None:
                return self.load().to(device)
            host = get_peft_model(self.source.frozen(), LoraConfig(r=1, target_modules="all-linear"))  # pyright: ignore
            self.head = add_reward_adapter(host, self.adapter).to(device)
            return host.eval().to(device)

    def load(self) -> nn.Module:
        return self.source.frozen_scorer()

    @torch.no_grad()
    def __call__(self, completions: list[str], rows: list[dict[str, Any]]) -> list[float | None]:
        """One score for each completion; those of one prompt share it."""
        texts = [self._tokens(row, text) for text, row in zip(completions, rows, strict=True)]
        scores: list[float | None] = []
        for examples in _batches(texts, self.batch_size):
            batch = collate(examples).to(next(self.model.parameters()).device)
            with torch.autocast(batch.prompt_ids.device.type, enabled=False), self._context():
                scores += self.score(batch).float().tolist()
        return scores

    def score(self, batch: Batch) -> Tensor:
        """(N,)"""
        if self.head is None:
            return completion_scores(self.model, batch)
        with use_adapter(self.model, REWARD):
            return completion_scores(self.model, batch, head=self.head)

    # ---- as it was trained ------------------------------------------------------------------------------------------
    def _tokens(self, row: dict[str, Any], text: str) -> Tokens:
        """The completion ends in the end token."""
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            end: Any = self.source.tokenizer.eos_token_id
            return Tokens([*self._bos, *self._ids(prompt)], [*self._continued(text), end])
        if not prompt:
            raise UserError("a row without a prompt: a reward model scores an answer to something")
        options = {"tools": row.get("tools") or None, **(row.get("chat_template_kwargs") or {})}
        begun = prompt[-1]["role"] == "assistant"  # its beginning of the reply belongs to the completion
        reply = {"role": "assistant", "content": (prompt[-1]["content"] if begun else "") + text}
        asked = prompt[:-1] if begun else prompt
        head = self._show(asked, add_generation_prompt=True, **options)
        whole = self._show([*asked, reply], **options)
        if not whole.startswith(head):  # a template that opens the reply otherwise than it shows it later
            ids = self._ended(self._ids(whole))
            return Tokens(ids[:1], ids[1:])
        return Tokens(self._ids(head), self._ended(self._continued(whole[len(head) :])))

    def _show(self, messages: list[dict[str, Any]], **options: Any) -> str:
        tokenizer = self.source.tokenizer
        if tokenizer.chat_template is None:
            raise UserError(f"{self.key}.path: {self.name} has no chat template, and the prompts are messages")
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)  # pyright: ignore

    def _ended(self, ids: list[int]) -> list[int]:
        """Up to the last end token: templates put a line break behind it."""
        stops = [i for i, token in enumerate(ids) if token in self.source.stop_ids]
        return ids[: stops[-1] + 1] if stops else ids

    def _ids(self, text: str) -> list[int]:
        return self.source.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore

    @cached_property
    def _bos(self) -> list[int]:
        """The BOS that the tokenizer puts before plain text, if it puts one; templates write their own."""
        bos, first = self.source.tokenizer.bos_token_id, self.source.tokenizer("a")["input_ids"][:1]  # pyright: ignore
        return [bos] if first == [bos] and isinstance(bos, int) else []

    def _continued(self, text: str) -> list[int]:
        """Ids of a text that goes on from another: without the space that some tokenizers put first."""
        front, joined = self._ids("\n"), self._ids("\n" + text)
        prefixes = self._ids("\na")[len(front) :] != self._ids("a")
        return joined[len(front) :] if prefixes and joined[: len(front)] == front else self._ids(text)


def _base_of(adapter: str) -> tuple[str, str | None]:
    """Where an adapter's base is, and the chat template beside it. UserError where it gives no scores."""
    config: Any = PeftConfig.from_pretrained(adapter)
    if config.task_type != "SEQ_CLS":
        raise UserError(
            f"reward.model.path: {adapter} is an adapter that gives no scores ({config.task_type}): type "
            "reward.model.path=<model/ or model/adapter/ of a run of algorithm=reward_model>"
        )
    template = Path(adapter) / "chat_template.jinja"
    return config.base_model_name_or_path, str(template) if template.is_file() else None


def _batches(texts: list[Tokens], size: int) -> Iterator[list[Example]]:
    """In order; neighbours with the same prompt as one example, as long as all of a batch have equally many."""
    examples = []
    for prompt, found in groupby(texts, key=lambda text: text.prompt):
        group = list(found)
        for part in (group[i : i + size] for i in range(0, len(group), size)):
            masks = [text.mask for text in part if text.mask is not None]
            examples.append(Example(prompt, [text.completion for text in part], masks or None))
    for count, alike in groupby(examples, key=lambda example: len(example.completions)):
        rows, step = list(alike), max(1, size // count)
        yield from (rows[i : i + step] for i in range(0, len(rows), step))
