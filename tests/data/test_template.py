"""Chat templates of every kind that was met: what is the prompt, what is learned, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from alignment.data.encode import encode
from alignment.data.messages import RowProblem
from alignment.data.template import Rewritten, Template
from alignment.errors import UserError

Make = Callable[..., Any]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def bot(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


ONE = {"prompt": [user("hi")], "completion": [bot("yo")]}
TWO = {"prompt": [user("hi")], "completion": [bot("yo"), user("and?"), bot("no")]}


def encoded(
    tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], form: Any = "demonstrations", **options: Any
) -> list:
    return encode([row], form, tokenizer, max_prompt_tokens=None, max_completion_tokens=None, **options)[0]


def text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


def parts(tokenizer: PreTrainedTokenizerBase, example: Any, which: int = 0) -> list[tuple[str, bool]]:
    """The completion as (text, learned), with neighbours of the same kind joined."""
    ids = example.completions[which]
    mask = example.loss_masks[which] if example.loss_masks else [True] * len(ids)
    pieces: list[tuple[list[int], bool]] = []
    for token, learned in zip(ids, mask, strict=True):
        if not pieces or pieces[-1][1] != learned:
            pieces.append(([], learned))
        pieces[-1][0].append(token)
    return [(text(tokenizer, piece), learned) for piece, learned in pieces]


def seen(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], **options: Any) -> list[tuple[str, list]]:
    return [(text(tokenizer, e.prompt_ids), parts(tokenizer, e)) for e in encoded(tokenizer, row, **options)]


HEAD = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
BETWEEN = "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


def test_chatml_the_header_is_prompt_and_the_line_break_after_the_end_is_nothing(in_bytes: Make) -> None:
    assert seen(in_bytes(), ONE) == [(HEAD, [("yo<|im_end|>", True)])]


def test_every_turn_is_learned_up_to_its_end_token(in_bytes: Make) -> None:
    assert seen(in_bytes(), TWO) == [(HEAD, [("yo<|im_end|>", True), (BETWEEN, False), ("no<|im_end|>", True)])]


def test_prompt_ids_are_those_that_sampling_would_use(in_bytes: Make) -> None:
    tokenizer = in_bytes()
    sampled = tokenizer.apply_chat_template(ONE["prompt"], add_generation_prompt=True, return_dict=False)
    for form, row in (("demonstrations", ONE), ("prompts", {"prompt": ONE["prompt"]})):
        assert encoded(tokenizer, row, form)[0].prompt_ids == sampled


# ---- B05 -------------------------------------------------------------------------------------------------------------
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}[/U]{% else %}[A]{{ m.content }}[/A]{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)


@pytest.mark.parametrize(("eos", "expected"), [("[/A]", "y[/A]"), ("</s>", "y[/A]</s>")])
def test_b05_the_role_header_is_not_learned(in_bytes: Make, eos: str, expected: str) -> None:
    tokenizer = in_bytes(BRACKETS, specials=[eos], eos=eos)
    row = {"prompt": [user("x")], "completion": [bot("y")]}
    assert seen(tokenizer, row) == [("[U]x[/U][A]", [(expected, True)])]


# ---- B07 -------------------------------------------------------------------------------------------------------------
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_b07_a_template_without_marks_learns_the_same_turns_as_one_with_them(in_bytes: Make) -> None:
    """transformers returns a mask of zeros without marks, and warns only."""
    expected = [(HEAD, [("yo<|im_end|>", True), (BETWEEN, False), ("no<|im_end|>", True)])]
    assert seen(in_bytes(MARKED), TWO) == expected
    assert seen(in_bytes(), TWO) == expected


def test_b07_a_row_without_a_learned_token_is_refused_by_name(in_bytes: Make) -> None:
    tokenizer = in_bytes()
    tokenizer.chat_template += "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    with pytest.raises(UserError, match=r"row 0: completion: has no token to learn as the chat template shows it"):
        encoded(tokenizer, ONE)


def test_b07_a_template_that_drops_what_was_said_is_refused_by_name(in_bytes: Make) -> None:
    """Templates for lists of parts show text as nothing, which would train on empty turns."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{{ part.text }}"
        "{% endfor %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(UserError, match=r"row 0: prompt: the chat template leaves out what the last turn says"):
        encoded(in_bytes(template), ONE)
    half = MARKED.replace("{% generation %}{{ m['content'] }}", "{% generation %}")
    with pytest.raises(UserError, match=r"row 0: completion: the chat template leaves out what turn 0"):
        encoded(in_bytes(half), ONE)


