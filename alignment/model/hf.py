"""Where models come from: a Hugging Face folder or hub name, with or without a LoRA adapter."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from alignment.errors import UserError
from alignment.model.adapters import POLICY, compact_frozen_linears, is_of_adapter, merged_weights, trainable_state
from alignment.model.scorer import draw_head, has_score_head, head_name, pad_for_scores, score_head

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
        # Of every language model that is built here, policy and frozen copies alike; set by strategies.
        self.quantization_config: Any = None

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

    def check(self, *, scorer: bool = False) -> None:
        """UserError where what is named cannot be what is meant, as far as folders on this machine tell.

        scorer: it is to carry a head of scores, so that one may be there already.
        """
        if type(self) is HFModel and (folder := Path(self.folder)).is_dir() and not scorer:
            _no_scorer(folder, "config.json", "model.path")
        if self.adapter_path is None:
            return
        folder = Path(self.adapter_path).expanduser()
        if folder.is_dir() and not (folder / "adapter_config.json").is_file():
            raise UserError(
                f"model.adapter_path: {folder} has no adapter_config.json: type model.adapter_path=<model/ of a run>"
            )
        if not folder.is_dir() and (self.adapter_path.startswith(("/", ".", "~")) or self.adapter_path.count("/") > 1):
            raise UserError(
                f"model.adapter_path: there is no folder {folder}: type model.adapter_path=<model/ of a run>"
            )
        if folder.is_dir() and not scorer:
            _no_scorer(folder, "adapter_config.json", "model.adapter_path")

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
        quantization_config = quantization_config or self.quantization_config
        if quantization_config is not None and self.adapter == "none":
            raise UserError("model.adapter: 4 or 8 bit weights cannot be trained themselves: type model.adapter=lora")
        model: nn.Module = self._load(quantization_config)
        if self.gradient_checkpointing:
            _checkpoint_activations(model)
        if self.adapter == "lora":
            model = self._existing_adapter(model, trainable=True) if self.adapter_path else self._fresh_adapter(model)
            _train_in_float32(model)
        self._compact(model)
        return model.train()

    def scorer(self, num_labels: int = 1, *, per_token: bool = False) -> nn.Module:
        """A model to train, in train mode, with a head of `num_labels` in the place of the vocabulary's.

        Of a completion (a reward model), or `per_token`. The head is trained in full rank also beside an adapter. A
        folder that has such a head keeps it; otherwise it is drawn from torch's global generator. An adapter at
        `adapter_path`, such as an SFT run's, is gone on with.
        """
        model: Any = self._load_scorer(num_labels, per_token)
        if self.gradient_checkpointing:
            _checkpoint_activations(model)
        if self.adapter == "lora":
            model = self._score_adapter(model, "TOKEN_CLS" if per_token else "SEQ_CLS")
            _train_in_float32(model)
        self._compact(model)
        return model.train()

    def frozen_scorer(self, num_labels: int = 1, *, per_token: bool = False) -> nn.Module:
        """A trained scorer in eval mode, without gradients. Raises UserError where the folder has no such head."""
        model = self._load_scorer(num_labels, per_token, trained=True)
        return model.requires_grad_(False).eval()

    def frozen(self, quantization_config: Any = None) -> nn.Module:
        """An independent frozen copy, in eval mode, of what training starts from: base and adapter at `adapter_path`.

        It needs no gradient, so a `quantization_config` works without an adapter too.
        """
        model: nn.Module = self._load(quantization_config or self.quantization_config)
        if self.adapter_path:
            model = self._existing_adapter(model, trainable=False)
        model.requires_grad_(False)
        self._compact(model)
        return model.eval()

    def _load(self, quantization_config: Any) -> PreTrainedModel:
        self.check()
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

    def _load_scorer(self, num_labels: int, per_token: bool, *, trained: bool = False) -> PreTrainedModel:
        config = self._fetch(AutoConfig.from_pretrained)
        _set_dropout(config, self.dropout)
        config.num_labels = num_labels
        kind = AutoModelForTokenClassification if per_token else AutoModelForSequenceClassification
        if per_token:
            config.classifier_dropout = 0.0  # transformers' default is 0.1; ours is before the head, never in it
        options = {"config": config, "dtype": self.dtype, "attn_implementation": self.attn_implementation}
        try:
            model, found = self._fetch(kind.from_pretrained, output_loading_info=True, **options)
        except (ValueError, RuntimeError) as error:  # no such class for this architecture; a head of another size
            raise UserError(
                f"model.path: {self.folder} cannot carry a head of {num_labels} label(s): type model.path=<a language "
                f"model, or a model with such a head>. {type(error).__name__}: {str(error).strip()[:500]}"
            ) from error
        missing, name = sorted(found["missing_keys"]), head_name(model)
        others = [key for key in missing if not key.startswith(f"{name}.")]
        if others or (missing and trained):
            what = "is no whole model" if others else "is no trained scorer"
            raise UserError(f"model.path: {self.folder} {what}: it has no {(others or missing)[0]}")
        if missing:
            draw_head(score_head(model))
        model.config.get_text_config().pad_token_id = pad_for_scores(self.tokenizer, self.stop_ids)
        return model

    def _score_adapter(self, model: Any, task: str) -> nn.Module:
        """An adapter beside a head that is trained as a whole: a fresh one, or the one at `adapter_path`."""
        name = head_name(model)
        if self.adapter_path is None:
            also = self.lora.get("modules_to_save") or []
            # PEFT knows the head's place for sequences only, and would put an adapter on the one for tokens.
            extra = {"task_type": task, "modules_to_save": [*also, name]}
            return self._fresh_adapter(model, extra | ({"exclude_modules": [name]} if task == "TOKEN_CLS" else {}))
        with self._adapter_errors(), _peft_warnings():
            config, path = self._adapter_config()
            config.task_type, config.inference_mode = task, False
            config.modules_to_save = list(dict.fromkeys([*(config.modules_to_save or []), name]))
            policy: Any = get_peft_model(model, config)
            head = {f"base_model.model.{name}.{n}": p for n, p in score_head(policy).named_parameters()}
            done = set_peft_model_state_dict(policy, {**head, **load_peft_weights(path, device="cpu")})
        lost = sorted(done.unexpected_keys) + sorted(k for k in done.missing_keys if ".lora_" in k)
        if lost:
            raise UserError(
                f"model.adapter_path: {self.adapter_path} cannot be used below a score head, see {lost[0]}: type "
                "model.adapter_path=<an adapter of the layers alone>"
            )
        return policy

    def _fresh_adapter(self, model: Any, extra: Mapping[str, Any] | None = None) -> nn.Module:
        settings = {
            "task_type": "CAUSAL_LM",
            "target_modules": "all-linear",
            **copy.deepcopy(self.lora),
            **(extra or {}),
        }
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
        with self._adapter_errors(), _peft_warnings():
            config, path = self._adapter_config()
            # Loaded on the CPU like the base: by default every process of a GPU machine would load onto GPU 0.
            return PeftModel.from_pretrained(model, path, is_trainable=trainable, config=config, torch_device="cpu")

    def _adapter_config(self) -> tuple[Any, str]:
        """The settings of the adapter at `adapter_path`, and where it is."""
        place = Path(self.adapter_path or "").expanduser()
        path = str(place.resolve()) if place.is_dir() else str(self.adapter_path)
        config: Any = PeftConfig.from_pretrained(path)
        config.lora_dropout = self.lora.get("lora_dropout", 0.0)
        config.base_model_name_or_path, config.revision = self.folder, self.revision
        return config, path

    @contextmanager
    def _adapter_errors(self) -> Iterator[None]:
        try:
            yield
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

        A scorer is written as one plain model, its adapter merged in: what loads it needs neither peft nor the base.
        The adapter with its head is beside it, in `adapter/`, for a policy that shares the base (reward=model).
        """
        if has_score_head(policy):
            self._save_scorer(policy, Path(folder), state_dict)
            return
        live: Any = policy
        state = dict(state_dict) if state_dict is not None else policy.state_dict()
        if isinstance(policy, PeftModel):
            config: Any = policy.peft_config[POLICY]
            config.base_model_name_or_path = self.folder
            # Never the base's embeddings: they are frozen, and peft would ask the hub whether they were resized.
            expected = get_peft_model_state_dict(policy, state, POLICY, save_embedding_layers=False)
            others = [name for name in policy.peft_config if name != POLICY]  # a critic's is not the policy
            trained = [name for name in trainable_state(policy) if not any(is_of_adapter(name, o) for o in others)]
            _check_covered({name: state[name] for name in trained}, expected)
            live.save_pretrained(folder, selected_adapters=[POLICY], save_embedding_layers=False, state_dict=state)
        else:
            expected = state
            live.save_pretrained(folder, state_dict=state)
        self.tokenizer.save_pretrained(folder)
        check_written(Path(folder), expected)

    def _save_scorer(self, policy: nn.Module, folder: Path, state_dict: Mapping[str, Tensor] | None) -> None:
        if state_dict is not None and isinstance(policy, PeftModel):
            raise UserError("an adapter in shards cannot be merged into its base: type model.adapter=none")
        plain: Any = policy.get_base_model() if isinstance(policy, PeftModel) else policy
        weights = dict(state_dict if state_dict is not None else merged_weights(policy))
        dtype = plain.config.dtype  # merged weights are float32, frozen ones may be compact: the folder has one dtype
        weights = {n: (w.to(dtype) if w.is_floating_point() else w).contiguous() for n, w in weights.items()}
        with torch.device("meta"):
            shell: Any = type(plain)(copy.deepcopy(plain.config))
        shell.save_pretrained(folder, state_dict=weights)
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(plain.config.get_text_config().pad_token_id)
        tokenizer.padding_side = "right"
        tokenizer.save_pretrained(folder)
        check_written(folder, weights)
        if isinstance(policy, PeftModel):
            live, config = policy, policy.peft_config[POLICY]
            config.base_model_name_or_path = self.folder
            live.save_pretrained(str(folder / "adapter"), selected_adapters=[POLICY], save_embedding_layers=False)
            self.tokenizer.save_pretrained(folder / "adapter")


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


def _checkpoint_activations(model: Any) -> None:
    """Not re-entrant: that variant drops gradients where no input of a block needs one, as under a frozen base."""
    model.activation_checkpointing_enable({"use_reentrant": False})


def _train_in_float32(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


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


@contextmanager
def named(key: str) -> Iterator[None]:
    """Messages about a model that is not the policy, under its own key of the config."""
    try:
        yield
    except UserError as error:
        raise UserError(re.sub(r"\bmodel\.(?=\w*path\b)", f"{key}.", str(error))) from error


def _no_scorer(folder: Path, file: str, key: str) -> None:
    """UserError where the folder's settings are those of a reward model or another classifier."""
    settings = json.loads((folder / file).read_text(encoding="utf-8"))
    kinds = [*(settings.get("architectures") or []), str(settings.get("task_type") or "")]
    if kind := next((kind for kind in kinds if kind.endswith(("Classification", "_CLS"))), None):
        raise UserError(
            f"{key}: {folder} gives scores ({kind}), it is no language model: type {key}=<a language model>"
        )


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
