#!/usr/bin/env python3
"""Write what docs/ says of the code, from the code: tables between their markers, and the pictures of docs/img.

    python3 tools/docs/draw_docs.py [--check]

--check changes nothing and fails, naming the file, when something is behind. Needs prometheus_client and torch.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import draw_pictures
from sections import DOCS, ROOT, Sections, bring_up_to_date, rebuilt, table

from sglang_dsv4.cache.families import KV_ROWS, Draft, Geometry, families
from sglang_dsv4.cache.family import Family, Group
from sglang_dsv4.cache.groups import init_groups
from sglang_dsv4.cache.packed import PackedBlock
from sglang_dsv4.engine.hooks import HOOKS, Hook
from sglang_dsv4.engine.standalone import FLASH41_RATIOS, FLASH41_SOURCES, FLASH_RATIOS, PRO_RATIOS
from sglang_dsv4.metrics import Exporter, PrepExporter
from sglang_dsv4.settings import TABLE

FLASH = "Flash (43 layers)"
V41 = Geometry(FLASH41_RATIOS, sources=FLASH41_SOURCES)
MODELS = {FLASH: Geometry(FLASH_RATIOS), "Pro (61 layers)": Geometry(PRO_RATIOS), "V4.1 Flash (40 layers)": V41}
V41_ROWS = Geometry(FLASH41_RATIOS, sources=FLASH41_SOURCES, kv_rows={0: "v41", 1: "v41_fp4", 2: "v41_fp4"})
LENGTHS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)


def settings() -> list[str]:
    """One row a setting."""
    return table(
        ("variable", "default", "meaning"), ((f"`{s.variable}`", s.default, s.meaning) for s in TABLE.values())
    )


def _planes(family: Family) -> str:
    return " + ".join(str(plane.row_bytes) for plane in family.planes)


def _families_of(geometry: Geometry) -> list[str]:
    """One row a family."""
    rows = (
        (f"`{f.name}`", f.group.value, f.address.value, f"{f.rows}" if f.tiles == 1 else f"{f.tiles} x {f.tile_rows}",
         _planes(f), f"{f.page_bytes:,}", f.host_rows, f"{f.host_bytes:,}", len(f.layers))
        for f in families(geometry)
    )  # fmt: skip
    head = ("family", "group", "device page found by", "rows a page", "bytes a row", "bytes a page", "host rows",
            "host bytes a layer", "layers")  # fmt: skip
    return table(head, rows)


def families_table() -> list[str]:
    """Those of V4 Flash."""
    return _families_of(MODELS[FLASH])


def families_draft() -> list[str]:
    """A draft's beside V4."""
    head, rule, *rows = _families_of(Geometry(FLASH_RATIOS, draft=Draft(1, Geometry.window - 1)))
    return [head, rule, *(row for row in rows if row.startswith("| `draft"))]


def families_v41() -> list[str]:
    """Those of V4.1 Flash on the rows of an sm_90 server."""
    return _families_of(V41)


def families_v41_rows() -> list[str]:
    """Those of V4.1 Flash on the rows of an sm_100 server."""
    return _families_of(V41_ROWS)


def kv_rows() -> list[str]:
    """One row a way to store a kv row."""
    rows = ((f"`{name}`", " + ".join(map(str, row.planes)), row.padded_to) for name, row in KV_ROWS.items())
    return table(("kv row", "bytes", "pages are padded to a multiple of"), rows)


def offsets() -> list[str]:
    """Where each family starts in the packed block, both models."""
    rows = []
    for model, geometry in MODELS.items():
        for group, spec in init_groups(geometry).items():
            packed = PackedBlock.of(spec)
            starts = ", ".join(f"`{f.name}` {o:,}" for f, o in zip(packed.families, packed.offsets, strict=True))
            rows.append((model, group.value, starts, f"{packed.payload_bytes:,}", f"{packed.block_stride:,}"))
    return table(("model", "group", "family starts at byte", "payload", "block_stride"), rows)


def copy_bytes(geometry: Geometry, tokens: int) -> int:
    """Host bytes that one copy of ``tokens`` tokens holds."""
    return sum(s.blocks_for(tokens) * PackedBlock.of(s).block_stride for s in init_groups(geometry).values())


def copies() -> list[str]:
    """Host memory of one copy, by length."""
    rows = ((model, *(f"{copy_bytes(g, n) / 2**20:,.0f} MiB" for n in LENGTHS)) for model, g in MODELS.items())
    return table(("one copy of", *(f"{n >> 20}M tokens" if n >> 20 else f"{n >> 10}K tokens" for n in LENGTHS)), rows)