def test_all_rows_that_cannot_be_shown_are_in_one_error(in_bytes: Make) -> None:
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + MARKED
    bad = {"prompt": [bot("a"), user("b")], "completion": [bot("c")]}
    with pytest.raises(UserError) as caught:
        encode([bad, ONE, bad], "demonstrations", in_bytes(strict), max_prompt_tokens=9, max_completion_tokens=9)
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 rows cannot be used as demonstrations:"
    assert "row 0: prompt: the chat template refuses it (user first)" in lines[1]
    assert "row 2: " in lines[2]


# ---- marks -----------------------------------------------------------------------------------------------------------
def test_marks_that_leave_the_end_token_out_get_it(in_bytes: Make) -> None:
    template = MARKED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")
    assert seen(in_bytes(template), TWO) == [(HEAD, [("yo<|im_end|>", True), (BETWEEN, False), ("no<|im_end|>", True)])]


def test_marks_that_cover_the_header_do_not_make_it_learned(in_bytes: Make) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n"
        "{% endgeneration %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert seen(in_bytes(template), TWO) == [(HEAD, [("yo<|im_end|>", True), (BETWEEN, False), ("no<|im_end|>", True)])]


def test_marks_may_leave_part_of_a_reply_out(in_bytes: Make) -> None:
    """Of what comes before the first learned token, all is prompt."""
    template = MARKED.replace("{% generation %}", "<quiet>{% generation %}")
    assert seen(in_bytes(template), ONE) == [(HEAD + "<quiet>", [("yo<|im_end|>", True)])]


def test_white_space_control_of_the_marks_is_kept(in_bytes: Make) -> None:
    spaced = MARKED.replace("{% generation %}", "\n  {%- generation -%}\n  ").replace(
        "{% endgeneration %}", "\n{%- endgeneration %}\n"
    )
    lines = MARKED.replace("{% generation %}", "{% generation %}\n").replace(
        "{% endgeneration %}", "\n  {% endgeneration %}\n"
    )
    for template in (spaced, lines):
        tokenizer = in_bytes(template)
        [example] = encoded(tokenizer, TWO)
        whole = tokenizer.apply_chat_template(TWO["prompt"] + TWO["completion"], tokenize=False)
        both = tokenizer.decode(example.prompt_ids + example.completions[0])
        assert whole.startswith(both)
        assert [text.strip() for text, learned in parts(tokenizer, example) if learned] == [
            "yo<|im_end|>",
            "no<|im_end|>",
        ]


# ---- templates that show earlier turns otherwise ---------------------------------------------------------------------
THINKING = """{% set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
THOUGHT = {
    "prompt": [user("hi")],
    "completion": [bot("<think>a</think>\n\nyo"), user("and?"), bot("<think>b</think>\n\nno")],
}


def test_turns_whose_reasoning_is_dropped_later_become_examples_of_their_own(in_bytes: Make) -> None:
    """Each is then learned exactly as it is sampled: its own reasoning there, earlier reasoning gone."""
    tokenizer = in_bytes(THINKING)
    examples, report = encode(
        [THOUGHT], "demonstrations", tokenizer, max_prompt_tokens=None, max_completion_tokens=None
    )
    assert [(tokenizer.decode(e.prompt_ids), parts(tokenizer, e)) for e in examples] == [
        (HEAD, [("<think>a</think>\n\nyo<|im_end|>", True)]),
        (HEAD + "yo<|im_end|>" + BETWEEN, [("<think>b</think>\n\nno<|im_end|>", True)]),
    ]
    assert report.num_split_rows == 1 and report.num_rows == 1 and report.num_examples == 2
    assert len({example.id for example in examples}) == 2
    assert "1 rows became one example for each turn" in report.line()


def test_a_pair_of_such_turns_is_refused_by_name(in_bytes: Make) -> None:
    other = [THOUGHT["completion"][0], user("and?"), bot("<think>c</think>\n\nnever")]
    row = {"prompt": THOUGHT["prompt"], "chosen": THOUGHT["completion"], "rejected": other}
    with pytest.raises(UserError, match=r"row 0: prompt: the chat template shows the turns before turn 1 otherwise"):
        encoded(in_bytes(THINKING), row, "pairs")


def test_a_template_that_ends_the_last_turn_alone_is_split_too(in_bytes: Make) -> None:
    """gpt-oss ends a reply with another token once the conversation has gone on."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<|done|>"
        "{% else %}<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = in_bytes(template, specials=["<|im_start|>", "<|im_end|>", "<|done|>"], eos="<|done|>")
    assert [text for _, text in seen(tokenizer, TWO)] == [[("yo<|done|>", True)], [("no<|done|>", True)]]


