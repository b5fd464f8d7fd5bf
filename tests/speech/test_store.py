"""The feature store: what goes in comes out, what is broken is named, what changed is made again, the rest is free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from confide.encoders import kept
from confide.errors import UserError
from confide.speech import store as module
from confide.speech.corpus import Corpus, Utterance, read_audio
from confide.speech.decode import greedy
from confide.speech.features import FeatureSettings, log_mel
from confide.speech.model import ModelSettings, forward, initial_parameters
from confide.speech.store import FeatureStore, LogMel, frames_needed, open_store
from confide.speech.tokens import Tokens

ENGLISH, PAPER = Tokens("en"), FeatureSettings()
WORDS = ("one two", "three", "four five six", "seven")


def _write(path: Path, seconds: float, seed: int) -> None:
    draw = np.random.default_rng(seed)
    times = np.arange(round(seconds * 16_000)) / 16_000
    sound = 0.3 * np.sin(2 * np.pi * (200 + 50 * seed) * times) * (1 + np.sin(20 * times))
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, sound + 0.01 * draw.standard_normal(len(times)), 16_000)


def _corpus(folder: Path, speakers: int = 3, utterances: int = 4) -> Corpus:
    everyone: dict[str, list[Utterance]] = {}
    for s in range(speakers):
        own = everyone.setdefault(f"speaker-{s}", [])
        for u in range(utterances):
            path, seconds = folder / f"{s}" / f"{u}.flac", 0.6 + 0.2 * u
            if not path.exists():
                _write(path, seconds, 10 * s + u)
            own.append(Utterance(f"{s}-{u}", f"speaker-{s}", (path,), seconds, WORDS[u % 4]))
    return Corpus("toy", "en", everyone, [])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Three speakers with four utterances each, whose audio no test may change."""
    return _corpus(tmp_path_factory.mktemp("audio"))


def _open(corpus: Corpus, folder: Path) -> FeatureStore:
    return open_store(corpus, ENGLISH, LogMel(PAPER), folder, quiet=True)


@pytest.fixture
def no_signal_processing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        def refuse(*_: object) -> None:
            raise AssertionError("computed features again")

        monkeypatch.setattr(module, "log_mel", refuse)
        monkeypatch.setattr(module, "read_audio", refuse)

    return forbid


def test_features_targets_and_texts_are_those_of_the_corpus(corpus: Corpus, tmp_path: Path) -> None:
    store = _open(corpus, tmp_path)
    assert store.speakers == list(corpus.speakers)
    assert store.examples.tolist() == [4, 4, 4]
    assert store.skipped == []
    for user, own in enumerate(corpus.speakers.values()):
        features, targets = store.features(user, range(4)), store.targets(user, range(4))
        assert store.texts(user) == [utterance.text for utterance in own]
        assert store.seconds(user).tolist() == [utterance.seconds for utterance in own]
        assert store.frames(user).tolist() == [len(f) for f in features]
        for utterance, ours, target in zip(own, features, targets, strict=True):
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, log_mel(read_audio(utterance), PAPER), atol=4e-3)
            assert target.tolist() == ENGLISH.encode(utterance.text)


def test_indices_choose_and_order_utterances(corpus: Corpus, tmp_path: Path) -> None:
    store = _open(corpus, tmp_path)
    everything = store.features(1, range(4))
    chosen = store.features(1, np.array([3, 0, 3]))
    assert all(np.array_equal(a, everything[i]) for a, i in zip(chosen, [3, 0, 3], strict=True))
    assert [t.tolist() for t in store.targets(1, [2])] == [ENGLISH.encode(WORDS[2])]
    assert store.features(1, []) == []


def test_half_precision_hardly_moves_a_models_answer(corpus: Corpus, tmp_path: Path) -> None:
    settings = ModelSettings(preset="tiny")
    parameters = initial_parameters(settings, np.random.default_rng(0))
    store = _open(corpus, tmp_path)
    for stored, utterance in zip(store.features(0, range(4)), corpus.speakers["speaker-0"], strict=True):
        exact, kept = torch.from_numpy(log_mel(read_audio(utterance), PAPER)), torch.from_numpy(stored)
        length = torch.tensor([len(kept)])
        answers = [forward(settings, parameters, x[None], length, None) for x in (exact, kept)]
        moved = (answers[0][0].log_softmax(-1) - answers[1][0].log_softmax(-1)).abs().max()
        assert 0 < moved < 1e-2
        assert greedy(*answers[0]) == greedy(*answers[1])


