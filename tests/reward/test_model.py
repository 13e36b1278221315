"""A trained reward model as a reward: the tokens it was trained on, whatever the policy speaks."""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from alignment.batch import Example, collate
from alignment.data.encode import encode
from alignment.errors import UserError
from alignment.model.scorer import completion_scores
from alignment.model.tiny import Tiny
from alignment.reward.combine import RewardSet
from alignment.reward.model import RewardModel, Tokens, _batches

ASKED = [{"role": "user", "content": "What is 2 + 2?"}]
LONG = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 1? Think first."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model whose scores are spread."""
    torch.manual_seed(0)
    source = Tiny(path=str(tmp_path_factory.mktemp("models")))
    place = tmp_path_factory.mktemp("reward")
    source.save(source.scorer(), place)
    return place


def by_transformers(folder: Path, texts: list[str]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [float(model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits) for text in texts]


def chatml(*turns: tuple[str, str]) -> str:
    """Up to the end token of the last turn: the line break behind it is the template's, nobody was trained on it."""
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns).removesuffix("\n")


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_scores_are_those_of_the_text_itself(folder: Path, batch_size: int) -> None:
    """B51. Prompts with two completions, with one, as plain text, and one whose reply was begun already."""
    rows: list[dict[str, Any]] = [{"prompt": ASKED}, {"prompt": ASKED}, {"prompt": LONG}, {"prompt": "2 + 2 ="}]
    rows.append({"prompt": [*ASKED, {"role": "assistant", "content": "It is "}]})
    said = ["4", "The answer is five, as everybody knows.", "2", " 4", "4"]
    user = ("user", "What is 2 + 2?")
    texts = [chatml(user, ("assistant", said[0])), chatml(user, ("assistant", said[1]))]
    texts += [chatml(("system", "Be brief."), ("user", "What is 1 + 1? Think first."), ("assistant", "2"))]
    texts += ["2 + 2 = 4<|im_end|>", chatml(user, ("assistant", "It is 4"))]
    scores = RewardModel(path=str(folder), batch_size=batch_size)(said, rows)
    torch.testing.assert_close(torch.tensor(scores), torch.tensor(by_transformers(folder, texts)), rtol=1e-5, atol=2e-6)
    assert len(set(scores)) == 5


def test_its_tokens_are_those_of_its_training(folder: Path) -> None:
    """The ids that `encode` makes of a pair for reward_model, and so the same scores as in training."""
    source = Tiny(path=str(folder.parent / "again"))
    row = {
        "prompt": LONG,
        **{n: [{"role": "assistant", "content": c}] for n, c in (("chosen", "2"), ("rejected", "3"))},
    }
    examples, _ = encode([row], "pairs", source.tokenizer, max_prompt_tokens=None, max_completion_tokens=None)
    reward = RewardModel(path=str(folder))
    got = [reward._tokens({"prompt": LONG}, text) for text in ("2", "3")]
    assert got == [(examples[0].prompt_ids, ids, None) for ids in examples[0].completions]
    want = completion_scores(reward.model, collate(examples)).tolist()
    assert reward(["2", "3"], [{"prompt": LONG}] * 2) == pytest.approx(want, abs=1e-6)


def test_a_template_that_shows_the_reply_otherwise(folder: Path, tmp_path: Path) -> None:
    """It opens every reply with <think>, and drops that from a reply in the record: the record is what is scored."""
    reward = RewardModel(path=str(folder))
    template = AutoTokenizer.from_pretrained(folder).chat_template
    reward.source.tokenizer.chat_template = template.replace(
        "assistant\n' }}{% endif", "assistant\n<think>' }}{% endif"
    )
    want = by_transformers(folder, [chatml(("user", "What is 2 + 2?"), ("assistant", "4"))])
    assert reward(["4"], [{"prompt": ASKED}]) == pytest.approx(want, abs=1e-5)


