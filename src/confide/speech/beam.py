"""CTC beam search over a word list with an n-gram language model (an option; the paper decodes greedily).

The search is flashlight-text's lexicon decoder. Its wheel holds the decoder in C++ and KenLM itself, so that nobody has
to compile anything; pyctcdecode searches in Python and needs numpy below 2 and a KenLM built from source.

The search finds only words of its word list: the model's own 1-grams, or a text file with a word per line, which a
binary KenLM file needs. Words are spelt in lower case; one that the token set cannot spell is left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field

from confide.errors import UserError
from confide.settings import LocalPath, Section
from confide.speech.decode import Word, confidence, merge_repeats, split_words

_MARKS = {"<s>", "</s>", "<unk>", "<UNK>"}
# Log-probability of any token but boundary and blank in the frame that `words` appends.
_IMPOSSIBLE = -1e4


class BeamSettings(Section):
    """The language model and how much it counts."""

    language_model: LocalPath = Field(description="n-gram model: ARPA text, or KenLM's binary form")
    words: LocalPath | None = Field(None, description="a word per line; none: the 1-grams of the ARPA file")
    beam: int = Field(100, ge=1, description="hypotheses kept at each frame")
    beam_tokens: int = Field(30, ge=1, description="tokens tried at each frame, best first")
    threshold: float = Field(25.0, gt=0, description="hypotheses so far below the best one are dropped")
    weight: float = Field(1.0, ge=0, allow_inf_nan=False, description="of the language model's log10 probability")
    word_score: float = Field(0.0, allow_inf_nan=False, description="added for every word; above 0: more words")


class BeamSearch:
    """A decoder for many utterances. `names` are the tokens in the order of the logits; a word is spelt with the
    one-character ones."""

    def __init__(self, settings: BeamSettings, names: Sequence[str], blank: int = 0, boundary: int = 1) -> None:
        decoder, kenlm, dictionary = _library()
        letters = {name: i for i, name in enumerate(names) if len(name) == 1 and i not in (blank, boundary)}
        listed = _words(settings)
        spelt = [word for word in listed if all(letter in letters for letter in word.lower())]
        self.skipped = len(listed) - len(spelt)
        if not spelt:
            source = settings.words or settings.language_model
            raise UserError(f"no word of {source} can be spelt with the tokens {''.join(letters)}; give other words")
        self._words = [word.lower() for word in spelt]
        self.tokens, self._blank, self._boundary = len(names), blank, boundary

        entries = dictionary.Dictionary()
        for word in [*spelt, "<unk>"]:
            entries.add_entry(word)
        try:
            model = kenlm.KenLM(str(settings.language_model), entries)
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"{settings.language_model} cannot be read as an n-gram model: {str(error).splitlines()[-1]}; give "
                "an ARPA file or one that KenLM's build_binary made"
            ) from error
        trie = decoder.Trie(self.tokens, boundary)
        start = model.start(False)
        for index, word in enumerate(self._words):
            _, alone = model.score(start, index)
            trie.insert([*(letters[letter] for letter in word), boundary], index, alone)
        trie.smear(decoder.SmearingMode.MAX)
        options = decoder.LexiconDecoderOptions(
            settings.beam, min(settings.beam_tokens, self.tokens), settings.threshold, settings.weight,
            settings.word_score, -np.inf, 0.0, False, decoder.CriterionType.CTC,
        )  # fmt: skip
        unknown = entries.get_index("<unk>")
        self._decoder = decoder.LexiconDecoder(options, trie, model, boundary, blank, unknown, [], False)
        self._keep_alive = (trie, model, entries)

    def words(self, logits: np.ndarray) -> list[Word]:
        """The best words of one utterance with their frames."""  # logits (frames, tokens)
        if logits.ndim != 2 or logits.shape[1] != self.tokens:
            raise UserError(f"logits have shape {logits.shape}; expected (frames, {self.tokens})")
        frames = len(logits)
        if frames == 0:
            return []
        emissions = np.full((frames + 1, self.tokens), _IMPOSSIBLE, dtype=np.float32)
        emissions[:frames] = torch.log_softmax(torch.from_numpy(logits), dim=1)
        emissions[frames, [self._blank, self._boundary]] = 0.0  # lets the last word end with the utterance
        results = self._decoder.decode(emissions.ctypes.data, frames + 1, self.tokens)
        if not results:
            return []
        # The path has a step before the first frame and one after the last.
        path = np.asarray(results[0].tokens[1 : frames + 2])[None]
        (runs,) = merge_repeats(path, np.array([path.shape[1]]), self._blank)
        chosen = [self._words[index] for index in results[0].words if 0 <= index < len(self._words)]
        # The utterance may end inside a word, which then has runs but no text.
        spelt = zip(chosen, split_words(runs, self._boundary), strict=False)
        return [Word(text, own[0].first, min(own[-1].last, frames - 1), confidence(logits, own)) for text, own in spelt]

    def text(self, logits: np.ndarray) -> str:
        return " ".join(word.text for word in self.words(logits))


def equal_words(words: Sequence[str]) -> str:
    """A language model that knows these words alone, each as likely after any other, as the text of an ARPA file.

    Where it is known what can be said, it corrects spelling and knows nothing else.
    """
    each = f"{-np.log10(len(words)):.4f}"
    ones = ["-99\t<s>\t0", "-1\t</s>", "-99\t<unk>", *(f"{each}\t{word}\t0" for word in words)]
    twos = [f"{each}\t<s> {words[0]}"]  # says nothing; KenLM wants a pair
    parts = [f"\\data\\\nngram 1={len(ones)}\nngram 2={len(twos)}", "\n".join(["\\1-grams:", *ones])]
    return "\n\n".join([*parts, "\n".join(["\\2-grams:", *twos]), "\\end\\\n"])


def _words(settings: BeamSettings) -> list[str]:
    """The word list, without repeats, in the file's order."""
    for path in (settings.language_model, settings.words):
        if path is not None and not path.is_file():
            raise UserError(f"there is no file {path}; give the path of an n-gram model, and of its word list")
    try:
        if settings.words is not None:
            listed = [line.strip() for line in settings.words.read_text(encoding="utf-8").splitlines()]
        else:
            listed = list(_one_grams(settings.language_model))
    except UnicodeDecodeError as error:
        if settings.words is not None:
            raise UserError(f"{settings.words} is not UTF-8 text; give a text file with a word per line") from error
        raise UserError(
            f"{settings.language_model} is not text, so it does not tell its words; give them as `words`, one per line"
        ) from error
    return list(dict.fromkeys(word for word in listed if word and word not in _MARKS))


def _one_grams(path: Path) -> Iterator[str]:
    """The words of an ARPA file's section of 1-grams."""
    inside = False
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("\\"):
                if inside:
                    return
                inside = line.strip() == "\\1-grams:"
            elif inside and line.strip():
                parts = line.split()
                if len(parts) < 2:
                    raise UserError(f"{path} has a 1-gram without a word: {line.strip()!r}; give a whole ARPA file")
                yield parts[1]
    raise UserError(
        f"{path} is no ARPA file, or a truncated one: its section of 1-grams does not end; give a whole one"
    )


def _library() -> list[Any]:
    """flashlight-text's modules: decoder, KenLM and dictionary."""
    try:
        return [import_module(f"flashlight.lib.text.{name}") for name in ("decoder", "decoder.kenlm", "dictionary")]
    except ImportError as error:
        raise UserError(
            "beam search needs flashlight-text, which is not installed: pip install 'confide[beam]', or decode greedily"
        ) from error
