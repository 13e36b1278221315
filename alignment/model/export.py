"""A trained model as a plain folder that transformers loads by itself: merged, dequantised, in one number format.

Reading never changes the model that is written: what is merged is made beside it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerBase

from alignment.errors import UserError
from alignment.model.adapters import CRITIC, POLICY, is_of_adapter, merged_weights, use_adapter
from alignment.model.critic import Critic
from alignment.model.hf import check_written
from alignment.model.scorer import has_score_head, head_name, pad_for_scores

log = logging.getLogger("alignment")
# Two tied weights that an adapter changes are computed by two products, whose rounding differs.
TIE_TOLERANCE = 1e-5


def without_copies(model: Any, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    """The weights with tied ones once, and whether the ties hold.

    An adapter may have changed one end of a tie, or both in different ways: then all are kept, and the folder must not
    say that they are tied, or whoever loads it would lose one.
    """
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
    pairs = [(target, source) for target, source in ties.items() if target in weights and source in weights]
    if all(_equal(weights[target], weights[source]) for target, source in pairs):
        copies = {target for target, _ in pairs}
        return {name: weight for name, weight in weights.items() if name not in copies}, True
    return dict(weights), False


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    same = one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
    return same or torch.allclose(one.float(), other.float(), rtol=TIE_TOLERANCE, atol=TIE_TOLERANCE)


def cast(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating weights in `dtype`. Raises UserError where one is too large for it."""
    found = {name: (w.to(dtype) if w.is_floating_point() else w).contiguous() for name, w in weights.items()}
    for name, weight in found.items():
        if weight.is_floating_point() and not weight.isfinite().all() and weights[name].isfinite().all():
            raise UserError(f"task.dtype: {name} has numbers that {dtype} cannot hold: type task.dtype=bfloat16")
    return found


def write_model(
    policy: nn.Module,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype,
    stop_ids: Collection[int],
) -> bool:
    """Write a language model or a scorer, whole; returns whether its tied weights are still tied.

    An adapter is merged, into what weights in 4 bit stand for: that is what it was trained on, not the checkpoint that
    was rounded. A language model's generation config ends a completion at every one of `stop_ids`, as training did.
    Everything written is read back and compared.
    """
    plain: Any = policy.get_base_model() if isinstance(policy, PeftModel) else policy
    weights, tied = without_copies(plain, dict(merged_weights(policy)))
    scores = has_score_head(policy)
    if not tied:
        log.warning("input and output embeddings were tied and have been trained apart: the folder keeps both")
    shell = _shell(type(plain), plain.config, dtype, tied)
    if not scores and plain.can_generate():
        shell.generation_config = copy.deepcopy(plain.generation_config)
        shell.generation_config.eos_token_id = sorted(stop_ids)
        shell.generation_config.pad_token_id = tokenizer.pad_token_id
    _write(shell, cast(weights, dtype), folder)
    _tokenizer_for(shell, tokenizer, scores).save_pretrained(folder)
    return tied


def write_critic(
    critic: Critic,
    policy: nn.Module,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dtype: torch.dtype,
    stop_ids: Collection[int],
) -> None:
    """Write a critic of any kind as a token classifier of one label.

    Its logit at a token is the value of the state after it, that is, of the one from which the next token is drawn.
    """
    reads = policy if critic.model is None else critic.model
    plain: Any = reads.get_base_model() if isinstance(reads, PeftModel) else reads
    with use_adapter(policy, CRITIC) if critic.kind == "adapter" else nullcontext():
        weights = dict(merged_weights(reads))
    config = copy.deepcopy(plain.config)
    config.num_labels, config.classifier_dropout = 1, 0.0
    config.get_text_config().pad_token_id = pad_for_scores(tokenizer, stop_ids)
    try:
        with torch.device("meta"):
            kind = type(AutoModelForTokenClassification.from_config(_unquantised(config)))
    except ValueError as error:
        raise UserError(f"task.part: {type(plain).__name__} cannot carry a head at every token: {error}") from error
    shell = _shell(kind, config, dtype, tied=True)
    assert critic.head is not None, "a critic without a head was never attached"
    name = head_name(shell)
    weights |= {f"{name}.weight": critic.head.weight.detach()}
    if critic.head.bias is not None:
        weights |= {f"{name}.bias": critic.head.bias.detach()}
    wanted = shell.state_dict().keys()
    if missing := sorted(wanted - weights.keys()):
        raise UserError(f"task.part: {kind.__name__} has {missing[0]}, which the critic has not: it cannot be exported")
    _write(shell, cast({name: weights[name] for name in wanted}, dtype), folder)
    _tokenizer_for(shell, tokenizer, True).save_pretrained(folder)


def write_adapter(
    policy: PeftModel, folder: Path, tokenizer: PreTrainedTokenizerBase, *, dtype: torch.dtype, base: str
) -> None:
    """Write the adapter alone, in `dtype`, as peft loads it onto the model called `base`."""
    live: Any = policy
    own = {name: tensor for name, tensor in policy.state_dict().items() if is_of_adapter(name, POLICY)}
    config: Any = policy.peft_config[POLICY]
    before = config.base_model_name_or_path, config.revision
    config.base_model_name_or_path, config.revision = base, None
    try:
        state = policy.state_dict() | cast(own, dtype)
        live.save_pretrained(str(folder), selected_adapters=[POLICY], save_embedding_layers=False, state_dict=state)
    finally:
        config.base_model_name_or_path, config.revision = before
    tokenizer.save_pretrained(folder)


def _shell(kind: Any, config: Any, dtype: torch.dtype, tied: bool) -> Any:
    """A model of this class without weights, to write others under its config."""
    config = _unquantised(copy.deepcopy(config))
    if not tied:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    with torch.device("meta"):
        return kind(config).to(dtype)


def _unquantised(config: Any) -> Any:
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _write(shell: Any, weights: dict[str, Tensor], folder: Path) -> None:
    shell.save_pretrained(folder, state_dict=weights)
    check_written(folder, weights)


def _tokenizer_for(model: Any, tokenizer: PreTrainedTokenizerBase, scores: bool) -> PreTrainedTokenizerBase:
    """Scorers are read at the last token that is not padding, and padded on the right."""
    if not scores:
        return tokenizer
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.get_text_config().pad_token_id)
    tokenizer.padding_side = "right"
    return tokenizer