def test_opening_again_computes_nothing(
    corpus: Corpus, tmp_path: Path, no_signal_processing: Callable[[], None]
) -> None:
    first = _open(corpus, tmp_path)
    no_signal_processing()
    second = _open(corpus, tmp_path)
    for user in range(3):
        for a, b in zip(first.features(user, range(4)), second.features(user, range(4)), strict=True):
            assert np.array_equal(a, b)


def test_the_audio_is_digested_when_features_are_made_and_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = _corpus(tmp_path / "audio", speakers=2)
    first = _open(corpus, tmp_path / "kept").audio
    assert len(set(first)) == 2
    with monkeypatch.context() as patch:
        patch.setattr(module, "_digest_audio", lambda utterances: pytest.fail("read the audio again"))
        assert _open(corpus, tmp_path / "kept").audio == first
    path = corpus.speakers["speaker-1"][2].audio[0]
    _write(path, corpus.speakers["speaker-1"][2].seconds, seed=99)
    changed = _open(corpus, tmp_path / "kept").audio
    assert changed[0] == first[0]
    assert changed[1] != first[1]
    elsewhere = Path(shutil.copytree(tmp_path / "audio", tmp_path / "moved"))
    assert _open(_corpus(elsewhere, speakers=2), tmp_path / "others").audio == changed, "only what is said counts"


def test_a_speaker_is_shared_by_corpora(
    corpus: Corpus, tmp_path: Path, no_signal_processing: Callable[[], None]
) -> None:
    _open(corpus, tmp_path)
    no_signal_processing()
    one = Corpus("part", "en", {"speaker-1": corpus.speakers["speaker-1"]}, [])
    assert _open(one, tmp_path).speakers == ["speaker-1"]


def test_the_same_corpus_gives_the_same_bytes_and_leaves_no_temporary_file(corpus: Corpus, tmp_path: Path) -> None:
    _open(corpus, tmp_path / "one")
    _open(corpus, tmp_path / "two")
    one, two = (sorted(p for p in (tmp_path / n).rglob("*") if p.is_file()) for n in ("one", "two"))
    assert [p.relative_to(tmp_path / "one") for p in one] == [p.relative_to(tmp_path / "two") for p in two]
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]
    assert not any(p.name.endswith(".tmp") for p in one)


# Changes and damage


def test_only_what_changed_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audio, cache = tmp_path / "audio", tmp_path / "cache"
    read: list[str] = []

    def counted(utterance: Utterance) -> np.ndarray:
        read.append(utterance.speaker)
        return read_audio(utterance)

    monkeypatch.setattr(module, "read_audio", counted)
    _open(_corpus(audio, 2, 1), cache)
    assert sorted(read) == ["speaker-0", "speaker-1"]
    _write(audio / "0" / "0.flac", 0.9, 77)
    store = _open(_corpus(audio, 2, 1), cache)
    assert read[2:] == ["speaker-0"]
    assert len(store.features(0, [0])[0]) == 88
    other = _corpus(audio, 1, 1)
    other.speakers["speaker-0"][0] = Utterance("0-0", "speaker-0", (audio / "0" / "0.flac",), 0.9, "nine")
    assert _open(other, cache).texts(0) == ["nine"]
    assert open_store(other, Tokens("de"), LogMel(PAPER), cache, quiet=True).texts(0) == ["nine"]
    assert len(read) == 3, "texts are not part of features"
    store = open_store(other, ENGLISH, LogMel(PAPER.model_copy(update={"mels": 40})), cache, quiet=True)
    assert store.features(0, [0])[0].shape == (88, 40)
    assert len(read) == 4


def _delete(path: Path) -> None:
    path.unlink()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_delete, _cut, _empty, _flip])
@pytest.mark.parametrize("while_open", [False, True])
def test_a_damaged_file_is_made_again(
    corpus: Corpus, tmp_path: Path, damage: Callable[[Path], None], while_open: bool
) -> None:
    first = _open(corpus, tmp_path)
    expected = {path: path.read_bytes() for path in tmp_path.rglob("*.kept")}
    for path in expected:
        damage(path)
    store = first if while_open else _open(corpus, tmp_path)
    for user in range(3):
        assert len(store.features(user, range(4))) == 4
    _open(corpus, tmp_path).features(0, [0])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.kept")} == expected


