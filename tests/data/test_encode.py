"""Boundaries, BOS, EOS, padding and truncation, with the numbers of faults that were reported elsewhere (b01 ...)."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from alignment.batch import collate
from alignment.data.encode import Limits, Report, cut, encode, fit, quantiles
from alignment.data.schema import Row
from alignment.errors import UserError

Make = Callable[..., Any]
PAIR = {"prompt": "a ", "chosen": "$b", "rejected": "b$"}


def encoded(tokenizer: Any, rows: Any, form: Any, **options: Any) -> list:
    limits: dict[str, Any] = {"max_prompt_tokens": None, "max_completion_tokens": None}
    return encode(rows if isinstance(rows, list) else [rows], form, tokenizer, **(limits | options))[0]


# ---- A. tokens -------------------------------------------------------------------------------------------------------
def test_b01_prompt_and_completion_are_joined_as_tokens(toy: Make) -> None:
    """The joint encoding of "a $b" is [3, 7, 4]: the prompt's last token would be half of " $"."""
    tokenizer = toy()
    assert tokenizer.encode("a $b") == [3, 7, 4]
    [example] = encoded(tokenizer, PAIR, "pairs")
    assert example.prompt_ids == [3, 5]
    assert [ids[:-1] for ids in example.completions] == [[6, 4], [4, 6]]
    assert 7 not in example.prompt_ids + example.completions[0] + example.completions[1]
    batch = collate([example])
    assert (batch.loss_mask.sum(-1) - 1).tolist() == [2, 2]  # besides the EOS


BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("adds_bos", [True, False])
def test_b02_one_bos_from_the_template(toy: Make, adds_bos: bool) -> None:
    """Encoding the rendered text once more with special tokens gives [1, 1, 8]."""
    tokenizer = toy(BOS_TEMPLATE, adds_bos=adds_bos)
    user, bot = [{"role": "user", "content": "ab"}], [{"role": "assistant", "content": "b"}]
    rows = {
        "prompts": {},
        "demonstrations": {"completion": bot},
        "pairs": {"chosen": bot, "rejected": [{"role": "assistant", "content": "a"}]},
        "ranked": {"completions": [bot, [{"role": "assistant", "content": "a"}]]},
        "unpaired": {"completion": bot, "label": True},
        "stepwise": {"completions": ["b"], "labels": [True]},
    }
    for form, more in rows.items():
        [example] = encoded(tokenizer, {"prompt": user, **more}, form, step_separator="$")
        assert example.prompt_ids == [1, 8]
        assert 1 not in [i for ids in example.completions for i in ids]


def test_b02_one_bos_before_text(toy: Make) -> None:
    tokenizer = toy(adds_bos=True)
    for prompt in ("ab", "<s>ab", "<s><s>ab"):
        [example] = encoded(tokenizer, {"prompt": prompt, "completion": "b"}, "demonstrations")
        assert (example.prompt_ids, example.completions) == ([1, 8], [[4, 2]])
    assert encoded(toy(), {"prompt": "ab"}, "prompts")[0].prompt_ids == [8]  # a tokenizer that adds none


def test_b03_one_eos_that_counts_and_none_on_a_cut_completion(toy: Make) -> None:
    tokenizer = toy()
    for completion in ("$b", "$b</s>", "$b</s></s>"):
        [example] = encoded(tokenizer, {"prompt": "a ", "completion": completion}, "demonstrations")
        assert example.completions == [[6, 4, 2]]
        assert example.loss_masks is None  # every token counts
    template = toy("{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}")
    row = {"prompt": [{"role": "user", "content": "a "}], "completion": [{"role": "assistant", "content": "$b"}]}
    assert encoded(template, row, "demonstrations")[0].completions == [[6, 4, 2]]
    examples, report = encode(
        [{"prompt": "a ", "completion": "b" * 9}, {"prompt": "a", "completion": "b" * 10}],
        "demonstrations",
        tokenizer,
        max_prompt_tokens=None,
        max_completion_tokens=6,
    )
    assert [example.completions[0].count(2) for example in examples] == [0, 0]
    assert [len(example.completions[0]) for example in examples] == [6, 6]
    assert report.num_cut_completions == 2


