"""``ablate backends``: which formats this machine runs, and how."""

from __future__ import annotations

import json

import click


@click.command("backends")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for scripts.")
def command(as_json: bool) -> None:
    """Show what does the quantising and multiplying on this machine."""
    from ablate.backends import get_backend

    rows = []
    for name in ("emulated", "reference"):
        backend = get_backend(name)
        rows.append(
            {"backend": name, "mode": backend.mode, "formats": "all formats", "detail": backend.detail()}
        )
    if as_json:
        click.echo(json.dumps({"backends": rows}, indent=1))
        return
    for row in rows:
        click.echo(f"{row['backend']:<10} {row['mode']:<10} {row['formats']:<18} {row['detail']}")