def test_audio_that_changes_under_an_open_store_is_an_error(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path / "audio", 1, 1)
    store = _open(corpus, tmp_path / "cache")
    _write(tmp_path / "audio" / "0" / "0.flac", 0.7, 99)
    (path,) = (tmp_path / "cache").rglob("*.kept")
    path.unlink()
    with pytest.raises(UserError, match="speaker-0 has changed"):
        store.features(0, [0])


# What cannot be used


def test_broken_utterances_are_named_and_skipped(tmp_path: Path) -> None:
    audio = tmp_path / "audio"
    corpus = _corpus(audio, 2, 4)
    (audio / "0" / "0.flac").write_bytes(b"")
    (audio / "0" / "1.flac").write_text("this is no audio")
    _cut(audio / "0" / "2.flac")
    second = corpus.speakers["speaker-1"]
    second[0] = Utterance("1-0", "speaker-1", second[0].audio, 0.6, "12 ?!")
    second[1] = Utterance("1-1", "speaker-1", second[1].audio, 0.8, "a sentence much too long for this much time")
    second[2] = Utterance("1-2", "speaker-1", (audio / "nowhere.flac",), 0.8, "one")
    for _ in range(2):  # made, then read from the cache
        store = _open(corpus, tmp_path / "cache")
        reasons = {item.id: item.reason for item in store.skipped}
        assert sorted(reasons) == ["0-0", "0-1", "0-2", "1-0", "1-1", "1-2"]
        assert "no text" in reasons["1-0"]
        assert "label too long: 46 frames needed" in reasons["1-1"]
        assert "missing" in reasons["1-2"]
        assert store.examples.tolist() == [1, 1]
        assert store.texts(0) == ["seven"]
        assert [u.id for u in store.utterances(1)] == ["1-3"]
        assert len(store.features(1, [0])[0]) == store.frames(1)[0]


def test_a_speaker_without_a_usable_utterance_is_no_user(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path / "audio", 2, 1)
    (tmp_path / "audio" / "0" / "0.flac").write_bytes(b"")
    store = _open(corpus, tmp_path / "cache")
    assert store.speakers == ["speaker-1"]
    assert store.texts(0) == [WORDS[0]]
    assert len(store.skipped) == 1


def test_a_corpus_without_a_usable_speaker_is_an_error(tmp_path: Path) -> None:
    corpus = _corpus(tmp_path / "audio", 1, 1)
    (tmp_path / "audio" / "0" / "0.flac").write_bytes(b"")
    with pytest.raises(UserError, match="toy has no usable utterance among 1"):
        _open(corpus, tmp_path / "cache")


@pytest.mark.parametrize(("word", "fits"), [("abcdef", 8), ("aabbcc", 11)])
def test_a_label_must_leave_room_for_blanks_between_repeats(word: str, fits: int, tmp_path: Path) -> None:
    label = ENGLISH.encode(word)
    assert frames_needed(label) == fits
    for frames, usable in ((3 * fits, True), (3 * fits - 1, False)):
        path = tmp_path / f"{frames}.wav"
        soundfile.write(path, np.zeros(400 + 160 * (frames - 1)) + 0.1, 16_000)
        own = {"s": [Utterance("u", "s", (path,), 1.0, word)]}
        if usable:
            assert _open(Corpus("c", "en", own, []), tmp_path / "cache").frames(0).tolist() == [frames]
        else:
            with pytest.raises(UserError, match="label too long"):
                _open(Corpus("c", "en", own, []), tmp_path / "cache")


@given(st.lists(st.integers(1, 3), min_size=1, max_size=12))
def test_frames_needed_is_where_ctc_becomes_finite(label: list[int]) -> None:
    needed = frames_needed(label)
    for frames, finite in ((needed, True), (needed - 1, False)):
        if frames:
            scores = torch.zeros(frames, 1, 4).log_softmax(-1)
            lengths = torch.tensor([frames]), torch.tensor([len(label)])
            loss = torch.nn.functional.ctc_loss(scores, torch.tensor([label]), *lengths, reduction="sum")
            assert bool(loss.isfinite()) == finite


def test_a_folder_that_cannot_be_made_is_a_users_mistake(corpus: Corpus, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(UserError, match="cannot make the cache folder"):
        _open(corpus, taken)


def test_a_full_disk_is_a_users_error(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept, "write_atomically", full)
    with pytest.raises(UserError, match=r"No space left.*MB free"):
        _open(corpus, tmp_path)


def test_the_cache_folder_is_the_users_unless_named(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CONFIDE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    open_store(corpus, ENGLISH, LogMel(PAPER), quiet=True)
    assert os.listdir(tmp_path / "confide") == ["kept"]