def test_b04_padding_with_eos_hides_no_eos(toy: Make) -> None:
    tokenizer = toy(pad="</s>")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    rows = [{"prompt": "a", "completion": "$a"}, {"prompt": "a", "completion": " $"}]
    batch = collate(encoded(tokenizer, rows, "demonstrations"))
    labels = batch.completion_ids.masked_fill(~batch.loss_mask, -100)
    assert labels.tolist() == [[6, 3, 2], [7, 2, -100]]
    assert int(batch.loss_mask.sum()) == 5
    turns = toy("{{ bos_token }}{% for m in messages %}{{ m.content }}</s>{% endfor %}", pad="</s>")
    asked = {"prompt": [{"role": "user", "content": " "}, {"role": "user", "content": "$"}]}
    [example] = encoded(turns, asked, "prompts")
    assert example.prompt_ids == [1, 5, 2, 6, 2]
    assert int(collate([example]).prompt_mask.sum()) == 5


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    prompt=st.text("ab $", min_size=1, max_size=12),
    chosen=st.text("ab $", min_size=1),
    rejected=st.text("ab $", min_size=1),
)
def test_texts_are_encoded_as_they_are_alone(toy: Make, prompt: str, chosen: str, rejected: str) -> None:
    assume(chosen != rejected)
    tokenizer = toy()
    [example] = encoded(tokenizer, {"prompt": prompt, "chosen": chosen, "rejected": rejected}, "pairs")
    assert example.prompt_ids == tokenizer.encode(prompt)
    assert example.completions == [[*tokenizer.encode(text), 2] for text in (chosen, rejected)]


# ---- B. truncation ---------------------------------------------------------------------------------------------------
def limits(
    length: int | None = None, *, prompt: int | None = None, completion: int | None = None, side: Any = "keep_end"
) -> Limits:
    return Limits(prompt, completion, length, side)


@pytest.mark.parametrize(("side", "prompt"), [("keep_end", [3, 4, 5, 6, 7, 8]), ("keep_start", [1, 2, 3, 4, 5, 6])])
def test_b14_only_the_overflow_is_cut_and_on_the_side_asked_for(side: Any, prompt: list[int]) -> None:
    completion = [11, 12, 13, 14]
    assert fit(list(range(1, 9)), [completion], limits(10, side=side)) == (prompt, [completion])


def test_b15_a_completion_is_never_cut_away_whole() -> None:
    assert fit(list(range(20)), [[1, 2, 3]], limits(16)) == "prompt fills max_length (16)"
    assert fit(list(range(16)), [[1, 2, 3]], limits(16)) == "prompt fills max_length (16)"
    assert fit(list(range(15)), [[1, 2, 3]], limits(16)) == (list(range(2, 15)), [[1, 2, 3]])
    prompt, completions = list(range(4)), [list(range(3)), list(range(12))]
    assert fit(prompt, completions, limits(8)) == (prompt, [list(range(3)), list(range(4))])


def test_b15_dropped_rows_are_counted_and_none_left_is_an_error(toy: Make) -> None:
    long, short = {"prompt": "b" * 20, "completion": "$b"}, {"prompt": "a", "completion": "$b"}
    examples, report = encode(
        [long, short], "demonstrations", toy(), max_prompt_tokens=None, max_completion_tokens=None, max_length=16
    )
    assert len(examples) == 1
    assert report.dropped == {"prompt fills max_length (16)": 1}
    assert "1 dropped: prompt fills max_length (16)" in report.line()
    with pytest.raises(
        UserError, match=r"of 1 rows as demonstrations no example is left \(1 dropped: prompt fills max_length"
    ):
        encoded(toy(), long, "demonstrations", max_length=16)


