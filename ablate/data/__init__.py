"""Text to tokens, once: which corpus it is (``identify``) and its token files (``prepare``).

Every run of a study reads the same two token files, so they are made once and kept under a hash of their
content. ``identify`` is what planning calls: it reads no text that it has seen before and imports nothing
heavy. ``prepare`` writes the token cache; workers reopen it with ``load`` and ``open_tokens``. Batches are
in ``ablate.data.batches``, which needs numpy and is therefore not imported here.

A corpus that cannot be used raises ``UserError``: one line that names the file and the likely mend.
"""

from ablate.data.identity import DataIdentity, identify
from ablate.data.prepare import prepare
from ablate.data.token_files import TokenFiles, load, open_tokens

__all__ = ["DataIdentity", "TokenFiles", "identify", "load", "open_tokens", "prepare"]
