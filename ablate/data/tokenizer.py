"""Text to token ids: bytes, a BPE trained on the training text, or a Hugging Face tokeniser.

Every document is followed by the end-of-text token. For bytes that is byte 0, so the vocabulary is
256; a NUL inside a text becomes U+FFFD. The others have a special token that text cannot produce: its
literal spelling in a document is tokenised as ordinary text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

END_OF_TEXT = "<|endoftext|>"
BPE_SAMPLE_BYTES = 64 << 20
"""Merges are learnt from this many bytes at the start of the training text: more would change few of them."""

_NUL_INSTEAD = "\N{REPLACEMENT CHARACTER}".encode()


class Tokenizer(Protocol):
    """The interface of a tokeniser for preparation."""

    def encode(self, texts: Sequence[bytes]) -> NDArray[Any]:
        """Return the ids of all texts, concatenated, each followed by the end-of-text token."""


class ByteTokenizer:
    """A tokeniser whose ids are the byte values."""

    def encode(self, texts: Sequence[bytes]) -> NDArray[Any]:
        """Return the bytes of all texts, each followed by 0."""
        joined = b"".join(text.replace(b"\0", _NUL_INSTEAD) + b"\0" for text in texts)
        return np.frombuffer(joined, dtype=np.uint8)


class JsonTokenizer:
    """A tokeniser of the ``tokenizers`` package."""

    def __init__(self, tokenizer: Any, end_of_text: str) -> None:
        self._tokenizer = tokenizer
        self._end_id = tokenizer.token_to_id(end_of_text)
        self.vocab_size: int = tokenizer.get_vocab_size()
        # Some tokenizer.json files set these for single inputs; here they would truncate documents.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True

    def encode(self, texts: Sequence[bytes]) -> NDArray[Any]:
        """Return the ids of all texts, each followed by the end-of-text token."""
        encodings = self._tokenizer.encode_batch_fast(
            [text.decode("utf-8", "replace") for text in texts], add_special_tokens=False
        )
        end = [self._end_id]
        return np.concatenate([np.array(ids + end, dtype=np.uint32) for ids in (e.ids for e in encodings)])

    def save(self, folder: Path) -> Path:
        """Write ``tokenizer.json``, which decodes the tokens, beside them."""
        path = folder / "tokenizer.json"
        self._tokenizer.save(str(path))
        return path


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> JsonTokenizer:
    """Train a byte-level BPE. The same texts give the same tokeniser.

    A small corpus can run out of pairs before ``vocab_size``; the remaining ids then never occur.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def sample() -> Iterable[str]:
        taken = 0
        for text in texts:
            yield text.decode("utf-8", "replace")
            taken += len(text)
            if taken >= BPE_SAMPLE_BYTES:
                return

    backend.train_from_iterator(sample(), trainer)
    return JsonTokenizer(backend, END_OF_TEXT)


def open_json(path: Path, end_of_text: str) -> JsonTokenizer:
    """Open a ``tokenizer.json`` of a BPE, or one found by ``hub.find_tokenizer``."""
    from tokenizers import Tokenizer as Backend

    return JsonTokenizer(Backend.from_file(str(path)), end_of_text)
