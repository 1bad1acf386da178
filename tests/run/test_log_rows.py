"""What trainers print, in the forms that they have, becomes rows (``logs.txt``)."""

import json
from pathlib import Path

import pytest
import yaml

from ablate.run.log_rows import LogReader, LogSource
from ablate.run.log_text import without_colours
from tests.golden import cases, check


@pytest.mark.parametrize("case", cases(Path(__file__).with_name("logs.txt")))
def test_what_trainers_print(case):
    """The first line of a case says how the others are read."""
    source, *lines = case[2].replace("\\x1b", "\x1b").strip().splitlines()
    reader = LogReader(LogSource(**yaml.safe_load(source)))
    check(
        case,
        [
            json.dumps(row)
            for line in lines
            for row in reader.rows(without_colours(line))
        ],
    )
