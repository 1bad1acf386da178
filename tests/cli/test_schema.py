from __future__ import annotations

import json

from click.testing import CliRunner
from jsonschema import Draft202012Validator

from ablate.cli import cli
from ablate.study.schema import json_schema


def test_the_schema_is_printed():
    result = CliRunner().invoke(cli, ["schema"], catch_exceptions=False)
    assert result.exit_code == 0
    schema = json.loads(result.output)
    assert schema == json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(schema)


def test_help_says_how_an_editor_uses_it():
    result = CliRunner().invoke(cli, ["schema", "--help"])
    assert "yaml-language-server" in result.output
