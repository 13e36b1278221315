"""Where models come from: a Hugging Face folder or hub name, with or without a LoRA adapter."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from alignment.errors import UserError
from alignment.model.adapters import POLICY, compact_frozen_linears, trainable_state

# Number format of the products under Lightning's mixed precisions.
AUTOCAST = {"bf16-mixed": "bfloat16", "16-mixed": "float16"}
# Initialisations that need activations or gradients of data, or a GPU's quantiser, before the adapter exists.
NEED_DATA = ("eva", "corda", "lora_ga", "loftq")


@dataclass(eq=False)
class HFModel:
    """Settings of a model, and the models built from them on demand. Making one of these loads nothing.

    path: folder, or name on the Hugging Face hub, which `revision` and `trust_remote_code` are for.
    dtype: storage of the weights; "auto" = as in the checkpoint. What an adapter trains is always float32.
    frozen_dtype: storage of frozen Linear weights, see `compact_frozen_linears`; "auto": what `compact_for` finds.
    adapter: "lora" trains an adapter, "none" all weights. `lora`: keyword arguments of peft.LoraConfig.
    adapter_path: an adapter to go on from; it brings its own settings, of `lora` only the dropout is kept.
    dropout: every dropout of the model's config; 0, since the first ratio of an RL step must be 1 and the first DPO
        loss ln 2 (the adapter's own is lora.lora_dropout).
    chat_template: a file, or the Jinja text itself; None = the tokenizer's own.
    shared_prompt, head_chunk_tokens: read by whoever computes log-probs, see `completion_logprobs`.
    """

    path: str | None = None
    _: KW_ONLY
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    frozen_dtype: Literal["auto", "bfloat16", "float16"] | None = "auto"
    attn_implementation: str = "sdpa"
    gradient_checkpointing: bool = False
    dropout: float = 0.0
    adapter: Literal["lora", "none"] = "lora"
    adapter_path: str | None = None
    lora: dict[str, Any] = field(default_factory=dict)
    shared_prompt: Literal["auto", "cache", "packed", "dense"] = "auto"
    head_chunk_tokens: int = 1024

    # So small that casting to a shorter number format costs more than it saves.
    tiny: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.lora = _plain(self.lora)
        if self.adapter not in ("lora", "none"):
            raise UserError(
                f"model.adapter: {self.adapter!r} is unknown: type model.adapter=lora or model.adapter=none"
            )
        if self.adapter_path is not None and self.adapter == "none":
            raise UserError("model.adapter_path: needs an adapter: type model.adapter=lora, or model.adapter_path=null")
        for name in sorted(self.lora.keys() - {f.name for f in dataclasses.fields(LoraConfig)}):
            raise UserError(f"model.lora.{name}: peft.LoraConfig has no such setting: type ~model.lora.{name}")
        key, init = "model.lora.init_lora_weights", str(self.lora.get("init_lora_weights", True)).lower()
        if init.startswith(NEED_DATA):
            raise UserError(f"{key}: {init}: it has to see data or a GPU first: type {key}=true")
        if init.startswith("pissa_niter"):
            raise UserError(f"{key}: {init}: its random start cannot be repeated on loading: type {key}=pissa")
        self._compact_dtype = None if self.frozen_dtype in ("auto", None) else self.frozen_dtype

    # ---- where it is ------------------------------------------------------------------------------------------------
    @property
    def folder(self) -> str:
        """Absolute folder, or the hub name. Raises UserError where `path` is neither."""
        if not self.path:
            raise UserError("model.path: missing: type model.path=<folder or hub name>, or model=smollm2")
        local = Path(self.path).expanduser()
        if local.is_dir():
            return _checked(local.resolve())
        if self.path.startswith(("/", ".", "~")) or self.path.count("/") > 1:
            raise UserError(f"model.path: there is no folder {self.path}: type model.path=<folder or hub name>")
        return self.path

    def _fetch(self, load: Callable[..., Any], **options: Any) -> Any:
        """`load(folder, ...)`, with an error that says what to type where nothing can be found there."""
        folder = self.folder
        try:
            return load(folder, revision=self.revision, trust_remote_code=self.trust_remote_code, **options)
        except OSError as error:
            why = "not all files are there" if Path(folder).is_dir() else "no such folder, and the hub does not give it"
            raise UserError(
                f"model.path: {folder} cannot be loaded ({why}): type model.path=<folder or hub name>, or "
                f"model=smollm2, which needs no hub. {type(error).__name__}: {str(error).strip()}"
            ) from error

    # ---- tokens -----------------------------------------------------------------------------------------------------
    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The folder's tokenizer. Without a pad token it pads with EOS: no new token, and masks never look at it."""
        tokenizer = self._fetch(AutoTokenizer.from_pretrained)
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        if tokenizer.pad_token_id is None:
            raise UserError(f"model.path: the tokenizer of {self.folder} has no pad, EOS or unknown token to pad with")
        if self.chat_template is not None:
            tokenizer.chat_template = _template(self.chat_template)
        return tokenizer

    @cached_property
    def stop_ids(self) -> set[int]:
        """Every token id that ends a completion: the tokenizer's EOS and all that config and generation config list."""
        config = self._fetch(AutoConfig.from_pretrained)
        sources: list[Any] = [self.tokenizer, config, config.get_text_config()]
        with suppress(OSError):  # many folders have none
            sources.append(GenerationConfig.from_pretrained(self.folder, revision=self.revision or "main"))
        found: set[int] = set()
        for source in sources:
            ids = getattr(source, "eos_token_id", None)
            found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
        if not found:
            raise UserError(f"model.path: neither tokenizer nor config of {self.folder} names an EOS token")
        return found

    # ---- models -----------------------------------------------------------------------------------------------------
    def compact_for(self, precision: str) -> None:
        """Tell which Lightning precision the models will run under, before they are built.

        Raises UserError where a `frozen_dtype` was asked for that would change numbers, or fail, under it.
        """
        exact = AUTOCAST.get(precision)
        if self.frozen_dtype == "auto":
            self._compact_dtype = exact
        elif self.frozen_dtype is not None and self.frozen_dtype != exact:
            raise UserError(
                f"model.frozen_dtype: {self.frozen_dtype} fits only a mixed precision of the same name, this run has "
                f"{precision}: type model.frozen_dtype=auto"
            )

    def policy(self, quantization_config: Any = None) -> nn.Module:
        """A model to train, in train mode: a PeftModel whose adapter alone trains, or a model that trains as a whole.

        Fresh adapters are drawn from torch's global generator: seed it first. Base weights stored in 4 or 8 bit need a
        transformers `quantization_config`, and an adapter.
        """
        if quantization_config is not None and self.adapter == "none":
            raise UserError("model.adapter: 4 or 8 bit weights cannot be trained themselves: type model.adapter=lora")
        model: nn.Module = self._load(quantization_config)
        if self.gradient_checkpointing:
            # Not re-entrant: that variant drops gradients where no input of a block needs one, as under a frozen base.
            model.activation_checkpointing_enable({"use_reentrant": False})  # pyright: ignore
        if self.adapter == "lora":
            model = self._existing_adapter(model, trainable=True) if self.adapter_path else self._fresh_adapter(model)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
        self._compact(model)
        return model.train()

    def frozen(self, quantization_config: Any = None) -> nn.Module:
        """An independent frozen copy, in eval mode, of what training starts from: base and adapter at `adapter_path`.

        It needs no gradient, so a `quantization_config` works without an adapter too.
        """
        model: nn.Module = self._load(quantization_config)
        if self.adapter_path:
            model = self._existing_adapter(model, trainable=False)
        model.requires_grad_(False)
        self._compact(model)
        return model.eval()

    def _load(self, quantization_config: Any) -> PreTrainedModel:
        config = self._fetch(AutoConfig.from_pretrained)
        _set_dropout(config, self.dropout)
        options = {"config": config, "dtype": self.dtype, "attn_implementation": self.attn_implementation}
        if quantization_config is not None:
            options["quantization_config"] = quantization_config
        model = self._fetch(AutoModelForCausalLM.from_pretrained, **options)
        if quantization_config is not None:
            _check_quantized(model)
        try:
            model.generation_config.validate(strict=True)
        except ValueError:  # sampling settings beside do_sample=False, common on the hub, which save_pretrained refuses
            model.generation_config.do_sample = True
        return model

    def _fresh_adapter(self, model: Any) -> nn.Module:
        settings = {"task_type": "CAUSAL_LM", "target_modules": "all-linear", **copy.deepcopy(self.lora)}
        try:
            with _peft_warnings():
                return get_peft_model(model, LoraConfig(**settings, revision=self.revision))
        except UserWarning as error:
            raise UserError(
                "model.lora: embeddings and head are one tensor in this model and only one of them would be trained: "
                "type +model.lora.ensure_weight_tying=true"
            ) from error
        except ValueError as error:  # for example target_modules that are not in the model
            raise UserError(f"model.lora: {error}: type model.lora.<setting>=<value>") from error

    def _existing_adapter(self, model: Any, *, trainable: bool) -> nn.Module:
        place = Path(self.adapter_path or "").expanduser()
        path = str(place.resolve()) if place.is_dir() else str(self.adapter_path)
        try:
            config: Any = PeftConfig.from_pretrained(path)
            config.lora_dropout = self.lora.get("lora_dropout", 0.0)
            config.base_model_name_or_path, config.revision = self.folder, self.revision
            with _peft_warnings():
                # Loaded on the CPU like the base: by default every process of a GPU machine would load onto GPU 0.
                return PeftModel.from_pretrained(model, path, is_trainable=trainable, config=config, torch_device="cpu")
        except (OSError, ValueError, RuntimeError, Warning) as error:
            raise UserError(
                f"model.adapter_path: {self.adapter_path} cannot be used with {self.folder}: type "
                f"model.adapter_path=<folder with adapter_config.json>. {type(error).__name__}: {error}"
            ) from error

    def _compact(self, model: nn.Module) -> None:
        if self._compact_dtype is not None:
            compact_frozen_linears(model, getattr(torch, self._compact_dtype))

    # ---- saving -----------------------------------------------------------------------------------------------------
    def save(self, policy: nn.Module, folder: str | Path, state_dict: Mapping[str, Tensor] | None = None) -> None:
        """Write a folder that transformers, peft and vLLM load as it is: the model, or the adapter; and the tokenizer.

        state_dict: the whole weights under the policy's own names, where its live ones are only a shard. Everything
        written is read back and compared. Raises UserError where a tensor is empty, missing or different.
        """
        live: Any = policy
        state = dict(state_dict) if state_dict is not None else policy.state_dict()
        if isinstance(policy, PeftModel):
            config: Any = policy.peft_config[POLICY]
            config.base_model_name_or_path = self.folder
            # Never the base's embeddings: they are frozen, and peft would ask the hub whether they were resized.
            expected = get_peft_model_state_dict(policy, state, POLICY, save_embedding_layers=False)
            _check_covered({name: state[name] for name in trainable_state(policy)}, expected)
            live.save_pretrained(folder, selected_adapters=[POLICY], save_embedding_layers=False, state_dict=state)
        else:
            expected = state
            live.save_pretrained(folder, state_dict=state)
        self.tokenizer.save_pretrained(folder)
        check_written(Path(folder), expected)


def check_written(folder: Path, expected: Mapping[str, Tensor]) -> None:
    """Compare the safetensors files of a folder with the live tensors, by name; a tied tensor may be written once.

    Raises UserError naming the first tensor that is empty, missing or different.
    """
    missing, unknown = dict(expected), 0
    written: list[Tensor] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (this object is no mapping)
                live, stored = missing.pop(name, None), tensors.get_tensor(name)
                _require(stored.numel() > 0, folder, name, "is empty")
                if live is None:
                    unknown += stored.numel()
                    continue
                _require(live.shape == stored.shape, folder, name, "has another shape")
                _require(torch.equal(live.detach().cpu(), stored), folder, name, "differs from the live one")
                written.append(live)
    untied = {name: t for name, t in missing.items() if not (t.numel() and any(_same(t, w) for w in written))}
    # Some classes (mixtures of experts) write under other names than their own: then at least nothing may be lost.
    if untied and sum(tensor.numel() for tensor in untied.values()) != unknown:
        _require(False, folder, min(untied), "is missing")


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _require(holds: bool, folder: Path, name: str, what: str) -> None:
    if not holds:
        raise UserError(
            f"{folder}: tensor {name} {what} after saving: the folder is not usable. Under a sharded strategy the "
            "weights must be gathered first; if they were, the disk is at fault: save again from the last checkpoint"
        )


def _check_covered(trained: Mapping[str, Tensor], written: Mapping[str, Tensor]) -> None:
    """An adapter folder holds the adapter only: whatever else is trained would be lost."""
    places = {tensor.data_ptr() for tensor in written.values()}
    lost = sorted(name for name, tensor in trained.items() if tensor.data_ptr() not in places)
    if lost:
        raise UserError(f"{len(lost)} trained weights are not of the adapter and would not be saved ({lost[0]}, ...)")
    empty = sorted(name for name, tensor in written.items() if tensor.numel() == 0)
    if empty:
        raise UserError(f"tensor {empty[0]} is empty: gather the shards before saving")


@contextmanager
def _peft_warnings() -> Iterator[None]:
    """What peft only warns of and what would be wrong here, as errors; and its use of an old name, silent."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        # Half of a tied pair trained: the merged model, which samples, would be another one.
        warnings.filterwarnings("error", message=".*ensure_weight_tying.*", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        yield


def _checked(folder: Path) -> str:
    if (folder / "config.json").is_file():
        return str(folder)
    if (folder / "adapter_config.json").is_file():
        base = PeftConfig.from_pretrained(str(folder)).base_model_name_or_path
        raise UserError(f"model.path: {folder} is an adapter: type model.path={base} model.adapter_path={folder}")
    raise UserError(f"model.path: {folder} has no config.json: type model.path=<a folder written by save_pretrained>")


def _check_quantized(model: Any) -> None:
    if not getattr(model, "is_quantized", False):
        raise UserError("the model was asked for in 4 or 8 bit but its weights are not: bitsandbytes did not take part")
    for module in model.modules():
        # On CPUs with AVX512-BF16, bitsandbytes 0.50 repacks a weight at its first forward in eval mode and then no
        # gradient passes through it, with a warning only.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _set_dropout(config: PreTrainedConfig, value: float) -> None:
    """Every dropout probability of a config and of the configs inside it. Layer drop is switched off, never on."""
    for name, current in list(vars(config).items()):
        if isinstance(current, PreTrainedConfig):
            _set_dropout(current, value)
        elif ("drop" in name) and isinstance(current, (int, float)) and not isinstance(current, bool):
            setattr(config, name, 0.0 if "layerdrop" in name else value)


def _template(text: str) -> str:
    if "{{" in text or "{%" in text:
        return text
    file = Path(text).expanduser()
    if not file.is_file():
        raise UserError(f"model.chat_template: there is no file {text}: type model.chat_template=<file>, or null")
    return file.read_text(encoding="utf-8")


def _plain(value: Any) -> Any:
    """Containers of config libraries as dict and list: peft writes them into a JSON file."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (Sequence, set, frozenset)) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
