"""Reads the geometry of a model's cache from its config.json. Every refusal names the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_dsv4.cache.families import COMPRESSIONS, KEPT_BY_HISPARSE, KV_ROWS, MOST_DRAFT_TOKENS, Draft, Geometry
from sglang_dsv4.errors import HostCopyError

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
MODELS = {"deepseek_v4": False, "deepseek_v41": True}  # by model type, whether its compression ratios are shared
SHARING = {ratio for ratio, rule in COMPRESSIONS.items() if rule.shared}
DRAFT_LAYERS = 1  # of EAGLE and NextN
RING_GROWTH = 2  # with drafts the state rings of V4 hold twice the rows
KV_LAYOUTS = ("v4", "v41", "v41_new")  # what the engine's SGLANG_DSV4_KV_LAYOUT takes


class ConfigError(HostCopyError, ValueError):
    """Reports a config that is not a DeepSeek-V4 model's; the message names file and field."""


@dataclass(frozen=True)
class Choices:
    """Counts what the engine records of each token with a launch argument: 4 bytes a choice.

    feature: the argument's name in the engine's configuration. layer_bytes: of a token, and token_bytes of all layers.
    """

    feature: str
    layers: int
    layer_bytes: int
    token_bytes: int

    @property
    def argument(self) -> str:
        """Returns the launch argument."""
        return f"--{self.feature.replace('_', '-')}"


@dataclass(frozen=True)
class Model:
    """Holds the facts that the plan needs of a config. context: the longest sequence, None where the config does not
    say.

    draft_tokens: a step, of the variant or of the config. path: the server's model path, None of an example. choices:
    that requests may ask for, as far as the config tells them.
    """

    name: str
    geometry: Geometry
    context: int | None
    draft_tokens: int = 0
    path: str | None = None
    choices: tuple[Choices, ...] = ()


@dataclass(frozen=True)
class Variant:
    """Holds the changes that a server's flags make to the layout: draft tokens a step, row formats, HiSparse.

    fp4 indexer rows, bf16 states, the kv rows; HiSparse keeps the c4 rows in a host pool of the engine's.
    draft_tokens: None takes the config's.
    """

    draft_tokens: int | None = 0
    fp4_indexer: bool = False
    bf16_states: bool = False
    kv_layout: str = "v4"
    hisparse: bool = False

    def __post_init__(self) -> None:
        if self.hisparse and self.draft_tokens:
            raise ConfigError("--hisparse with --draft-tokens: such a server keeps no rows, and makes no copies")
        if not 0 <= (self.draft_tokens or 0) <= MOST_DRAFT_TOKENS:
            raise ConfigError(f"--draft-tokens {self.draft_tokens}: covered are 0 to {MOST_DRAFT_TOKENS}")


def example_names() -> list[str]:
    """Returns names of the configs that ship with the package."""
    return sorted(path.stem for path in EXAMPLES.glob("*.json"))


