"""Reading a JSON block field by field, collecting every reason to refuse it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Keys that Hugging Face's generic PretrainedConfig writes into every config; they say nothing about the network.
DUMP_KEYS = frozenset(
    [
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "prefix",
        "problem_type",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
    ]
)

# How other model families spell a field that K3 has. Reading past one of these would give a wrong network.
OTHER_SPELLINGS = {
    "full_attn_layers": "linear_attn_config.full_attn_layers",
    "gate_lower_bound": "linear_attn_config.gate_lower_bound",
    "kda_head_dim": "linear_attn_config.head_dim",
    "kda_layers": "linear_attn_config.kda_layers",
    "kda_num_heads": "linear_attn_config.num_heads",
    "moe_layer_frequency": "moe_layer_freq",
    "moe_latent_size": "routed_expert_hidden_size",
    "n_embd": "hidden_size",
    "n_group": "num_expert_group",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "num_layers": "num_hidden_layers",
    "num_local_experts": "num_experts",
    "num_mtp_layers": "num_nextn_predict_layers",
    "scoring_func": "moe_router_activation_func",
    "short_conv_kernel_size": "linear_attn_config.short_conv_kernel_size",
    "situ_beta": "activation_situ_beta",
    "situ_linear_beta": "activation_situ_linear_beta",
    "use_full_rank_gate": "linear_attn_config.use_full_rank_gate",
}

# A name that sounds like a dimension or a count. An unknown one is refused, any other unknown key is only reported.
_GEOMETRY_NAME = re.compile(r"^(num|n)_|_(size|dim|dims|rank|heads|layers|experts|groups?|freq|width|depth)$|_per_tok")
_LOOKS_ALIKE = 0.85


class ConfigError(ValueError):
    """A config that describes no K3 network, or contradicts itself.

    Attributes:
        reasons: every reason, not the first.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


class FieldReader:
    """Reads one JSON object, remembers which keys were read, and notes what is wrong instead of raising.

    A field that is wrong reads as its default, so that the rest can be read too: whoever made the reader raises
    ``ConfigError`` with the collected reasons before anybody sees such a value.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, reasons: list[str]) -> None:
        self.raw = raw
        self.where = where
        self.reasons = reasons
        self._known: set[str] = set()

    def refuse(self, reason: str) -> None:
        """Note one reason, in the words ``where: reason``."""
        self.reasons.append(f"{self.where}: {reason}")

    def value(self, name: str, default: Any = None) -> Any:
        """The raw value of a field, whatever it is; the field counts as known from here on."""
        self._known.add(name)
        return self.raw.get(name, default)

    def integer(self, name: str, default: int, *, minimum: int = 1) -> int:
        """An integer of at least ``minimum``; absent means ``default``."""
        found = self.value(name, default)
        if self._is_integer(found) and found >= minimum:
            return int(found)
        self.refuse(f"{name} must be an integer >= {minimum}, got {found!r}")
        return default

    def needed_integer(self, name: str, because: str, *, minimum: int = 1) -> int:
        """An integer that has no default in the format."""
        if self.value(name) is None:
            self.refuse(f"{name} is missing; {because}")
            return minimum
        return self.integer(name, minimum, minimum=minimum)

    def optional_integer(self, name: str, *, minimum: int = 1) -> int | None:
        """An integer, or None where the field is absent or null."""
        return None if self.value(name) is None else self.integer(name, minimum, minimum=minimum)

    def number(self, name: str, default: float) -> float:
        """A finite number above zero; absent means ``default``."""
        found = self.value(name, default)
        if self._is_number(found) and 0 < found < float("inf"):
            return float(found)
        self.refuse(f"{name} must be a number above 0, got {found!r}")
        return default

    def optional_number(self, name: str) -> float | None:
        """A finite number above zero, or None where the field is absent or null."""
        return None if self.value(name) is None else self.number(name, 1.0)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; absent means ``default``."""
        found = self.value(name, default)
        if isinstance(found, bool):
            return found
        self.refuse(f"{name} must be true or false, got {found!r}")
        return default

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        """One of ``choices``; absent means ``default``, which is refused too where it is not among them."""
        found = self.value(name, default)
        if isinstance(found, str) and found in choices:
            return found
        self.refuse(f"{name} must be {' or '.join(repr(choice) for choice in choices)}, got {found!r}")
        return choices[0]

    def fixed(self, expected: Mapping[str, Any]) -> None:
        """Fields for which one value exists: absent means that value, another value is refused."""
        for name, wanted in expected.items():
            found = self.value(name, wanted)
            if found != wanted or isinstance(found, bool) != isinstance(wanted, bool):
                self.refuse(f"{name} must be {wanted!r}, got {found!r}")

    def nothing(self, names: Iterable[str], because: str) -> None:
        """Fields that may be absent, null, zero or false; any other value asks for what does not exist here."""
        for name in names:
            found = self.value(name)
            if found:
                self.refuse(f"{name} must be absent, null or 0 ({because}), got {found!r}")

    def ignored(self, names: Iterable[str]) -> None:
        """Fields that are known and have no effect on the network."""
        self._known.update(names)

    def layer_list(self, name: str) -> list[int] | None:
        """A list of 1-based layer numbers as it is written, or None where it is missing or no list of integers."""
        found = self.value(name)
        if found is None:
            self.refuse(f"{name} is missing; kda_layers and full_attn_layers come together")
            return None
        if not isinstance(found, list) or not all(self._is_integer(item) for item in found):
            self.refuse(f"{name} must be a list of integers, got {found!r}")
            return None
        return found

    def block(self, name: str) -> Mapping[str, Any] | None:
        """A nested JSON object, or None where it is absent or null."""
        found = self.value(name)
        if found is None or isinstance(found, Mapping):
            return found
        self.refuse(f"{name} must be an object, got {found!r}")
        return None

    def close(self) -> tuple[str, ...]:
        """Refuse unread keys that name geometry; return the other unread keys as ``where.key``."""
        unknown: list[str] = []
        for name in self.raw:
            if name in self._known or name in DUMP_KEYS:
                continue
            meant = OTHER_SPELLINGS.get(name) or next(
                iter(difflib.get_close_matches(name, self._known, n=1, cutoff=_LOOKS_ALIKE)), None
            )
            if meant:
                self.refuse(f"unknown field {name!r}; K3 spells it {meant!r}")
            elif _GEOMETRY_NAME.search(name):
                self.refuse(f"unknown field {name!r}, which sounds like geometry")
            else:
                unknown.append(f"{self.where}.{name}" if self.where else name)
        return tuple(unknown)

    @staticmethod
    def _is_integer(found: object) -> bool:
        return isinstance(found, int) and not isinstance(found, bool)

    @staticmethod
    def _is_number(found: object) -> bool:
        return isinstance(found, int | float) and not isinstance(found, bool)
