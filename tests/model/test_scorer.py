"""Heads for scores against plain transformers forwards of single, unpadded rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from alignment.batch import Example, collate
from alignment.errors import UserError
from alignment.model.hf import HFModel
from alignment.model.scorer import (
    completion_scores,
    completion_token_logits,
    draw_head,
    has_score_head,
    pad_for_scores,
    score_head,
)
from alignment.model.tiny import Tiny

EOS = 257  # of Tiny; it pads as well
PATHS = ("auto", "dense", "packed", "cache")
# Ragged prompts and completions: with EOS, without one, a single token, and with EOS inside.
ROWS = [
    Example([10, 20, 30], [[40, 50, EOS], [60, EOS]]),
    Example([10, 20], [[40, 50, 60, 70, EOS], [80]]),
    Example([EOS, 9, 10, 11, 12], [[EOS], [5, EOS, 6, EOS]]),
]
SEQUENCES = [(row.prompt_ids, ids) for row in ROWS for ids in row.completions]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("models"))


def moved(policy: nn.Module) -> nn.Module:
    """As after some training: an adapter that does something."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
    return policy


def last_states(model: Any) -> list[Tensor]:
    """The last hidden state (H,) at the last token of every sequence, one forward each, no padding."""
    backbone = model.get_decoder()
    return [backbone(input_ids=torch.tensor([p + c])).last_hidden_state[0, -1] for p, c in SEQUENCES]


# ---- scores ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_score_is_the_head_at_the_last_token(models: str, adapter: Any, path: str) -> None:
    policy: Any = moved(Tiny(path=models, adapter=adapter).scorer())
    plain = policy.get_base_model() if adapter == "lora" else policy
    scores = completion_scores(policy, collate(ROWS), path=path)
    want = torch.stack([plain.score(state)[0] for state in last_states(plain)])
    assert scores.shape == (6,)
    torch.testing.assert_close(scores, want, rtol=1e-5, atol=2e-6)  # sums in another order
    (scores * torch.arange(6.0)).sum().backward()
    grads = {name: p.grad for name, p in policy.named_parameters() if p.requires_grad}
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads.values())


@pytest.mark.parametrize("path", PATHS)
def test_what_stands_in_the_padding_does_not_matter(models: str, path: str) -> None:
    """The pad id of a batch is 0, a byte like any other here; another one, and EOS, give the same scores."""
    policy = Tiny(path=models).scorer()
    want = completion_scores(policy, collate(ROWS), path=path)
    for filler in (EOS, 77):
        batch = collate(ROWS)
        batch.prompt_ids[~batch.prompt_mask] = filler
        batch.completion_ids[~batch.completion_mask] = filler
        torch.testing.assert_close(completion_scores(policy, batch, path=path), want, rtol=0, atol=0)


@pytest.mark.parametrize("path", PATHS)
def test_logits_of_every_token(models: str, path: str) -> None:
    policy: Any = moved(Tiny(path=models, adapter="none").scorer(2, per_token=True))
    logits = completion_token_logits(policy, collate(ROWS), path=path)
    assert logits.shape == (6, 5, 2)
    for row, (prompt, ids) in zip(logits, SEQUENCES, strict=True):
        want = policy(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) :]  # train mode: no dropout at all
        torch.testing.assert_close(row[: len(ids)], want, rtol=1e-5, atol=2e-6)
        assert not row[len(ids) :].any()


def test_scores_are_float32_under_autocast(models: str) -> None:
    """The head's own product too: rounded to bfloat16, scores nearer than 1 in 256 would tie."""
    policy: Any = Tiny(path=models, adapter="none").scorer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = completion_scores(policy, collate(ROWS), path="dense")
    assert scores.dtype == torch.float32
    assert (scores != scores.bfloat16().float()).any()
    torch.testing.assert_close(scores, completion_scores(policy, collate(ROWS)), rtol=0, atol=0.05)


