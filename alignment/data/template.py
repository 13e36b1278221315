"""The one place that turns a row's prompt and completions into token ids.

All that is trained on, sampled from or scored goes through here, so that there is one BOS, one EOS, one boundary:

- Prompt and completion are encoded apart and joined as tokens, never cut out of an encoding of the joined text: a token
  that would span the boundary does not exist where a model is sampled from.
- A conversational prompt is rendered with the generation prompt: all that the template supplies before a model speaks.
- The completion is what the template has after that, up to and including the token that ends the turn, and no further.
- Several assistant turns in one completion: each is learned up to its own end; what stands between them is not. Where
  the template marks what a model says ({% generation %}), the marks decide.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from alignment.data.messages import Content, Message, RowProblem, is_learned, shared_length, shown, turn

# Private-use characters that no text contains: they mark places in a rendered conversation.
OPEN, CLOSE, PROBE = "\ue000", "\ue001", "\ue002"
MARKER = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")


class Rewritten(RowProblem):
    """The template shows earlier turns otherwise once later ones exist: several turns cannot share one sequence."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a completion's text, and which of its tokens count in the loss."""

    text: str
    learned: Literal["all", "last", "none"] = "all"

    def mask(self, length: int) -> list[bool]:
        """For a stretch of `length` tokens."""
        return [self.learned == "all"] * (length - 1) + [self.learned != "none"] if length else []


@dataclass(frozen=True)
class Rendered:
    """A row as text: its prompt, and for each completion the segments that follow it.

    needs_bos: plain text, which gets a BOS if the tokenizer gives one; a template has written its own.
    """

    prompt: str
    completions: list[list[Segment]]
    needs_bos: bool


@dataclass(frozen=True)
class Tokens:
    """A row as ids: masks are True where a token counts in the loss; as many, and as long, as the completions.

    inner_stop: a learned turn has an end token before its end, after which nothing could ever be sampled.
    """

    prompt: list[int]
    completions: list[list[int]]
    masks: list[list[bool]]
    inner_stop: bool = False


