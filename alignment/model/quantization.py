"""How weights are stored in 8 or 4 bit: the settings of bitsandbytes, in the form transformers takes."""

import torch
from transformers import BitsAndBytesConfig


def quantization(bits: int, *, double: bool = True, compute_dtype: torch.dtype | None = None) -> BitsAndBytesConfig:
    """NF4 in 4 bit (QLoRA, 2305.14314 section 3), `double`: its constants quantised too; LLM.int8() in 8 (2208.07339).

    compute_dtype: of the products with weights in 4 bit; None = bfloat16 on a GPU, float32 elsewhere.
    """
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    if compute_dtype is None:
        compute_dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=compute_dtype,
    )