def test_checkpointed_activations_give_the_same_gradient(models: str) -> None:
    grads = []
    for on in (False, True):
        torch.manual_seed(3)
        policy = moved(Tiny(path=models, gradient_checkpointing=on).scorer())
        completion_scores(policy, collate(ROWS)).pow(2).sum().backward()
        grads.append([p.grad for p in policy.parameters() if p.requires_grad])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_first_pass_over_a_model_draws_no_more_than_the_next(models: str) -> None:
    """A look at the model comes before it, under dropout as well; a resumed run has it at another place."""
    policy, scores = moved(Tiny(path=models, lora={"lora_dropout": 0.5}).scorer()), []
    for _ in range(2):
        torch.manual_seed(1)
        scores.append(completion_scores(policy, collate(ROWS)).detach())
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=0)
    assert not torch.equal(completion_scores(policy, collate(ROWS)), scores[0])  # there is dropout


def test_what_cannot_be_scored_is_refused(models: str) -> None:
    source = Tiny(path=models)
    empty = collate([Example([1, 2], [[3]])])
    empty.completion_mask[:] = False
    with pytest.raises(UserError, match="completion 0 of the batch has no tokens"):
        completion_scores(source.scorer(), empty)
    with pytest.raises(UserError, match="2 labels"):
        completion_scores(source.scorer(2, per_token=True), collate(ROWS))
    with pytest.raises(UserError, match="no head for scores"):
        completion_scores(source.policy(), collate(ROWS))
    assert not has_score_head(source.policy())


# ---- the head -------------------------------------------------------------------------------------------------------
def test_the_head_is_trained_in_full_rank_beside_an_adapter(models: str) -> None:
    for per_token, labels in ((False, 1), (True, 2)):
        policy: Any = Tiny(path=models, lora={"r": 4, "target_modules": "all-linear"}).scorer(
            labels, per_token=per_token
        )
        names = {n for n, p in policy.named_parameters() if p.requires_grad and "score" in n}
        kinds = {"weight", "bias"} if per_token else {"weight"}
        assert names == {f"base_model.model.score.modules_to_save.default.{kind}" for kind in kinds}
        assert score_head(policy).weight.shape == (labels, 64)
        assert sum("lora_A" in n for n, _ in policy.named_parameters()) == 14  # 7 products in each of 2 layers


def test_a_fresh_head_is_drawn_by_the_seed(models: str) -> None:
    source, heads = Tiny(path=models), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        heads.append(score_head(source.scorer()).weight.detach())
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    wide = nn.Linear(9_999, 30)
    draw_head(wide)
    assert float(wide.weight.detach().std()) == pytest.approx(0.01, rel=0.01)  # 1 / sqrt(9,999 + 1)
    assert not wide.bias.detach().any()


