"""The role of a layer, from its name and those beside it.

``roles.txt`` has the layers of a model in each line, then the layers by role. ``REWRITE=1`` writes what
stands under them anew.
"""

from pathlib import Path

from ablate.recipes.place import places
from tests.golden import check_answers


def answers(line):
    layers = {} if line.startswith("#") else places(line.split(), heads=["lm_head"])
    by_role = {}
    for name, place in layers.items():
        by_role.setdefault(place.role, []).append(name)
    for role, names in by_role.items():
        yield f"{role or 'no role'}: {' '.join(names)}"


def test_a_role_is_in_the_name_or_in_the_layers_beside():
    check_answers(Path(__file__).with_name("roles.txt"), answers)
