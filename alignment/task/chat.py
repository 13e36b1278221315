"""`task=chat`: talk to the model in the terminal."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer

from alignment.errors import UserError
from alignment.task.inference import Inference, inference_problems

log = logging.getLogger("alignment")
HELP = "/reset begins anew, /undo takes the last exchange back, /quit (or Ctrl-D) ends"
Turns = list[dict[str, str]]


def run(cfg: dict[str, Any], *, system: str | None, max_new_tokens: int) -> dict[str, Any]:
    """Take turns with whoever types (or with the lines of a pipe) until the input ends; chat.json keeps what was said.

    Sampling is transformers' own, which shows words as they come, by the temperature, top_p and top_k of `rollout`;
    nothing of the checkpoint's generation config acts.
    """
    model = Inference(cfg)
    if model.source.tokenizer.chat_template is None:
        raise UserError("model.chat_template: the model has none, so it takes no turns: type task=generate")
    print(HELP)
    turns = converse(lambda said: answer(model, said, max_new_tokens), system, lambda: input("> "))
    file = Path(cfg["output_dir"]) / "chat.json"
    file.write_text(json.dumps({"messages": turns}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    log.info("the conversation is in %s", file)
    return {"turns": len(turns), "output_dir": cfg["output_dir"]}


def problems(cfg: dict[str, Any]) -> list[str]:
    """What can be said before the model loads."""
    return inference_problems(cfg)


def converse(reply: Callable[[Turns], str], system: str | None, ask: Callable[[], str]) -> Turns:
    """What was said when the input ended. reply: the assistant's next turn; ask: the user's, EOFError at the end."""
    start: Turns = [] if system is None else [{"role": "system", "content": system}]
    turns = list(start)
    while True:
        try:
            text = ask().strip()
        except EOFError:
            return turns
        if text == "/quit":
            return turns
        if text == "/reset":
            turns = list(start)
        elif text == "/undo":
            turns = turns[:-2] if len(turns) > len(start) else turns
        elif text.startswith("/"):
            print(HELP)
        elif text:
            turns.append({"role": "user", "content": text})
            turns.append({"role": "assistant", "content": reply(turns)})


@torch.no_grad()
def answer(model: Inference, turns: Turns, max_new_tokens: int) -> str:
    """The assistant's next turn, printed word by word."""
    tokenizer, engine = model.source.tokenizer, model.engine
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    prompt: Any = ids.to(model.device)  # pyright: ignore[reportAttributeAccessIssue]
    sampled = engine.temperature > 0
    how = {"temperature": engine.temperature, "top_p": engine.top_p, "top_k": engine.top_k} if sampled else {}
    settings = GenerationConfig(
        do_sample=sampled,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(model.source.stop_ids),
        pad_token_id=tokenizer.pad_token_id,
        **how,
    )
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)  # pyright: ignore[reportArgumentType]
    torch.manual_seed(model.seed + len(turns))  # the same conversation is answered in the same way
    language: Any = model.model
    with model.context():
        out = language.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=settings, streamer=streamer
        )
    return tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)  # pyright: ignore[reportReturnType]