def test_nothing_to_encode_is_an_error(toy: Make) -> None:
    with pytest.raises(UserError, match=r"of 0 rows as prompts no example is left \(there were none\)"):
        encoded(toy(), [], "prompts")


def test_a_limit_without_room_is_refused(toy: Make) -> None:
    for name, value in {"max_prompt_tokens": 0, "max_completion_tokens": 0, "max_length": 1}.items():
        with pytest.raises(UserError, match=f"encoding.{name}: {value} leaves no room"):
            encoded(toy(), PAIR, "pairs", **{name: value})


def test_prompts_that_are_too_long_can_be_dropped_instead_of_cut(toy: Make) -> None:
    rows = [{"prompt": "b" * n} for n in (3, 4, 5)]
    examples, report = encode(
        rows, "prompts", toy(), max_prompt_tokens=4, max_completion_tokens=None, truncation="drop"
    )
    assert [len(example.prompt_ids) for example in examples] == [3, 4]
    assert report.dropped == {"prompt longer than max_prompt_tokens (4)": 1}
    assert fit([1, 2], [[1, 2, 3]], limits(4, side="drop")) == "prompt and completion longer than max_length (4)"


def test_a_cut_prompt_keeps_its_bos(toy: Make) -> None:
    tokenizer = toy(adds_bos=True)
    for side, expected in {"keep_end": [1, 4, 3], "keep_start": [1, 6, 4]}.items():
        [example] = encoded(tokenizer, {"prompt": "$bba"}, "prompts", max_prompt_tokens=3, truncation=side)
        assert example.prompt_ids == expected
    assert cut([1, 5, 6], 1, "keep_end", 1) == [6]


IDS = st.lists(st.integers(3, 9), min_size=1, max_size=20)


@given(
    prompt=IDS,
    completions=st.lists(IDS, max_size=3),
    length=st.none() | st.integers(2, 25),
    max_prompt=st.none() | st.integers(1, 25),
    max_completion=st.none() | st.integers(1, 25),
    side=st.sampled_from(["keep_end", "keep_start", "drop"]),
)
def test_limits_hold_and_no_more_than_the_overflow_goes(
    prompt: list[int],
    completions: list[list[int]],
    length: int | None,
    max_prompt: int | None,
    max_completion: int | None,
    side: Any,
) -> None:
    fitted = fit(prompt, completions, limits(length, prompt=max_prompt, completion=max_completion, side=side))
    if isinstance(fitted, str):
        longest = max([min(len(c), max_completion or len(c)) for c in completions], default=0)
        assert len(prompt) > (max_prompt or math.inf) or len(prompt) + longest > (length or math.inf)
        return
    kept, rest = fitted
    longest = max(map(len, rest), default=0)
    assert len(kept) <= (max_prompt or math.inf)
    assert len(kept) + longest <= (length or math.inf)
    assert kept in (prompt[: len(kept)], prompt[len(prompt) - len(kept) :])
    assert len(kept) >= 1
    for before, after in zip(completions, rest, strict=True):
        assert after == before[: len(after)] and after
    if len(kept) < len(prompt):
        assert len(kept) in (max_prompt, (length or 0) - longest)
        assert side != "drop"


# ---- rows ------------------------------------------------------------------------------------------------------------
ROWS = [{"prompt": "a" * n, "answer": str(n), "tags": {"n": n, "list": [n, None, 1.5]}} for n in range(1, 8)]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(order=st.permutations(range(len(ROWS))))
def test_ids_depend_on_content_alone(toy: Make, order: list[int]) -> None:
    first = {example.columns["answer"]: example.id for example in encoded(toy(), ROWS, "prompts")}
    shuffled = [dict(reversed(ROWS[i].items())) for i in order]
    assert {example.columns["answer"]: example.id for example in encoded(toy(), shuffled, "prompts")} == first
    assert len(set(first.values())) == len(ROWS)


