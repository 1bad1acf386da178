"""``ablate schema``: the JSON Schema of study files, for editors."""

from __future__ import annotations

import click


@click.command("schema")
def command() -> None:
    """Print the JSON Schema of study files, so that an editor completes and checks them.

    \b
    Example:
      ablate schema > study.schema.json
    and, as the first line of a study (read by yaml-language-server, as in VS Code):
      # yaml-language-server: $schema=study.schema.json
    """  # noqa: D301  \b is click's mark for a paragraph that keeps its line breaks
    import json

    from ablate.study.schema import json_schema

    click.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))
