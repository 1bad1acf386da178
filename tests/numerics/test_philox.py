import pytest
import torch

from ablate.numerics.philox import Key, philox4x32, random_signs, random_words

# Known answers of Random123 (Salmon et al.), file kat_vectors: counter, key, result of philox4x32-10.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def key(**changes):
    return Key(**({"seed": 0, "layer": "a", "gemm": "wgrad", "operand": "x", "step": 3} | changes))


@pytest.mark.parametrize(("counter", "words", "expected"), KNOWN)
def test_known_answers(counter, words, expected):
    result = philox4x32(tuple(torch.tensor(c) for c in counter), words)
    assert tuple(int(word) for word in result) == expected


def test_words_depend_on_row_and_column_only():
    whole = random_words(40, 200, key())
    assert torch.equal(random_words(17, 90, key()), whole[:17, :90])
    assert whole.min() >= 0
    assert whole.max() < 2**32


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"layer": "b"}, {"gemm": "dgrad"}, {"operand": "dy"}, {"step": 4}, {"call": 1}]
)
def test_every_field_of_the_key_gives_an_unrelated_stream(change):
    a = random_words(64, 256, key()).double()
    b = random_words(64, 256, key(**change)).double()
    correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
    assert abs(correlation) < 5 / (64 * 256) ** 0.5


def test_rows_and_neighbouring_strips_are_uncorrelated():
    words = random_words(128, 256, key()).double()
    for a, b in ((words[:-1], words[1:]), (words[:, :-64], words[:, 64:]), (words[:, :-1], words[:, 1:])):
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(correlation) < 5 / a.numel() ** 0.5


def test_words_are_uniform():
    u = random_words(512, 512, key()).double() / 2**32
    assert abs(u.mean() - 0.5) < 5 * (1 / 12) ** 0.5 / 512
    assert abs(u.var() - 1 / 12) < 0.001


def test_signs_are_shared_by_operands_and_calls_and_renewed_each_step():
    signs = random_signs(32, key())
    assert set(signs.tolist()) <= {-1.0, 1.0}
    assert torch.equal(signs, random_signs(32, key(operand="dy", call=7)))
    many = torch.stack([random_signs(32, key(step=step)) for step in range(200)])
    assert len({tuple(row.tolist()) for row in many}) == 200
    assert abs(many.mean()) < 5 / (200 * 32) ** 0.5