def test_the_set_of_rewards_takes_it(folder: Path) -> None:
    reward = RewardModel(path=str(folder), weight=0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as in a run under mixed precision
        scores = RewardSet({"model": (reward, reward.weight)})(["4", ""], [{"prompt": ASKED}] * 2)
    plain = reward(["4", ""], [{"prompt": ASKED}] * 2)
    assert scores.parts["model"] == plain
    assert all(score is not None and math.isfinite(score) for score in plain)
    assert scores.total == [score and 0.5 * score for score in plain]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, Path]:
    """A reward model with an adapter that does something, saved as one model and as the adapter beside it."""
    torch.manual_seed(1)
    source, place = Tiny(path=str(tmp_path_factory.mktemp("models"))), tmp_path_factory.mktemp("reward")
    model = source.scorer()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    source.save(model, place)
    return source, place


def test_an_adapter_scores_as_the_whole_model_does_alone_and_on_the_policys_base(trained: tuple[Tiny, Path]) -> None:
    source, place = trained
    rows, said = [{"prompt": ASKED}, {"prompt": ASKED}, {"prompt": LONG}], ["4", "five, as everybody knows", "2"]
    want = RewardModel(path=str(place))(said, rows)
    alone = RewardModel(path=str(place / "adapter"))
    assert alone(said, rows) == pytest.approx(want, rel=1e-4, abs=1e-5)
    policy, before = source.policy(), torch.get_rng_state()
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.1  # the policy's own adapter must not be in the scores
    sizes = [p.numel() for p in policy.parameters()]
    trains = {name for name, p in policy.named_parameters() if p.requires_grad}
    shared = RewardModel(path=str(place / "adapter"))
    shared.share(policy, source, nullcontext)
    assert shared.model is policy
    assert shared(said, rows) == pytest.approx(want, rel=1e-4, abs=1e-5)
    assert sum(p.numel() for p in policy.parameters()) < 1.5 * sum(sizes)  # an adapter more, no second base
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == trains
    assert torch.equal(torch.get_rng_state(), before)
    assert policy.active_adapter == "default"  # pyright: ignore


def test_on_another_base_it_keeps_to_itself(trained: tuple[Tiny, Path], tmp_path: Path) -> None:
    _, place = trained
    other = Tiny(path=str(tmp_path), seed=5)
    reward = RewardModel(path=str(place / "adapter"))
    reward.share(other.policy(), other, nullcontext)
    want = RewardModel(path=str(place))(["4"], [{"prompt": ASKED}])
    assert reward(["4"], [{"prompt": ASKED}]) == pytest.approx(want, rel=1e-4, abs=1e-5)


def test_neighbours_share_their_prompt_and_the_order_stays() -> None:
    pairs = [([1], [2]), ([1], [3]), ([1], [4]), ([5], [6]), ([5], [7]), ([5], [8]), ([9], [10])]
    texts = [Tokens(*pair) for pair in pairs]
    found = list(_batches(texts, 6))
    assert found == [[Example([1], [[2], [3], [4]]), Example([5], [[6], [7], [8]])], [Example([9], [[10]])]]
    split = list(_batches(texts, 2))
    assert max(sum(len(e.completions) for e in batch) for batch in split) == 2
    flat = [(e.prompt_ids, ids) for batch in split for e in batch for ids in e.completions]
    assert flat == pairs


def test_what_cannot_score_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward\.model\.path: there is no folder /nowhere"):
        RewardModel(path="/nowhere")
    source = Tiny(path=str(tmp_path))
    with pytest.raises(UserError, match=r"^reward\.model\.path: .* is no trained scorer"):
        RewardModel(path=source.folder)(["4"], [{"prompt": ASKED}])
    source.save(source.policy(), tmp_path / "adapter")
    with pytest.raises(UserError, match=r"reward\.model\.path: .* is an adapter that gives no scores \(CAUSAL_LM\)"):
        RewardModel(path=str(tmp_path / "adapter"))
    reward = RewardModel(path=str(folder))
    with pytest.raises(UserError, match="without a prompt"):
        reward(["4"], [{}])
    reward.source.tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        reward(["4"], [{"prompt": ASKED}])