def test_columns_reach_the_example_and_where_a_row_is_from_does_not_change_its_id(toy: Make) -> None:
    row = Row(prompt="a", answer="1", extra=[1])
    row.where = "f.jsonl:3"
    plain, placed = encoded(toy(), [dict(row), row], "prompts")
    assert plain.columns == placed.columns == {"prompt": "a", "answer": "1", "extra": [1]}
    assert type(placed.columns) is dict
    assert plain.id == placed.id


def test_errors_name_the_place_of_a_row(toy: Make) -> None:
    row = Row(prompt=[{"role": "user", "content": "a"}])
    row.where = "f.jsonl:3"
    with pytest.raises(UserError, match=r"- f.jsonl:3: prompt: has messages"):
        encoded(toy(), [{"prompt": "b"}, row], "prompts")


def test_rows_that_cannot_be_used_can_be_dropped(toy: Make, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "b"}, {"prompt": [{"role": "user", "content": "a"}]}, {"prompt": "\n"}]
    options: dict[str, Any] = {"max_prompt_tokens": None, "max_completion_tokens": None, "bad_rows": "drop"}
    examples, report = encode(rows, "prompts", toy(), **options)
    assert [example.prompt_ids for example in examples] == [[4]]
    assert report.dropped == {"cannot be used": 2}
    assert "2 of 3 rows dropped:\nrow 1: prompt: has messages" in caplog.text
    assert "row 2: prompt: has no token" in caplog.text


def test_plain_text_learns_all_but_its_first_token(toy: Make) -> None:
    """Something has to come before the first token that is predicted: the BOS where there is one."""
    [example] = encoded(toy(), {"prompt": "", "completion": "a$b"}, "demonstrations")
    assert (example.prompt_ids, example.completions, example.loss_masks) == ([3], [[6, 4, 2]], None)
    [example] = encoded(toy(adds_bos=True), {"prompt": "", "completion": "a$b"}, "demonstrations")
    assert (example.prompt_ids, example.completions) == ([1], [[3, 6, 4, 2]])


def test_ranked_lists_of_different_lengths_are_refused_by_name(toy: Make) -> None:
    rows = [{"prompt": "a", "completions": ["a", "b"]}] * 2 + [{"prompt": "b", "completions": ["a", "b", "$"]}]
    assert encoded(toy(), rows[0], "ranked")[0].completions == [[3, 2], [4, 2]]
    rows += [{"prompt": "b", "completions": ["a", "b", "$", "a$"]}]
    said = r"completions: 3 of them, but 2 rows have 2(?s:.*)completions: 4 of them.* must be equally long"
    with pytest.raises(UserError, match=said):
        encoded(toy(), rows, "ranked")
    kept = encoded(toy(), rows, "ranked", bad_rows="drop")
    assert [len(example.completions) for example in kept] == [2, 2]


def test_labels_stay_with_unpaired_rows(toy: Make) -> None:
    [example] = encoded(toy(), {"prompt": "a", "completion": "b", "label": False}, "unpaired")
    assert example.columns["label"] is False and example.completions == [[4, 2]]


# ---- stepwise --------------------------------------------------------------------------------------------------------
def test_step_labels_lie_on_the_last_token_of_each_separator(toy: Make) -> None:
    """Steps of 3 and 2 tokens after a prompt of 2: labels at places 5 and 8, as `prm_label_layout` has them."""
    vectors = json.loads((Path(__file__).parent / "vectors.json").read_text())
    layout = next(vector for vector in vectors if vector["name"] == "prm_label_layout")
    row = {"prompt": "bb", "completions": ["baa", "ba"], "labels": [True, False]}
    [example] = encoded(toy(), row, "stepwise", step_separator="$")
    ids, mask = example.completions[0], example.loss_masks[0]
    assert len(example.prompt_ids + ids) == len(layout["expected"]["input_ids"])
    labels = iter(example.columns["labels"])
    placed = [-100] * len(example.prompt_ids) + [int(next(labels)) if learned else -100 for learned in mask]
    assert placed == layout["expected"]["labels"]
    assert [token for token, learned in zip(ids, mask, strict=True) if learned] == [6, 6]