def shares() -> list[str]:
    """The two terms of the sizing formula."""
    rows = []
    for model, geometry in MODELS.items():
        stride = {group: PackedBlock.of(spec).block_stride for group, spec in init_groups(geometry).items()}
        a_copy = stride[Group.WINDOW] + stride[Group.REQUEST]
        rows.append((model, f"{a_copy / 2**20:.1f} MiB", f"{stride[Group.PAGED] / 2**20:.2f} MiB"))
    return table(("model", "each copy, whatever its length", "and for each 256 tokens"), rows)


def series() -> list[tuple[str, str, str]]:
    """(name as scraped, kind, help) of every series, from the exporters."""
    import prometheus_client  # noqa: PLC0415

    registry = prometheus_client.CollectorRegistry()
    exporter = Exporter({"tp_rank": "0"}, 0, registry)
    exporter.fell_back("reason")
    PrepExporter({"tp_rank": "0"}, registry).left("reason")
    found = []
    for metric in registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = sorted({label for sample in metric.samples for label in sample.labels} - {"tp_rank"})
        found.append((name + (f"{{{', '.join(labels)}}}" if labels else ""), metric.type, metric.documentation))
    return found


def metrics() -> list[str]:
    """One row a series."""
    return table(("series", "kind", "meaning"), ((f"`{name}`", kind, what) for name, kind, what in series()))


def hooks() -> list[str]:
    """One row a hook."""
    rows = (
        (f"`{h.target.removeprefix('sglang.srt.')}`", h.kind, releases(h), h.part, f"`{h.ours}`", h.why, h.gone_when)
        for h in HOOKS
    )  # fmt: skip
    return table(("target in `sglang.srt`", "kind", "releases", "part", "our hook", "why", "gone when"), rows)


def releases(hook: Hook) -> str:
    """The range of an entry of the hook table."""
    limits = [f"from {hook.since}" if hook.since else "", f"before {hook.before}" if hook.before else ""]
    return ", ".join(filter(None, limits)) or "all"


def groups() -> list[str]:
    """One row a group: what is in it, and what its block takes."""
    rows = []
    for group in Group:
        specs = [init_groups(geometry)[group] for geometry in MODELS.values()]
        grows = "n / 256 blocks, rounded up" if specs[0].max_blocks is None else "one block"
        names = ", ".join(dict.fromkeys(f"`{family.name}`" for spec in specs for family in spec.families))
        rows.append((group.value, grows, names, *(f"{PackedBlock.of(spec).block_stride:,} B" for spec in specs)))
    return table(("group", "a copy of n tokens holds", "families", *(f"a block, {name}" for name in MODELS)), rows)


def paddings() -> list[str]:
    """Pages that have padding behind their planes: what is used, what is padding."""
    rows = []
    for f in families(MODELS[FLASH]):
        used = f.rows * f.row_bytes
        if f.page_bytes > used:
            rows.append((f"`{f.name}`", f.rows, f"{used:,}", f"{f.page_bytes:,}", f.page_bytes - used))
    return table(("family", "rows a page", "used bytes", "page bytes", "padding"), rows)


def modules() -> list[Path]:
    """Every module of the package and of the kernels, in the order of the page."""
    found = [path for package in ("sglang_dsv4", "triton_ops") for path in (ROOT / package).rglob("*.py")]
    return sorted(path for path in found if path.name != "__init__.py")


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring: what it is for."""
    words = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n", maxsplit=1)[0].split())
    return words.split(". ")[0].rstrip(".:").replace("``", "`") + "."


def structure() -> list[str]:
    """One line a module, by folder."""
    lines: list[str] = []
    for folder in dict.fromkeys(path.parent for path in modules()):
        name = folder.relative_to(ROOT)
        lines += ["", f"**`{name}/`** {purpose(folder / '__init__.py')}", ""]
        inside = (path for path in modules() if path.parent == folder)
        lines += [f"- [`{path.name}`](../{path.relative_to(ROOT)}): {purpose(path)}" for path in inside]
    return lines[1:]


SECTIONS: dict[str, Sections] = {
    "settings.md": {"settings": settings},
    "layout.md": {
        "groups": groups,
        "families": families_table,
        "families v41": families_v41,
        "families draft": families_draft,
        "families v41 rows": families_v41_rows,
        "kv rows": kv_rows,
        "paddings": paddings,
        "offsets": offsets,
    },
    "operating.md": {"copies": copies, "shares": shares, "metrics": metrics},
    "new-sglang-version.md": {"hooks": hooks},
    "structure.md": {"modules": structure},
}


def wanted() -> dict[Path, str]:
    """What every drawn file must hold."""
    texts = {DOCS / name: rebuilt((DOCS / name).read_text(), sections) for name, sections in SECTIONS.items()}
    return texts | {DOCS / "img" / name: draw() for name, draw in draw_pictures.PICTURES.items()}


if __name__ == "__main__":
    sys.exit(bring_up_to_date(wanted(), __doc__))
