"""The table of docs/recipes.md, written from the presets: ``python -m ablate.recipes.table`` prints it."""

from __future__ import annotations

from ablate.recipes.describe import describe
from ablate.recipes.presets import PRESETS


def markdown() -> str:
    """Return one row for each preset: name, what it is, its operands in short, and its source."""
    rows = ["| recipe | what | operands | source |", "|---|---|---|---|"]
    for preset in PRESETS.values():
        source = f"[{preset.source.authors}, {preset.source.year}]({preset.source.url})"
        rows.append(f"| `{preset.name}` | {preset.summary} | {describe(preset.recipe)} | {source} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
