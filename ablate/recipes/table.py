"""The table of docs/recipes.md, from the presets: ``python -m ablate.recipes.table`` prints it."""

from __future__ import annotations

from ablate.recipes.describe import describe
from ablate.recipes.presets import PRESETS


def markdown() -> str:
    """Return the table: name, summary, short operands, source and check of each preset."""
    rows = ["| recipe | what | operands | source | checked |", "|---|---|---|---|---|"]
    for preset in PRESETS.values():
        source = f"[{preset.source.authors}, {preset.source.year}]({preset.source.url})"
        cells = (f"`{preset.name}`", preset.summary, describe(preset.recipe), source, preset.checked)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown())
