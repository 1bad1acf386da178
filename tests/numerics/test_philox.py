from dataclasses import replace

import pytest
import torch

from ablate.numerics.philox import philox4x32, random_words
from tests.numerics.strategies import KEY

# Known answers of Random123 (Salmon et al.), file kat_vectors: counter, key, rounds, result.
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
ONES = (0xFFFFFFFF,) * 4
KNOWN = [
    ((0, 0, 0, 0), (0, 0), 10, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (ONES, ONES[:2], 10, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI[:4], PI[4:], 10, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ((0, 0, 0, 0), (0, 0), 7, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (ONES, ONES[:2], 7, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (PI[:4], PI[4:], 7, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
]


@pytest.mark.parametrize(("counter", "words", "rounds", "expected"), KNOWN)
def test_known_answers(counter, words, rounds, expected):
    result = philox4x32(tuple(torch.tensor(c) for c in counter), words, rounds)
    assert tuple(int(word) for word in result) == expected


def test_an_elements_word_is_where_the_docstring_says_whatever_the_shape():
    key = replace(KEY, step=9, call=2)
    words = random_words(3, 130, key)
    for row, column in ((0, 0), (2, 1), (1, 31), (1, 32), (0, 63), (2, 64), (1, 129)):
        counter = (column // 64 * 16 + column % 32 // 2, row, 9, 2)
        call = philox4x32(tuple(torch.tensor(c) for c in counter), KEY.words())
        assert words[row, column] == call[column // 32 % 2 * 2 + column % 2]
    assert torch.equal(random_words(40, 200, key)[:3, :130], words)


def test_every_field_of_the_key_gives_another_stream():
    for field in ("seed", "layer", "gemm", "operand", "step", "call"):
        other = random_words(2, 64, replace(KEY, **{field: 7}))
        assert not torch.equal(other, random_words(2, 64, KEY)), field