@dataclass
class Template:
    """How one tokenizer writes rows.

    stop_ids: every id that ends a completion when sampling; the tokenizer's EOS is always among them.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_ids: Collection[int] = ()
    _seen: dict[tuple[str, bool], list[int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        eos = self.tokenizer.eos_token_id
        self.stops: set[int] = set(self.stop_ids) | ({eos} if isinstance(eos, int) else set())
        if not self.stops:
            raise ValueError("the tokenizer has no EOS token: a model could not learn to stop")
        self.eos: int = eos if isinstance(eos, int) else min(self.stops)
        texts = [self.tokenizer.convert_ids_to_tokens(i) for i in sorted(self.stops)]
        self.stop_texts = [text for text in texts if isinstance(text, str)]  # a padded vocabulary has ids without text
        self.bos = self._own_bos()
        self._sentinel = self._find_sentinel()

    # ---- from text to ids -----------------------------------------------------------------------------------------
    def tokenize(self, rows: Sequence[Rendered]) -> list[Tokens]:
        """Ids of many rows; the tokenizer is called once for all their texts."""
        heads = [(row.prompt, False) for row in rows]
        tails = [(part.text, True) for row in rows for segments in row.completions for part in segments]
        self._encode([*heads, *tails])
        tokens = [self._join(row) for row in rows]
        self._seen.clear()
        return tokens

    def _encode(self, texts: Iterable[tuple[str, bool]]) -> None:
        """Fill the table of ids. A text that continues another must not get the space some tokenizers put first."""
        wanted = [key for key in dict.fromkeys(texts) if key not in self._seen]
        if not wanted:
            return
        prefixed = [self._sentinel + text if goes_on else text for text, goes_on in wanted]
        front = self._ids([self._sentinel])[0] if self._sentinel else []
        for (text, goes_on), ids in zip(wanted, self._ids(prefixed), strict=True):
            if goes_on and front:
                # A sentinel that has merged with the text tells nothing: take the text by itself.
                ids = ids[len(front) :] if ids[: len(front)] == front else self._ids([text])[0]
            self._seen[text, goes_on] = ids

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore

    def _join(self, row: Rendered) -> Tokens:
        prompt = list(self._seen[row.prompt, False])
        if self.bos is not None:
            while prompt[:2] == [self.bos, self.bos]:
                del prompt[0]  # the text has one, and the template wrote another
            if row.needs_bos and prompt[:1] != [self.bos]:
                prompt.insert(0, self.bos)
        completions, masks, inner_stop = [], [], False
        for segments in row.completions:
            pieces = [(part, self._seen[part.text, True]) for part in segments]
            completions.append([i for _, ids in pieces for i in ids])
            masks.append([learned for part, ids in pieces for learned in part.mask(len(ids))])
            inner_stop = inner_stop or any(part.learned == "all" and self._stops_early(ids) for part, ids in pieces)
        return Tokens(prompt, completions, masks, inner_stop)

    def _stops_early(self, ids: list[int]) -> bool:
        stops = [i in self.stops for i in ids]
        return any(stop and not following for stop, following in pairwise(stops))

    def close(self, ids: list[int], mask: list[bool]) -> tuple[list[int], list[bool]]:
        """The completion up to its last learned token, ending in exactly one EOS that counts."""
        length = len(ids)
        while length and not mask[length - 1]:
            length -= 1
        ids, mask = ids[:length], mask[:length]
        while len(ids) > 1 and ids[-1] in self.stops and ids[-2] in self.stops:
            ids, mask = ids[:-1], mask[:-1]
        if ids and ids[-1] in self.stops:
            return ids, mask
        return [*ids, self.eos], [*mask, True]

    # ---- what the tokenizer does --------------------------------------------------------------------------------
    def _own_bos(self) -> int | None:
        """The BOS that the tokenizer itself puts before text; None where it puts none."""
        bos = self.tokenizer.bos_token_id
        with_special = self.tokenizer("a", add_special_tokens=True)["input_ids"]
        return bos if isinstance(bos, int) and with_special[:1] == [bos] else None  # pyright: ignore

    def _find_sentinel(self) -> str:
        """Text to put before a continuation where the tokenizer (SentencePiece) would begin it with its own space."""
        front, joined, alone = self._ids(["\n", "\na", "a"])
        return "\n" if front and joined[: len(front)] == front and joined[len(front) :] != alone else ""

    # ---- from rows to text ----------------------------------------------------------------------------------------
    def render(self, row: dict[str, Any], completions: Sequence[Content]) -> Rendered:
        """A prompt and its completions as text. RowProblem where the template cannot show them as they were sampled."""
        prompt = row["prompt"]
        if isinstance(prompt, str):
            texts = [text for text in completions if isinstance(text, str)]
            if len(texts) != len(completions):
                raise RowProblem(
                    "completion", "messages after a prompt of text", "write both as messages, or both as text"
                )
            return Rendered(prompt, [[Segment(text)] for text in texts], needs_bos=True)
        chat = _Chat(self, row)
        replies = [c if isinstance(c, list) else turn("assistant", c) for c in completions]
        head = chat.head(prompt)
        return Rendered(head, [chat.segments(prompt, reply, head) for reply in replies], needs_bos=False)

    def render_steps(self, row: dict[str, Any], steps: Sequence[str], separator: str) -> Rendered:
        """A prompt and its steps as one completion; each step's separator is encoded apart, its last token counts."""
        prompt = row["prompt"]
        head = prompt if isinstance(prompt, str) else _Chat(self, row).head(prompt)
        pieces = [part for step in steps for part in (Segment(step, "none"), Segment(separator, "last"))]
        return Rendered(head, [pieces], needs_bos=isinstance(prompt, str))

    def render_turns(self, row: dict[str, Any], completion: list[Message]) -> list[Rendered]:
        """Each learned turn by itself after all that was said before it, as a model is sampled turn by turn."""
        messages = [*row["prompt"], *completion]
        turns = [i for i in range(len(row["prompt"]), len(messages)) if is_learned(messages[i])]
        if any(messages[i - 1]["role"] == "assistant" for i in turns):
            raise RowProblem(
                "messages", "has two assistant's turns in a row", "join them, or put the user's turn between"
            )
        return [self.render(row | {"prompt": messages[:i]}, [[messages[i]]]) for i in turns]


