"""The table of docs/recipes.md, from the presets: ``python -m ablate.recipes.table`` prints it."""

from __future__ import annotations

from ablate.recipes.describe import describe
from ablate.recipes.presets import PRESETS


def markdown() -> str:
    """Return the table: name, summary, short operands and source of each preset."""
    rows = ["| recipe | what | operands | source |", "|---|---|---|---|"]
    for preset in PRESETS.values():
        source = f"[{preset.source.authors}, {preset.source.year}]({preset.source.url})"
        rows.append(f"| `{preset.name}` | {preset.summary} | {describe(preset.recipe)} | {source} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