# ---- saving and loading ---------------------------------------------------------------------------------------------
def scored_by_transformers(folder: Path, side: str) -> Tensor:
    """What anybody gets from the folder: its tokenizer pads, transformers finds the token."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side=side)
    assert model.config.pad_token_id == tokenizer.pad_token_id
    padded = tokenizer.pad({"input_ids": [p + c for p, c in SEQUENCES]}, return_tensors="pt")
    with torch.no_grad():
        return model(**padded).logits.squeeze(-1)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_the_saved_folder_scores_the_same_in_plain_transformers(models: str, adapter: Any, tmp_path: Path) -> None:
    source = Tiny(path=models, adapter=adapter)
    policy = moved(source.scorer())
    source.save(policy, tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    scores = completion_scores(policy, collate(ROWS)).detach()
    for side in ("left", "right"):
        torch.testing.assert_close(scored_by_transformers(tmp_path, side), scores, rtol=1e-5, atol=2e-6)
    assert source.tokenizer.pad_token_id == EOS  # the run's own is left alone
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == source.tokenizer.chat_template


def test_a_saved_token_classifier(models: str, tmp_path: Path) -> None:
    source = Tiny(path=models)
    policy = moved(source.scorer(2, per_token=True))
    source.save(policy, tmp_path)
    loaded = AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    logits = completion_token_logits(policy, collate(ROWS)).detach()
    for row, (prompt, ids) in zip(logits, SEQUENCES, strict=True):
        with torch.no_grad():
            want = loaded(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) :]
        torch.testing.assert_close(row[: len(ids)], want, rtol=1e-5, atol=2e-6)


def test_a_folder_that_has_a_head_keeps_it(models: str, tmp_path: Path) -> None:
    source = Tiny(path=models)
    policy = moved(source.scorer())
    source.save(policy, tmp_path)
    saved = HFModel(str(tmp_path))
    want = completion_scores(policy, collate(ROWS)).detach()
    for again in (saved.scorer(), saved.frozen_scorer()):
        torch.testing.assert_close(completion_scores(again, collate(ROWS)).detach(), want, rtol=1e-5, atol=2e-6)
    frozen = saved.frozen_scorer()
    assert not frozen.training
    assert not any(p.requires_grad for p in frozen.parameters())


def test_a_missing_or_foreign_head_is_refused(models: str, tmp_path: Path) -> None:
    """B63: no run goes on with a random head that was meant to be a trained one."""
    source = Tiny(path=models)
    with pytest.raises(UserError, match=r"is no trained scorer: it has no score\.weight"):
        source.frozen_scorer()
    source.save(source.scorer(), tmp_path)
    with pytest.raises(UserError, match="cannot carry a head of 3"):
        HFModel(str(tmp_path)).scorer(3)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({n: w for n, w in weights.items() if "score" not in n}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="is no trained scorer"):
        HFModel(str(tmp_path)).frozen_scorer()
    save_file({n: w for n, w in weights.items() if "norm" not in n}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="is no whole model"):
        HFModel(str(tmp_path)).scorer()


def test_an_sft_adapter_is_gone_on_with(models: str, tmp_path: Path) -> None:
    source = Tiny(path=models, lora={"r": 4, "lora_alpha": 8})
    source.save(moved(source.policy()), tmp_path)
    base: Any = AutoModelForCausalLM.from_pretrained(source.folder)
    sft: Any = source.policy().__class__.from_pretrained(base, str(tmp_path)).get_base_model()
    policy: Any = Tiny(path=models, adapter_path=str(tmp_path)).scorer()
    head = score_head(policy)
    want = torch.stack([head(state)[0] for state in last_states(sft)])
    torch.testing.assert_close(completion_scores(policy, collate(ROWS)), want, rtol=1e-5, atol=2e-6)
    trained = {n for n, p in policy.named_parameters() if p.requires_grad}
    assert sum("lora_" in n for n in trained) == 28
    assert any("score" in n for n in trained)


def test_an_adapter_that_trained_the_old_head_is_refused(models: str, tmp_path: Path) -> None:
    source = Tiny(path=models)
    model = AutoModelForCausalLM.from_pretrained(shutil.copytree(source.folder, tmp_path / "base"))
    config = LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match=r"model\.adapter_path: .*adapter of the layers alone"):
        Tiny(path=models, adapter_path=str(tmp_path / "adapter")).scorer()


# ---- the pad token --------------------------------------------------------------------------------------------------
class Words:
    """As much of a tokenizer as matters for the choice."""

    def __init__(self, pad: int | None, unk: int | None, bos: int | None, special: list[int], size: int) -> None:
        self.pad_token_id, self.unk_token_id, self.bos_token_id = pad, unk, bos
        self.all_special_ids, self.size = special, size

    def __len__(self) -> int:
        return self.size


@pytest.mark.parametrize(
    ("words", "stops", "want"),
    [
        (Words(3, 0, 1, [0, 1, 2, 3], 9), {2}, 3),  # a pad token of its own
        (Words(2, 0, 1, [0, 1, 2], 9), {2}, 0),  # EOS pads: the unknown token
        (Words(2, 2, 1, [1, 2], 9), {2}, 1),  # EOS is unknown as well: BOS
        (Words(5, None, None, [4, 5, 6], 9), {5, 4}, 6),  # Qwen: its pad token ends completions too
        (Words(8, 8, 8, [8], 9), {8}, 7),  # GPT-2: EOS is all there is
    ],
)
def test_the_pad_token_ends_no_completion(words: Any, stops: set[int], want: int) -> None:
    assert pad_for_scores(words, stops) == want


def test_without_any_other_token_there_is_none() -> None:
    with pytest.raises(UserError, match="none is left to pad with"):
        pad_for_scores(Words(0, 0, 0, [0], 1), {0})  # pyright: ignore
