"""Convert text to tokens once: identify the corpus (``identify``) and write its token files (``prepare``).

Every run of a study reads the same two token files, which are kept under a hash of their content. Planning
calls ``identify``, which does not reread known text and imports nothing heavy. ``prepare`` writes the token
cache; workers reopen it with ``load`` and ``open_tokens``. Batches are in ``ablate.data.batches``, which is
not imported here because it needs numpy.

An unusable corpus raises ``UserError``: one line that names the file and the likely remedy.
"""

from ablate.data.identity import DataIdentity, identify
from ablate.data.prepare import TokenFiles, load, open_tokens, prepare

__all__ = ["DataIdentity", "TokenFiles", "identify", "load", "open_tokens", "prepare"]
