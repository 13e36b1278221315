"""Faults that people who train language models have reported: which test shows that each is absent here.

COVERED is the list; the tests below are those that had no other place.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment.batch import collate
from alignment.data.encode import encode
from alignment.losses.dpo import pairs_from_tokens
from alignment.losses.simpo import simpo

TESTS = Path(__file__).resolve().parents[1]

# What goes wrong elsewhere -> the tests that would show it.
COVERED: dict[str, list[str]] = {
    # tokens and chat templates
    "a token merges across prompt and completion": [
        "data/test_encode.py::test_b01_prompt_and_completion_are_joined_as_tokens",
        "data/test_encode.py::test_texts_are_encoded_as_they_are_alone",
    ],
    "two BOS tokens, or another number in training than in sampling": [
        "data/test_encode.py::test_b02_one_bos_from_the_template",
        "data/test_encode.py::test_b02_one_bos_before_text",
        "data/test_pitfalls.py::test_what_is_trained_on_is_what_is_sampled_from",
        "reward/test_model.py::test_its_tokens_are_those_of_its_training",
    ],
    "EOS missing, doubled, or invented on a cut completion": [
        "data/test_encode.py::test_b03_one_eos_that_counts_and_none_on_a_cut_completion",
    ],
    "pad token equals EOS": [
        "data/test_encode.py::test_b04_padding_with_eos_hides_no_eos",
        "test_batch.py::test_masks_come_from_lengths_when_pad_equals_eos",
    ],
    "the assistant's header is learned": ["data/test_template.py::test_b05_the_role_header_is_not_learned"],
    "an assistant mask of zeros": [
        "data/test_template.py::test_b07_a_template_without_marks_learns_the_same_turns_as_one_with_them",
        "data/test_template.py::test_b07_a_row_without_a_learned_token_is_refused_by_name",
        "data/test_template.py::test_b07_a_template_that_drops_what_was_said_is_refused_by_name",
    ],
    "the first completion token is not learned, or an extra one is": [
        "model/test_logprobs.py::test_numbers_of_log_probs_and_of_response_tokens_agree",
        "data/test_pitfalls.py::test_as_many_terms_as_completion_tokens",
    ],
    "stale tokens after a change of the template": [
        "data/test_template.py::test_b12_another_template_gives_other_ids",
        "data/test_prepare.py::test_whatever_changes_the_examples_is_another_entry",
        "data/test_prepare.py::test_the_second_start_takes_the_cache_and_says_so",
    ],
    "only one of several EOS ids is known": [
        "data/test_template.py::test_b13_the_full_stop_set_ends_turns",
        "rollout/test_hf.py::test_finished_means_the_last_token_is_a_stop_token",
    ],
    # truncation
    "more of the prompt is cut than the overflow, or on the wrong side": [
        "data/test_encode.py::test_b14_only_the_overflow_is_cut_and_on_the_side_asked_for",
        "data/test_encode.py::test_limits_hold_and_no_more_than_the_overflow_goes",
    ],
    "a completion is cut away whole": [
        "data/test_encode.py::test_b15_a_completion_is_never_cut_away_whole",
        "data/test_encode.py::test_b15_dropped_rows_are_counted_and_none_left_is_an_error",
        "data/test_pitfalls.py::test_a_pair_cut_to_the_limit_has_a_finite_loss",
    ],
    # what SFT, reward models, labels and caches share with the rest
    "log-probs and their sums in low precision": [
        "model/test_head.py::test_bf16_product_is_upcast_before_the_softmax",
        "losses/test_sft.py::test_low_precision_logits_are_upcast",
        "data/test_pitfalls.py::test_sums_and_margins_of_long_completions_keep_their_digits",
    ],
    "a mean of the means of microbatches": [
        "losses/test_reduce.py::test_token_nll_of_two_microbatches",
        "algorithm/test_sft.py::test_the_cut_into_microbatches_changes_nothing",
        "data/test_datamodule.py::test_every_microbatch_knows_the_tokens_of_its_whole_step",
    ],
    "accumulation counts twice or not at all": [
        "run/test_exact.py::test_the_microbatch_changes_neither_loss_nor_gradient",
        "algorithm/test_reward_model.py::test_the_cut_into_microbatches_changes_nothing",
        "algorithm/test_prm.py::test_the_cut_into_microbatches_changes_nothing",
        "run/test_unpaired.py::test_the_cut_of_a_step_changes_neither_loss_nor_gradient",
    ],
    "masked tokens stay in the denominator, or a masked batch is NaN": [
        "losses/test_reduce.py::test_masked_tokens_leave_numerator_and_denominator",
        "losses/test_sft.py::test_sft_all_masked",
    ],
    "stored reference log-probs on the wrong rows": [
        "distributed/test_ddp.py::test_stored_reference_logprobs_belong_to_their_rows_on_both_ranks",
        "ref_strategy/test_store.py::test_what_is_written_is_read_by_key",
        "ref_strategy/test_store.py::test_one_changed_token_is_another_example",
        "run/test_reference.py::test_the_curves_do_not_depend_on_who_holds_the_reference",
        "data/test_encode.py::test_ids_depend_on_content_alone",
    ],
    "a reward model reads the policy's ids or template": [
        "reward/test_model.py::test_scores_are_those_of_the_text_itself",
        "reward/test_model.py::test_its_tokens_are_those_of_its_training",
    ],
    "KTO pairs a row with itself, or has one class": [
        "losses/test_kto.py::test_mismatch_is_a_rotation_that_no_row_escapes",
        "losses/test_kto.py::test_a_batch_of_one_class_has_no_nan_in_its_loss",
    ],
    "labels that say nothing": ["data/test_malformed.py::test_one_problem_names_file_row_and_field"],
    "the score stands on the wrong token": [
        "model/test_scorer.py::test_a_score_is_the_head_at_the_last_token",
        "model/test_scorer.py::test_what_stands_in_the_padding_does_not_matter",
        "losses/test_token_rewards.py::test_the_score_stands_on_the_last_token",
        "losses/test_prm.py::test_labels_stand_on_the_last_separator_token",
    ],
    "metrics count padding": [
        "algorithm/test_meter.py::test_masked_and_missing_values_leave_numerator_and_denominator"
    ],
    "the head of a reward model is lost, random or two-dimensional": [
        "model/test_scorer.py::test_the_saved_folder_scores_the_same_in_plain_transformers",
        "model/test_scorer.py::test_a_missing_or_foreign_head_is_refused",
        "model/test_scorer.py::test_the_head_is_trained_in_full_rank_beside_an_adapter",
    ],
    "ties count as correct": ["losses/test_reward_model.py::test_ties_are_reported"],
    "the order of the data changes on resume": [
        "run/test_exact.py::test_a_killed_run_goes_on_to_the_same_weights_and_metrics",
        "data/test_datamodule.py::test_the_stream_is_a_function_of_seed_and_position_alone",
    ],
    "metrics hold graphs or grow": [
        "algorithm/test_meter.py::test_nothing_with_a_graph_is_kept",
        "run/test_memory.py::test_resident_memory_is_flat_between_steps_50_and_200",
    ],
}


@pytest.mark.parametrize("fault", COVERED)
def test_every_test_that_is_named_is_there(fault: str) -> None:
    for name in COVERED[fault]:
        file, _, function = name.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}${% endif %}"
)


def test_what_is_trained_on_is_what_is_sampled_from(toy: Callable[..., Any]) -> None:
    """Rollouts and evaluation take the prompt of form `prompts`: BOS, "ab", and all that opens the reply ("$")."""
    tokenizer = toy(TEMPLATE.replace("{{ m.content }}", "{{ '$' if m.role == 'assistant' }}{{ m.content }}"))
    ask, reply = [{"role": "user", "content": "ab"}], lambda text: [{"role": "assistant", "content": text}]
    rows: dict[Any, dict[str, Any]] = {
        "prompts": {"prompt": ask},
        "demonstrations": {"prompt": ask, "completion": reply("b")},
        "pairs": {"prompt": ask, "chosen": reply("b"), "rejected": reply("a")},
        "unpaired": {"prompt": ask, "completion": reply("b"), "label": True},
        "ranked": {"prompt": ask, "completions": [reply("b"), reply("a")]},
    }
    for form, row in rows.items():
        (example,), _ = encode([row], form, tokenizer, max_prompt_tokens=None, max_completion_tokens=None)
        assert example.prompt_ids == [1, 8, 6], form
        assert all(ids[-1] == 2 and ids.count(2) == 1 and 1 not in ids for ids in example.completions), form


def test_as_many_terms_as_completion_tokens(toy: Callable[..., Any]) -> None:
    """Under a uniform model of 4 tokens a completion of "b", EOS is worth 2 ln(1/4), one without its first -1.386."""
    (example,), _ = encode(
        [{"prompt": "a a", "chosen": "b", "rejected": "a$a"}],
        "pairs",
        toy(),
        max_prompt_tokens=None,
        max_completion_tokens=None,
    )
    batch = collate([example])
    logprobs = torch.where(batch.completion_mask, math.log(1 / 4), 0.0)
    pairs = pairs_from_tokens(logprobs, None, batch.loss_mask)
    torch.testing.assert_close(pairs.chosen, torch.tensor([-2.772589]), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(pairs.rejected, torch.tensor([-5.545177]), rtol=1e-6, atol=0.0)


def test_a_pair_cut_to_the_limit_has_a_finite_loss(toy: Callable[..., Any]) -> None:
    """Prompt 4, chosen 3, rejected 12, at most 8 together: 3 and 4 are kept; an average of no token is NaN."""
    row = {"prompt": "a" * 4, "chosen": "bb", "rejected": "a" * 11}  # and an EOS each
    (example,), report = encode([row], "pairs", toy(), max_prompt_tokens=None, max_completion_tokens=None, max_length=8)
    assert [len(ids) for ids in (example.prompt_ids, *example.completions)] == [4, 3, 4]
    assert report.num_cut_completions == 1
    batch = collate([example])
    logprobs = torch.where(batch.loss_mask, torch.tensor([[-1.0], [-1.5]]), 0.0)
    loss = simpo(pairs_from_tokens(logprobs, None, batch.loss_mask), beta=2.0, gamma_beta_ratio=0.5)
    # averages -1 and -1.5, so 2 * (0.5 - 0.5) = 0: -log sigmoid(0) = ln 2
    torch.testing.assert_close(loss, torch.tensor([0.693147]), rtol=1e-5, atol=1e-6)


def test_sums_and_margins_of_long_completions_keep_their_digits() -> None:
    """In bfloat16 300 * -1.5 adds up to -512, and -450.6 and -449.4 are the same number."""
    logprobs = torch.full((2, 300), -1.5)
    logprobs[0, 0], logprobs[1, 0] = -2.1, -0.9
    pairs = pairs_from_tokens(logprobs, None, torch.ones(2, 300, dtype=torch.bool))
    torch.testing.assert_close(pairs.chosen - pairs.rejected, torch.tensor([-1.2]), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(pairs.chosen, torch.tensor([-450.6]), rtol=1e-6, atol=0.0)