def test_a_separator_of_several_tokens_counts_once_and_cut_steps_lose_their_labels(toy: Make) -> None:
    row = {"prompt": "a", "completions": ["b", "bb", "b"], "labels": [True, False, True]}
    [example] = encoded(toy(), row, "stepwise", step_separator="$$")
    assert example.completions == [[4, 6, 6, 4, 4, 6, 6, 4, 6, 6]]
    assert [i for i, learned in enumerate(example.loss_masks[0]) if learned] == [2, 6, 9]
    [example] = encoded(toy(), row, "stepwise", step_separator="$$", max_completion_tokens=8)
    assert example.columns["labels"] == [True, False] and sum(example.loss_masks[0]) == 2
    assert row["labels"] == [True, False, True]
    with pytest.raises(UserError, match="1 dropped: nothing to learn is left of a cut completion"):
        encoded(toy(), row, "stepwise", step_separator="$$", max_completion_tokens=2)
    with pytest.raises(UserError, match=r"the separator has no token: type encoding.step_separator="):
        encoded(toy(), row, "stepwise", step_separator="\n")


# ---- report ----------------------------------------------------------------------------------------------------------
def test_the_report_counts_lengths_before_the_cut(toy: Make) -> None:
    rows = [{"prompt": "a" * n, "completion": "b" * 2} for n in (1, 2, 3, 10)]
    _, report = encode(rows, "demonstrations", toy(), max_prompt_tokens=3, max_completion_tokens=2)
    assert report.summary() == {
        "form": "demonstrations",
        "rows": 4,
        "examples": 4,
        "dropped": {},
        "conflicts": 0,
        "split_rows": 0,
        "cut_prompts": 1,
        "cut_completions": 4,
        "cut_share": 5 / 8,
        "prompt_tokens": {"min": 1, "median": 2, "p95": 3, "max": 10},
        "completion_tokens": {"min": 3, "median": 3, "p95": 3, "max": 3},
    }
    assert json.loads(json.dumps(report.summary())) == report.summary()
    line = report.line()
    assert line.startswith("4 examples of 4 rows as demonstrations; prompt tokens min 1, median 2, p95 3, max 10; ")
    assert "1 prompts cut (25.0%); 4 completions cut (100.0%)" in line
    assert quantiles([]) == {} and Report("prompts").cut_share == 0.0


def test_an_unknown_form_is_a_mistake_of_the_caller(toy: Make) -> None:
    with pytest.raises(ValueError, match="no form 'chats'"):
        encoded(toy(), {"prompt": "a"}, "chats")


def test_completions_that_the_cut_makes_equal_are_dropped(toy: Callable[..., Any]) -> None:
    """Chosen and rejected differ after the limit alone: such a pair prefers nothing."""
    rows = [{"prompt": "a", "chosen": "aab", "rejected": "aaa"}, {"prompt": "a", "chosen": "b", "rejected": "a"}]
    examples, counts = encode(rows, "pairs", toy(), max_prompt_tokens=None, max_completion_tokens=1)
    assert [example.completions for example in examples] == [[[4], [3]]]
    assert counts.dropped == {"two completions are the same tokens": 1}


def test_the_report_counts_what_was_left_out_before(toy: Callable[..., Any]) -> None:
    _, counts = encode([{"prompt": "a"}], "prompts", toy(), max_prompt_tokens=None, max_completion_tokens=None)
    counts.add(Counter({"the same as an earlier row": 2}), 1, "f:1 and f:2")
    assert counts.summary()["rows"] == 3
    assert counts.summary()["dropped"] == {"the same as an earlier row": 2}
    assert counts.summary()["conflicts"] == 1
    assert counts.line().startswith("1 examples of 3 rows as prompts")
    assert counts.line().endswith(
        "2 dropped: the same as an earlier row; 1 questions answered in two ways (the first: f:1 and f:2)"
    )