def read_model(config: str, variant: Variant) -> Model:
    """Reads the model of ``config``: an example's name, a config.json, or the folder that holds one.

    Raises ConfigError for a file that cannot be read, a model that is not DeepSeek-V4, and a field that is
    missing or has a value whose layout is not covered.
    """
    path = _path(config)
    try:
        fields = json.loads(path.read_text(encoding="utf-8-sig"))  # an editor may have put a byte order mark before it
    except (OSError, ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number or a nesting beyond all use
        raise ConfigError(f"{path}: {error}; give a config.json or one of {', '.join(example_names())}") from error
    reader = _Reader(path, _flat(fields))
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    context = reader.whole("max_position_embeddings", 2) if "max_position_embeddings" in reader.fields else None
    if variant.draft_tokens is None:
        variant = replace(variant, draft_tokens=0 if variant.hisparse else _draft_tokens(reader))
    served = None if config in example_names() else str(path.parent if path.name == "config.json" else path)
    geometry = _geometry(reader, variant)
    return Model(name, geometry, context, variant.draft_tokens or 0, served, tuple(_choices(reader, geometry)))


def _choices(reader: _Reader, geometry: Geometry) -> Iterator[Choices]:
    """Yields what the engine can record of this model. It knows the indexer of ratio 4 alone."""
    ways = (
        ("enable_return_routed_experts", "num_experts_per_tok", len(geometry.ratios)),
        ("enable_return_indexer_topk", "index_topk", geometry.ratios.count(4)),
    )
    for feature, field, layers in ways:
        if layers and field in reader.fields:
            layer = 4 * reader.whole(field, 1)
            yield Choices(feature, layers, layer, layers * layer)


def _flat(fields: Any) -> Any:
    """Returns the text model's fields beside the others, as the engine has them: V4.1 nests them, and its own names
    win.
    """
    text = fields.get("text_config") if isinstance(fields, dict) else None
    return {**text, **fields} if isinstance(text, dict) else fields


def _path(config: str) -> Path:
    if config in example_names():
        return EXAMPLES / f"{config}.json"
    path = Path(config)
    return path / "config.json" if path.is_dir() else path


class _Reader:
    """Reads the fields of one config, with checks."""

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
    kind = reader.get("model_type")
    if not isinstance(kind, str) or kind not in MODELS:
        raise reader.refuse("model_type", f"is {kind!r}, covered: {', '.join(MODELS)} (others keep another cache)")
    if variant.hisparse and MODELS[kind]:
        raise ConfigError("--hisparse: SGLang does not serve DeepSeek-V4.1 with HiSparse")
    reader.exactly("num_key_value_heads", 1, "one row a token serves all heads")
    reader.exactly("head_dim", Geometry.head_dim, "the kv row")
    # fp8 but for the RoPE part, which is bf16: a value byte more for each of its dimensions.
    reader.exactly("qk_rope_head_dim", KV_ROWS["v4"].planes[0] - Geometry.head_dim, "the kv row")
    ratios = _ratios(reader, (0, *(ratio for ratio, rule in COMPRESSIONS.items() if rule.shared is MODELS[kind])))
    own = {ratio: rule for ratio, rule in COMPRESSIONS.items() if not rule.shared and ratio in ratios}
    if any(ratio and COMPRESSIONS[ratio].indexed for ratio in ratios):
        reader.exactly("index_head_dim", Geometry.index_head_dim, "the indexer row")
    window = reader.whole("sliding_window", 1)
    if not 8 <= window <= Geometry.page_size:
        raise reader.refuse("sliding_window", f"is {window}, covered: 8 to the page of {Geometry.page_size} tokens")
    drafts = variant.draft_tokens or 0
    return Geometry(
        ratios,
        window=window,
        sources=_sources(reader, ratios),
        rings=_rings(drafts) if drafts else {},
        kv_rows={ratio: _kv_row(ratio, variant.kv_layout) for ratio in set(ratios) | {0}},
        index_rows=dict.fromkeys(own, "fp4") if variant.fp4_indexer else {},
        elsewhere=KEPT_BY_HISPARSE if variant.hisparse and 4 in ratios else (),
        state_bytes=dict.fromkeys(own, 2) if variant.bf16_states else {},  # those of ratio 2 stay fp32
        draft=Draft(DRAFT_LAYERS, window - 1, variant.kv_layout) if drafts else None,
    )


def _rings(drafts: int) -> dict[int, int]:
    """Returns rows of each state ring with so many draft tokens a step."""
    return {
        ratio: _power_of_two(ratio + drafts) if rule.shared else (ratio + rule.lag) * RING_GROWTH
        for ratio, rule in COMPRESSIONS.items()
    }


def _draft_tokens(reader: _Reader) -> int:
    """Returns the draft tokens of a step that runs each of the config's draft layers once: one more than them."""
    if not reader.fields.get("num_nextn_predict_layers"):
        return 0
    layers = reader.whole("num_nextn_predict_layers", 0)
    if layers >= MOST_DRAFT_TOKENS:
        raise reader.refuse("num_nextn_predict_layers", f"is {layers}, covered: 0 to {MOST_DRAFT_TOKENS - 1}")
    return layers + 1


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _kv_row(ratio: int, layout: str) -> str:
    """Returns the row that the engine pairs with the window's: V4.1's compressed rows were rounded to fp4 before."""
    return layout.replace("v41", "v41_fp4") if ratio in SHARING else layout


def _ratios(reader: _Reader, covered: tuple[int, ...]) -> tuple[int, ...]:
    """Returns one ratio for each layer of the model; any more in the list belong to the draft layers."""
    layers = reader.whole("num_hidden_layers", 1)
    ratios = reader.get("compress_ratios")
    if not isinstance(ratios, list):
        raise reader.refuse("compress_ratios", f"is {ratios!r}, needed: a list with one ratio a layer")
    if len(ratios) < layers:
        raise reader.refuse("compress_ratios", f"has {len(ratios)} entries for num_hidden_layers {layers}")
    for layer, ratio in enumerate(ratios[:layers]):
        if type(ratio) is not int or ratio not in covered:
            raise reader.refuse(f"compress_ratios[{layer}]", f"is {ratio!r}, covered: {', '.join(map(str, covered))}")
    return tuple(ratios[:layers])


def _sources(reader: _Reader, ratios: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the layers whose caches others of their ratio read, ratio by ratio, as the engine's pool has them."""
    given = reader.fields.get("kv_source_layer_ids") or []
    if not isinstance(given, list) or any(type(layer) is not int for layer in given):
        raise reader.refuse("kv_source_layer_ids", f"is {given!r}, needed: a list of layers")
    strange = [layer for layer in given if not 0 <= layer < len(ratios) or ratios[layer] not in SHARING]
    if strange:
        raise reader.refuse("kv_source_layer_ids", f"has {strange[0]}, which is no layer of a shared ratio")
    for layer, ratio in enumerate(ratios):
        if ratio in SHARING and not any(ratios[source] == ratio for source in given if source <= layer):
            raise reader.refuse("kv_source_layer_ids", f"has no layer of ratio {ratio} for layer {layer} to read")
    return tuple(layer for ratio in COMPRESSIONS for layer in sorted(set(given)) if ratios[layer] == ratio)
