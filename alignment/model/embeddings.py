"""What a prompt looks like to a model: one vector per prompt."""

import torch
from torch import Tensor, nn

from alignment.batch import Batch
from alignment.model.head import as_forward_of
from alignment.model.logprobs import causal_lm


@torch.no_grad()
def prompt_embeddings(model: nn.Module, batch: Batch) -> Tensor:
    """Mean of the last hidden states over each prompt's tokens: (B, H) float32, detached.

    model: a Hugging Face causal LM, or a `PeftModel` around one. Completions are not read.
    """
    causal, mask = causal_lm(model), batch.prompt_mask

    def embed() -> Tensor:
        hidden = causal.get_decoder()(
            input_ids=batch.prompt_ids,
            attention_mask=mask.long(),
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state
        return torch.where(mask[..., None], hidden.float(), 0.0).sum(1) / mask.sum(1, keepdim=True)

    return as_forward_of(causal, embed)
