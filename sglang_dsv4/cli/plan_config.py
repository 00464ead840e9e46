"""A model's config.json -> the geometry of its cache. Every refusal names the field."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dsv4.cache.families import KV_ROWS, Geometry
from sglang_dsv4.errors import HostCopyError
from sglang_dsv4.pools.describe import MOST_DRAFT_TOKENS

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODEL_TYPE = "deepseek_v4"
V4_RATIOS = (0, 4, 128)
RING_GROWTH = 2  # with drafts the state rings hold twice the rows


class ConfigError(HostCopyError, ValueError):
    """A config that is not a DeepSeek-V4 model's; the message names file and field."""


@dataclass(frozen=True)
class Model:
    """What the plan needs of a config. context: the longest sequence, None where the config does not say."""

    name: str
    geometry: Geometry
    context: int | None


@dataclass(frozen=True)
class Variant:
    """What a server's flags change in the layout: draft tokens a step, fp4 indexer rows, bf16 states."""

    draft_tokens: int = 0
    fp4_indexer: bool = False
    bf16_states: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            raise ConfigError(f"--draft-tokens {self.draft_tokens}: covered are 0 to {MOST_DRAFT_TOKENS}")


def example_names() -> list[str]:
    """Names of the configs that ship with the package."""
    return sorted(path.stem for path in EXAMPLES.glob("*.json"))


def read_model(config: str, variant: Variant) -> Model:
    """The model of ``config``: an example's name, a config.json, or the folder that holds one.

    Raises ConfigError for a file that cannot be read, a model that is not DeepSeek-V4, and a field that is
    missing or has a value whose layout is not covered.
    """
    path = _path(config)
    try:
        fields = json.loads(path.read_text(encoding="utf-8-sig"))  # an editor may have put a byte order mark before it
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number or a nesting beyond all use
        raise ConfigError(f"{path}: {error}; give a config.json or one of {', '.join(example_names())}") from error
    reader = _Reader(path, fields)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    context = reader.whole("max_position_embeddings", 2) if "max_position_embeddings" in fields else None
    return Model(name, _geometry(reader, variant), context)


def _path(config: str) -> Path:
    if config in example_names():
        return EXAMPLES / f"{config}.json"
    path = Path(config)
    return path / "config.json" if path.is_dir() else path


class _Reader:
    """Checked access to the fields of one config."""

    def __init__(self, path: Path, fields: Any) -> None:
        self.path = path
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}: a JSON object is needed, found {type(fields).__name__}")
        self.fields: dict[str, Any] = fields

    def refuse(self, field: str, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}: {field} {problem}")

    def get(self, field: str) -> Any:
        if field not in self.fields:
            raise self.refuse(field, "is missing; a DeepSeek-V4 config has it")
        return self.fields[field]

    def whole(self, field: str, least: int) -> int:
        value = self.get(field)
        if type(value) is not int or value < least:  # a bool is an int too
            raise self.refuse(field, f"is {value!r}, needed: a whole number from {least}")
        return value

    def exactly(self, field: str, wanted: Any, why: str) -> None:
        value = self.get(field)
        if type(value) is not type(wanted) or value != wanted:
            raise self.refuse(field, f"is {value!r}, covered: {wanted!r} ({why})")


def _geometry(reader: _Reader, variant: Variant) -> Geometry:
    reader.exactly("model_type", MODEL_TYPE, "other models keep another cache")
    for field in ("kv_source_layer_ids", "index_source_layer_ids"):
        if reader.fields.get(field):
            raise reader.refuse(field, "is set: layers that share a cache (V4.1) are not covered")
    reader.exactly("num_key_value_heads", 1, "one row a token serves all heads")
    reader.exactly("head_dim", Geometry.head_dim, "the kv row")
    # fp8 but for the RoPE part, which is bf16: a value byte more for each of its dimensions.
    reader.exactly("qk_rope_head_dim", KV_ROWS["v4"].planes[0] - Geometry.head_dim, "the kv row")
    ratios = _ratios(reader)
    if 4 in ratios:
        reader.exactly("index_head_dim", Geometry.index_head_dim, "the indexer row")
    window = reader.whole("sliding_window", 1)
    if not 8 <= window <= Geometry.page_size:
        raise reader.refuse("sliding_window", f"is {window}, covered: 8 to the page of {Geometry.page_size} tokens")
    return Geometry(
        ratios,
        window=window,
        rings={4: 8 * RING_GROWTH, 128: 128 * RING_GROWTH} if variant.draft_tokens else {},
        index_rows={4: "fp4"} if variant.fp4_indexer else {},
        state_bytes={4: 2, 128: 2} if variant.bf16_states else {},
    )


def _ratios(reader: _Reader) -> tuple[int, ...]:
    """One ratio for each layer of the model; what the list has beyond them belongs to the draft layers."""
    layers = reader.whole("num_hidden_layers", 1)
    ratios = reader.get("compress_ratios")
    if not isinstance(ratios, list):
        raise reader.refuse("compress_ratios", f"is {ratios!r}, needed: a list with one ratio a layer")
    if len(ratios) < layers:
        raise reader.refuse("compress_ratios", f"has {len(ratios)} entries for num_hidden_layers {layers}")
    for layer, ratio in enumerate(ratios[:layers]):
        if type(ratio) is not int or ratio not in V4_RATIOS:
            raise reader.refuse(f"compress_ratios[{layer}]", f"is {ratio!r}, covered: {', '.join(map(str, V4_RATIOS))}")
    return tuple(ratios[:layers])
