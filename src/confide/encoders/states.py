"""Hidden states that are computed once and then read from disk (CAR section 6.4: only the head trains).

When the adapter does not train, a text's vector never changes, so an epoch need not run the encoder. Vectors are kept
text by text (`encoders.kept`) under the encoder's identity (weights, tokeniser, pooling, tokens to a window), so
another split, another seed or a larger corpus computes only what is new.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from confide.encoders.encoder import Encoder
from confide.encoders.kept import Item, Kept, Maker, keep
from confide.files import digest

# Enough tokens to a batch to keep a processor busy, few enough to stay in its cache; padding counts.
BATCH_TOKENS = 2048
# A stopped run loses at most so many texts of each core.
_BLOCK_TEXTS = 512


@dataclass(frozen=True)
class HiddenStates:
    """Reads the vectors of a list of texts."""

    kept: Kept

    def __len__(self) -> int:
        return len(self.kept.keys)

    def rows(self, indices: Sequence[int] | NDArray[np.int64] | None = None) -> Tensor:
        """Read the vectors of the chosen texts, or of all, in this order."""  # (n, width)
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        return torch.from_numpy(self.kept.first_rows(chosen))


def hidden_states(
    encoder: Encoder, texts: Sequence[str], folder: Path | None = None, quiet: bool = False,
    batch_tokens: int = BATCH_TOKENS,
) -> HiddenStates:  # fmt: skip
    """Compute the vectors without an adapter that `folder` (none: the cache) does not hold yet, and open them all."""
    one_at_a_time = threading.Lock()  # tokenisers are not made for several threads
    windowed, cut = [0], [0]

    def deal(missing: list[int]) -> list[list[int]]:
        """Longest first: if the memory does not suffice, it shows at once."""
        order = np.argsort(-encoder.lengths([texts[i] for i in missing]), kind="stable")
        blocks = np.split(np.array(missing)[order], range(_BLOCK_TEXTS, len(missing), _BLOCK_TEXTS))
        return [block.tolist() for block in blocks]

    @torch.no_grad()
    def make(items: list[int]) -> list[Item]:
        found: list[Item] = []
        with one_at_a_time:
            lengths = encoder.lengths([texts[i] for i in items])
        for batch in batches_by_length(lengths, batch_tokens):  # stable, so in the order of the items
            with one_at_a_time:
                tokens = encoder.tokens([texts[items[i]] for i in batch])
                windowed[0], cut[0] = windowed[0] + tokens.windowed, cut[0] + tokens.cut
            found += [Item(row[None]) for row in encoder.hidden(tokens).numpy()]
        return found

    maker = Maker(encoder.identity, encoder.width, make, deal, "hidden states")
    kept = keep(maker, [digest([text]) for text in texts], folder, quiet)
    if windowed[0] and not quiet:
        also = f"; {cut[0]} of them go beyond {encoder.settings.max_windows} windows and are cut" if cut[0] else ""
        print(
            f"{windowed[0]} texts are longer than {encoder.max_tokens} tokens: read in windows{also}", file=sys.stderr
        )
    return HiddenStates(kept)


def batches_by_length(lengths: NDArray[np.int64], batch_tokens: int = BATCH_TOKENS) -> Iterator[NDArray[np.int64]]:
    """Batch indices by similar lengths, so that little of a batch is padding; the longest come first.

    A batch's texts times its longest is at most `batch_tokens`, unless one text alone is longer. Longest first: if
    the memory does not suffice, it shows at once, and the time left is over-estimated rather than under-estimated.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        longest = int(lengths[order[start]])
        count = max(1, batch_tokens // max(1, longest))
        yield order[start : start + count]
        start += count