@dataclass
class _Chat:
    """One row's conversation under the chat template."""

    template: Template
    row: dict[str, Any]

    def __post_init__(self) -> None:
        tools = self.row.get("tools") or None
        try:
            self.source: str = self.template.tokenizer.get_chat_template(None, tools)
        except ValueError as error:
            todo = "type model.chat_template=<file>, or write text instead (data.chat=false keeps questions text)"
            raise RowProblem("prompt", "has messages, and the tokenizer has no chat template", todo) from error
        if tools and "tools" not in self.source:
            raise RowProblem("tools", "the chat template shows no tools", "choose another model.chat_template")
        self.options: dict[str, Any] = {"tools": tools, **(self.row.get("chat_template_kwargs") or {})}

    def show(self, messages: list[Message], source: str | None = None, **options: Any) -> str:
        """The conversation as the template has it. RowProblem with the template's own words where it refuses."""
        try:
            return self.template.tokenizer.apply_chat_template(  # pyright: ignore
                messages, chat_template=source or self.source, tokenize=False, **self.options, **options
            )
        except Exception as error:  # templates are programs of other people: they raise whatever they like
            why = str(error) or type(error).__name__
            raise RowProblem("prompt", f"the chat template refuses it ({why})", "mend the turns") from error

    def head(self, prompt: list[Message]) -> str:
        """All that a model sees before it speaks. A prompt that ends in an assistant's turn is to be gone on with."""
        begun = prompt[-1]["role"] == "assistant"
        head = self.show(prompt, continue_final_message=begun, add_generation_prompt=not begun)
        words = prompt[-1]["content"].split()
        if words and words[-1] not in head and prompt[-1]["role"] == "user":
            what = "the chat template leaves out what the last turn says"
            raise RowProblem("prompt", what, "set another model.chat_template")
        return head

    def segments(self, prompt: list[Message], completion: list[Message], head: str) -> list[Segment]:
        """The completion after `head`, cut where learning begins and ends."""
        messages = _joined(prompt, completion)
        whole = self.show(messages)
        first = len(messages) - len(completion)
        if not whole.startswith(head):
            if len(completion) > 1:
                raise _rewritten(first)
            segments = self._after_opening(messages, head)
        else:
            _check_shown(completion, whole[len(head) :])
            turns = list(self._turns(messages, first, whole, head))
            segments = _cut(whole, len(head), self._marked(messages, whole, turns))
        return segments

    def _turns(self, messages: list[Message], first: int, whole: str, head: str) -> Iterator[tuple[int, int]]:
        """(start, end) in `whole` of each learned turn from `first` on, as it was when it was the last one."""
        for i in range(first, len(messages)):
            if not is_learned(messages[i]):
                continue
            before = head if i == first else self.show(messages[:i], add_generation_prompt=True)
            then = whole if i + 1 == len(messages) else self.show(messages[: i + 1])
            if not then.startswith(before):
                raise _rewritten(i)
            end = len(before) + self._end(then[len(before) :], messages[i]["content"])
            if whole[:end] != then[:end]:
                raise _rewritten(i)
            yield len(before), end + self._stop_at(whole[:end], whole[end:])

    def _end(self, text: str, content: str) -> int:
        """Where a rendered turn ends: after its end token, without the line break that templates put behind it."""
        spoken = content.strip()
        after = text.rfind(spoken) + len(spoken) if spoken and spoken in text else 0
        ends = [text.find(stop, after) + len(stop) for stop in self.template.stop_texts if stop in text[after:]]
        if ends:
            return min(ends)
        return len(text.rstrip()) if text[after:].strip() else len(text)

    def _stop_at(self, before: str, after: str) -> int:
        """Length of the end token with which `after` begins; 0 where `before` has ended in one already."""
        stops = self.template.stop_texts
        return 0 if before.endswith(tuple(stops)) else next((len(stop) for stop in stops if after.startswith(stop)), 0)

    def _marked(self, messages: list[Message], whole: str, turns: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """What of the turns the template's {% generation %} blocks cover; the turns themselves without such blocks.

        The blocks are read by rendering once more with a character in their place. The header before a turn is not
        learned even where a block covers it: it is there when a model is sampled. The end token right behind a block
        is, where a template leaves it out: its model would never learn to stop.
        """
        if not MARKER.search(self.source):
            return turns
        # A block in place of a block: the white space that Jinja trims around it stays the same.
        mark = "{{%{} if true %}}{}{{% endif {}%}}"
        source = MARKER.sub(lambda m: mark.format(m[1], CLOSE if m[2] else OPEN, m[3]), self.source)
        pieces = re.split(f"([{OPEN}{CLOSE}])", self.show(messages, source))
        if "".join(pieces[::2]) != whole:
            raise RowProblem(
                "prompt", "the marks of the chat template cannot be read", "remove {% generation %} from it"
            )
        spans, at, opened = [], 0, 0
        for piece in pieces:
            if piece == OPEN:
                opened = at
            elif piece == CLOSE:
                end = at + self._stop_at(whole[:at].rstrip(), whole[at:])
                spans += [(max(opened, start), min(end, stop)) for start, stop in turns]
            else:
                at += len(piece)
        return spans

    def _after_opening(self, messages: list[Message], head: str) -> list[Segment]:
        """A reply whose beginning the generation prompt holds already (<think>), and the template drops later."""
        probe = self.show([*messages[:-1], messages[-1] | {"content": PROBE}])
        common = head[: shared_length(head, probe)]
        opening, content = head[len(common) :], messages[-1]["content"]
        if not opening or not probe.startswith(common + PROBE) or not content.startswith(opening):
            what = f"does not go on from {shown(head[-20:])}, with which the chat template opens the reply"
            todo = f"begin it with {shown(opening)}" if opening else "take its reasoning out"
            raise RowProblem("completion", what, f"{todo}, or set another model.chat_template")
        text = content[len(opening) :] + probe.partition(PROBE)[2]
        return [Segment(text[: self._end(text, content[len(opening) :])])]


def _check_shown(messages: list[Message], text: str) -> None:
    """RowProblem where the template leaves out what a turn says, as those written for lists of parts do with text.

    Templates may trim and take reasoning apart; the last word of a turn is what none of them changes.
    """
    for place, message in enumerate(messages):
        words = message["content"].split()
        if words and is_learned(message) and words[-1] not in text:
            what = f"the chat template leaves out what turn {place} of the completion says"
            raise RowProblem("completion", what, "set another model.chat_template")


def _rewritten(place: int) -> Rewritten:
    what = f"the chat template shows the turns before turn {place} otherwise once it has been said"
    return Rewritten("prompt", what, "use rows of one reply each, or set another model.chat_template")


def _joined(prompt: list[Message], completion: list[Message]) -> list[Message]:
    """The whole conversation; a prompt that ends in an assistant's turn has its beginning of the reply."""
    if prompt[-1]["role"] != "assistant" or completion[0]["role"] != "assistant":
        return [*prompt, *completion]
    begun = prompt[-1]["content"] + completion[0]["content"]
    return [*prompt[:-1], completion[0] | {"content": begun}, *completion[1:]]


def _cut(whole: str, start: int, spans: list[tuple[int, int]]) -> list[Segment]:
    """The text from `start` to the end of the last span, in learned and other segments."""
    segments = []
    for begin, end in sorted(spans):
        begin = max(begin, start)  # marks may overlap: each stretch comes once
        if end <= begin:
            continue
        if begin > start:
            segments.append(Segment(whole[start:begin], "none"))
        segments.append(Segment(whole[begin:end]))
        start = end
    return segments