OPENED = (
    "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}"
    "{% else %}<A>{{ m.content.split('</think>')[-1] }}</s>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<A><think>\n{% endif %}"
)


def test_a_reply_that_the_generation_prompt_has_begun_goes_on_from_there(in_bytes: Make) -> None:
    """DeepSeek-R1's template opens <think> and leaves reasoning out of replies: what is learned is what is sampled."""
    tokenizer = in_bytes(OPENED, specials=["</s>"], eos="</s>")
    row = {"prompt": [user("hi")], "completion": [bot("<think>\nhm</think>yo")]}
    assert seen(tokenizer, row) == [("<U>hi<A><think>\n", [("hm</think>yo</s>", True)])]
    with pytest.raises(
        UserError, match=r"row 0: completion: does not go on from '<U>hi<A><think>\\n', .*begin it with '<think>"
    ):
        encoded(tokenizer, ONE)


def test_several_such_replies_become_examples_of_their_own(in_bytes: Make) -> None:
    tokenizer = in_bytes(OPENED, specials=["</s>"], eos="</s>")
    replies = [bot("<think>\nhm</think>yo"), user("and?"), bot("<think>\nno</think>no")]
    assert seen(tokenizer, {"prompt": [user("hi")], "completion": replies}) == [
        ("<U>hi<A><think>\n", [("hm</think>yo</s>", True)]),
        ("<U>hi<A>yo</s><U>and?<A><think>\n", [("no</think>no</s>", True)]),
    ]


def test_reasoning_under_a_generation_prompt_that_rules_it_out_is_refused(in_bytes: Make) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}<A>"
        "{% if '<think>' not in m.content %}"
        "<think></think>{% endif %}{{ m.content }}</s>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<A><think></think>{% endif %}"
    )
    tokenizer = in_bytes(template, specials=["</s>"], eos="</s>")
    assert seen(tokenizer, ONE) == [("<U>hi<A><think></think>", [("yo</s>", True)])]
    with pytest.raises(UserError, match="take its reasoning out"):
        encoded(tokenizer, {"prompt": [user("hi")], "completion": [bot("<think>hm</think>yo")]})


# ---- the rest of a row -----------------------------------------------------------------------------------------------
def test_turns_that_are_excepted_are_not_learned(in_bytes: Make) -> None:
    row = {"prompt": [user("hi")], "completion": [bot("yo", weight=0), user("and?"), bot("no")]}
    assert seen(in_bytes(), row) == [(HEAD + "yo<|im_end|>" + BETWEEN, [("no<|im_end|>", True)])]
    row["completion"] = [bot("yo"), user("and?"), bot("no", train=False)]
    assert seen(in_bytes(), row) == [(HEAD, [("yo<|im_end|>", True)])]


def test_a_prompt_that_ends_in_the_beginning_of_a_reply_is_gone_on_with(in_bytes: Make) -> None:
    row = {"prompt": [user("hi"), bot("well, ")], "completion": [bot("yo")]}
    assert seen(in_bytes(), row) == [(HEAD + "well, ", [("yo<|im_end|>", True)])]
    assert in_bytes().decode(encoded(in_bytes(), {"prompt": row["prompt"]}, "prompts")[0].prompt_ids) == HEAD + "well, "


def test_tools_reach_the_template_and_one_without_them_is_refused(in_bytes: Make) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    template = "{% if tools %}<tools>{{ tools[0].function.name }}</tools>{% endif %}" + MARKED
    assert seen(in_bytes(template), ONE | {"tools": tools}) == [("<tools>now</tools>" + HEAD, [("yo<|im_end|>", True)])]
    with pytest.raises(UserError, match=r"row 0: tools: the chat template shows no tools"):
        encoded(in_bytes(), ONE | {"tools": tools})


def test_template_options_of_a_row_reach_the_template(in_bytes: Make) -> None:
    template = "{% if brief %}Be brief.{% endif %}" + MARKED
    assert seen(in_bytes(template), ONE | {"chat_template_kwargs": {"brief": True}})[0][0] == "Be brief." + HEAD


def test_messages_without_a_chat_template_are_refused_by_name(in_bytes: Make) -> None:
    with pytest.raises(
        UserError, match=r"row 0: prompt: has messages, and the tokenizer has no chat template.*data.chat=false"
    ):
        encoded(in_bytes(None), ONE)


def test_messages_after_a_prompt_of_text_are_refused(in_bytes: Make) -> None:
    with pytest.raises(UserError, match="row 0: completion: messages after a prompt of text"):
        encoded(in_bytes(), {"prompt": "hi", "completion": [bot("yo")]})


def test_b13_the_full_stop_set_ends_turns(in_bytes: Make) -> None:
    """Gemma ends turns with a token that is not the tokenizer's EOS; models stop at both."""
    template = (
        "{{ bos_token }}{% for m in messages %}<start>{{ m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<start>assistant\n{% endif %}"
    )
    tokenizer = in_bytes(template, specials=["<bos>", "<eos>", "<start>", "<end>"], eos="<eos>", bos="<bos>")
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert [text for _, text in seen(tokenizer, ONE, stop_ids={end})] == [[("yo<end>", True)]]
    # Told of one end only, the model must still learn to stop.
    assert [text for _, text in seen(tokenizer, ONE)] == [[("yo<end><eos>", True)]]


@pytest.mark.parametrize("text", ["a<|im_end|>b", "a<|im_end|><|im_end|>b"])
def test_an_end_token_inside_a_reply_is_refused_by_name(in_bytes: Make, text: str) -> None:
    with pytest.raises(UserError, match=r"row 0: completion: has an end token \(<\|im_end\|>\) before its end"):
        encoded(in_bytes(), {"prompt": "x", "completion": text})
    with pytest.raises(UserError, match="has an end token"):
        encoded(in_bytes(), {"prompt": [user("x")], "completion": [bot(text)]})


def test_b12_another_template_gives_other_ids(in_bytes: Make) -> None:
    """Nothing is kept between calls: one changed character shows."""
    tokenizer = in_bytes()
    before = encoded(tokenizer, ONE)[0]
    tokenizer.chat_template = tokenizer.chat_template.replace("}}<|im_end|>", "}} <|im_end|>")
    after = encoded(tokenizer, ONE)[0]
    assert before.prompt_ids != after.prompt_ids
    assert before.id == after.id  # the row is the same; what depends on tokens is keyed by tokens


def test_a_continuation_gets_no_space_of_the_tokenizers_own(sentencepiece: PreTrainedTokenizerBase) -> None:
    """Alone, "b" is the token "▁b"; after "a=" a model would be taught to say " b"."""
    [example] = encoded(sentencepiece, {"prompt": "a=", "completion": "b"})
    ids = [sentencepiece.convert_tokens_to_ids(piece) for piece in ("▁a", "=", "b", "</s>")]
    assert example.prompt_ids + example.completions[0] == ids
    assert sentencepiece.encode("a=b", add_special_tokens=False) == ids[:3]
    [spaced] = encoded(sentencepiece, {"prompt": "a=", "completion": " b"})
    assert spaced.completions[0] == sentencepiece.convert_tokens_to_ids(["▁b", "</s>"])


def test_a_rewritten_row_is_told_apart_from_other_problems(in_bytes: Make) -> None:
    template = Template(in_bytes(THINKING))
    with pytest.raises(Rewritten):
        template.render(THOUGHT, [THOUGHT["completion"]])
    with pytest.raises(RowProblem, match="two assistant's turns in a row"):
        template.render_turns({"prompt": [user("a")]}, [bot("b"), bot("c")])


def test_a_tokenizer_without_an_end_token_is_refused(in_bytes: Make) -> None:
    tokenizer = in_bytes()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no EOS token"):
        Template(tokenizer)
    assert Template(tokenizer, stop_ids={7}).eos == 7
