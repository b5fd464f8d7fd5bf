"""The embedded corpus: the same bytes every time, populations that differ, and a cache that mends itself."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import soundfile
from pydantic import ValidationError

from confide.errors import UserError
from confide.randomness import generator
from confide.speech import voices
from confide.speech.corpus import Language, read_audio
from confide.speech.espeak import RECORD, Recording, Voice
from confide.speech.grammar import DIGITS, SLOTS, TEMPLATES, Sentences, make_sentence
from confide.speech.rooms import add_room_and_noise, impulse_response
from confide.speech.tokens import Tokens
from confide.speech.voices import SyntheticSettings, draw_texts, draw_voice, pairs, speak_all, synthetic_corpus

PLAIN = Voice("en-us", "m1", 50, 50, 170, 40.0, 0.0, 0.0, 0.0, 0.5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SyntheticSettings:
    """Four federated speakers with two utterances each, in a cache that no test may change."""
    cache = tmp_path_factory.mktemp("voices")
    settings = SyntheticSettings(population="federated", speakers=4, utterances=2, cache=cache)
    synthetic_corpus(settings, quiet=True)
    return settings


def _bytes(settings: SyntheticSettings) -> dict[str, bytes]:
    corpus = synthetic_corpus(settings, quiet=True)
    return {utterance.id: utterance.audio[0].read_bytes() for utterance in corpus.utterances()}


def _speaker_folder(settings: SyntheticSettings, number: int) -> Path:
    return list(synthetic_corpus(settings, quiet=True).speakers.values())[number][0].audio[0].parent


# Grammar


def vocabulary(language: Language, kind: Sentences) -> set[str]:
    """Every word that a sentence may hold."""
    words = set(DIGITS[language]) if kind != "commands" else set()
    if kind != "digits":
        for phrase in (*TEMPLATES[language], *(option for slot in SLOTS[language].values() for option in slot)):
            words.update(word for word in phrase.split() if not word.startswith("{"))
    return words


@pytest.mark.parametrize("language", get_args(Language))
def test_sentences_are_words_that_the_tokens_spell(language: Language) -> None:
    tokens, words = Tokens(language), vocabulary(language, "both")
    draw = generator(0, "test")
    said = [make_sentence(language, "both", (1, 5), draw) for _ in range(600)]
    assert all(tokens.normalise(text) == text for text in said)
    assert set(" ".join(said).split()) == words
    assert len(set(said)) > 300


def test_digits_are_spelt_out_and_as_many_as_asked_for() -> None:
    draw = generator(0, "test")
    counts = {len(make_sentence("en", "digits", (2, 4), draw).split()) for _ in range(200)}
    assert counts == {2, 3, 4}
    assert vocabulary("en", "digits") == set(DIGITS["en"])
    assert "seven" in vocabulary("en", "commands")
    assert "zero" not in vocabulary("en", "commands")


# Who speaks


def test_every_accent_and_variant_is_in_the_wheel() -> None:
    import espeakng_loader

    data = Path(espeakng_loader.get_data_path())
    accents = {path.name.lower() for path in (data / "lang").rglob("*") if path.is_file()}
    for language in get_args(Language):
        for population in get_args(voices.Population):
            for accent, variant in pairs(language, population):
                assert accent in accents
                assert variant in os.listdir(data / "voices" / "!v")


@pytest.mark.parametrize("language", get_args(Language))
def test_no_voice_is_in_two_populations(language: Language) -> None:
    seed, federated, test = (set(pairs(language, population)) for population in ("seed", "federated", "test"))
    assert not seed & federated
    assert not seed & test
    assert not federated & test
    assert not {variant for _, variant in seed} & {variant for _, variant in federated | test}
    assert len(test) >= 20
    assert len(federated) > 2 * len(test)


def test_english_users_have_other_accents_than_the_seed() -> None:
    assert {accent for accent, _ in pairs("en", "seed")} == {"en-us"}
    assert "en-us" not in {accent for accent, _ in pairs("en", "federated")}


def test_thousands_of_speakers_differ() -> None:
    settings = SyntheticSettings(population="federated", speakers=3000)
    assert len({draw_voice(settings, number) for number in range(3000)}) == 3000
    assert len({draw_texts(settings, number) for number in range(200)}) == 200


def test_another_seed_gives_other_speakers() -> None:
    assert draw_voice(SyntheticSettings(seed=1), 0) != draw_voice(SyntheticSettings(seed=0), 0)
    assert draw_texts(SyntheticSettings(seed=1), 0) != draw_texts(SyntheticSettings(seed=0), 0)


# Recordings


def test_utterances_are_16_bit_flac_at_16_khz_with_their_text(made: SyntheticSettings) -> None:
    corpus = synthetic_corpus(made, quiet=True)
    assert (corpus.name, corpus.language, corpus.skipped) == ("synthetic-federated", "en", [])
    assert list(corpus.speakers) == [f"en-federated-{number:05d}" for number in range(4)]
    for number, (name, own) in enumerate(corpus.speakers.items()):
        assert [utterance.text for utterance in own] == list(draw_texts(made, number))
        for utterance in own:
            assert utterance.speaker == name
            info = soundfile.info(utterance.audio[0])
            assert (info.format, info.subtype, info.samplerate, info.channels) == ("FLAC", "PCM_16", 16_000, 1)
            assert utterance.seconds == info.frames / 16_000
            assert 0.5 < utterance.seconds < 15
            assert 0.05 < np.abs(read_audio(utterance)).max() < 0.95


def test_bytes_do_not_depend_on_order_or_number_of_speakers(made: SyntheticSettings, tmp_path: Path) -> None:
    first = _bytes(made)
    settings = made.model_copy(update={"cache": tmp_path, "speakers": 2})
    fewer = _bytes(settings)
    assert fewer == {key: first[key] for key in fewer}
    assert _bytes(settings.model_copy(update={"speakers": 4})) == first


def test_a_cache_is_used_again_without_a_voice(made: SyntheticSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("spoke again")

    monkeypatch.setattr(voices, "speak_all", refuse)
    assert len(synthetic_corpus(made, quiet=True).speakers) == 4


def _cut(folder: Path) -> None:
    path = folder / "0000.flac"
    path.write_bytes(path.read_bytes()[:-10])


def _lose(folder: Path) -> None:
    (folder / "0001.flac").unlink()


def _spoil(folder: Path) -> None:
    (folder / "speaker.json").write_text("{")


@pytest.mark.parametrize("damage", [_cut, _lose, _spoil])
def test_a_damaged_speaker_is_made_again(
    made: SyntheticSettings, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    settings = made.model_copy(update={"cache": tmp_path, "speakers": 2})
    whole = _bytes(settings)
    folder, other = (_speaker_folder(settings, number) for number in (0, 1))
    untouched = (other / "0000.flac").stat().st_mtime_ns
    damage(folder)
    assert _bytes(settings) == whole
    assert (other / "0000.flac").stat().st_mtime_ns == untouched


def test_a_stopped_making_goes_on_where_it_was(
    made: SyntheticSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = made.model_copy(update={"cache": tmp_path})
    original = voices.speak_all

    def stopping(jobs: Iterable[Recording], advance: Callable[[str], None]) -> None:
        def stop(note: str) -> None:
            raise KeyboardInterrupt

        original(jobs, stop)

    with monkeypatch.context() as patch:
        patch.setattr(voices, "speak_all", stopping)
        with pytest.raises(KeyboardInterrupt):
            synthetic_corpus(settings, quiet=True)
    (folder,) = tmp_path.iterdir()
    (done,) = [path for path in folder.iterdir() if not path.name.startswith(".")]
    before = (done / "0000.flac").stat().st_mtime_ns
    left = folder / ".en-federated-00003.4194304"  # no process has this number
    left.mkdir()
    assert _bytes(settings) == _bytes(made)
    assert (done / "0000.flac").stat().st_mtime_ns == before
    assert not left.exists()


@pytest.mark.parametrize("language", ["fr", "de"])
def test_french_and_german_are_spoken(language: Language, tmp_path: Path) -> None:
    settings = SyntheticSettings(language=language, speakers=1, utterances=2, population="test", cache=tmp_path)
    corpus = synthetic_corpus(settings, quiet=True)
    assert corpus.language == language
    assert all(np.std(read_audio(utterance)) > 1e-3 for utterance in corpus.utterances())


@pytest.mark.parametrize(("field", "name"), [("variant", "nobody"), ("accent", "xx-unknown")])
def test_a_voice_that_does_not_exist_is_an_error_and_not_the_plain_voice(field: str, name: str, tmp_path: Path) -> None:
    wrong = Voice(**{**PLAIN.__dict__, field: name})
    job = Recording("someone", str(tmp_path / "someone"), wrong, ("one",), 0, "test", 0)
    with pytest.raises(UserError, match=f"(?s)someone could not be made.*no (voice )?{field} '{name}'"):
        voices.speak_all([job], lambda _: None)
    assert not (tmp_path / "someone").exists()


def test_a_voice_that_crashes_the_library_on_a_word_is_replaced_or_named(tmp_path: Path) -> None:
    """espeak-ng ends with a fault when a low and lively en-us+rob says april."""
    rob = Voice(**{**PLAIN.__dict__, "accent": "en-us", "variant": "rob", "pitch": 16, "pitch_range": 86, "rate": 158})
    job = Recording("somebody", str(tmp_path / "somebody"), rob, ("april", "may"), 0, "test", 0)
    told: list[str] = []
    with pytest.raises(UserError, match=r"somebody .* crashed .*leave out"):
        speak_all([job], told.append)
    assert told == []

    turns: list[int] = []

    def other(of: Recording, turn: int) -> Recording:
        turns.append(turn)
        return replace(of, voice=rob if turn == 1 else replace(rob, variant="m3"))

    speak_all([job, replace(job, speaker="next", folder=str(tmp_path / "next"), texts=("may",))], told.append, other)
    assert (told, turns) == (["somebody", "next"], [1, 2])
    assert json.loads((tmp_path / "somebody" / RECORD).read_text())["voice"]["variant"] == "m3"
    assert json.loads((tmp_path / "next" / RECORD).read_text())["voice"]["variant"] == "rob"


def test_variants_sound_different_and_repeat_themselves(tmp_path: Path) -> None:
    jobs = []
    for number, variant in enumerate(["m1", "klatt2", "f3", "m1"]):
        changed = Voice(**{**PLAIN.__dict__, "variant": variant})
        jobs.append(Recording(f"{number}", str(tmp_path / f"{number}"), changed, ("one",), 0, "test", 0))
    voices.speak_all(jobs, lambda _: None)
    heard = [(tmp_path / f"{number}" / "0000.flac").read_bytes() for number in range(4)]
    assert heard[0] == heard[3]
    assert len(set(heard)) == 3
    assert json.loads((tmp_path / "1" / "speaker.json").read_text())["voice"]["variant"] == "klatt2"


# Rooms


@pytest.mark.parametrize(("snr", "tilt"), [(0.0, 0.0), (10.0, 1.0), (20.0, 0.5)])
def test_noise_is_as_loud_as_asked_for(snr: float, tilt: float) -> None:
    tone = np.sin(np.arange(32_000) * 0.2).astype(np.float32)
    alone = impulse_response(0.0, 0.0, 16_000, generator(0, "room"))
    noisy = add_room_and_noise(tone, alone, snr, tilt, 0.9, 16_000, generator(0, "noise")).astype(np.float64)
    share = noisy @ tone / (tone @ tone)
    noise = noisy - share * tone
    measured = 10 * np.log10(np.square(share * tone).sum() / np.square(noise).sum())
    # Noise that falls has its energy in fewer bins, so its level in a part of it varies more.
    assert measured == pytest.approx(snr, abs=0.2 if tilt == 0 else 0.6)
    assert np.abs(noisy).max() == pytest.approx(0.9 * 32767, abs=1)


def test_a_room_decays_by_60_decibels_within_its_time() -> None:
    response = impulse_response(0.4, 0.5, 16_000, generator(0, "room")).astype(np.float64)
    assert response[0] == 1.0
    assert np.square(response[1:]).sum() == pytest.approx(0.5, rel=1e-3)
    early, late = (np.square(response[a : a + 640]).mean() for a in (100, 100 + 3200))
    # 3,200 samples are half of 0.4 s: 30 decibels, give or take the randomness of 640 samples.
    assert 10 * np.log10(early / late) == pytest.approx(30, abs=1.5)


def test_a_silent_voice_stays_finite() -> None:
    silence = np.zeros(1600, dtype=np.float32)
    assert np.isfinite(
        add_room_and_noise(silence, np.ones(1, np.float32), 20.0, 0.5, 0.5, 16_000, generator(0, "n"))
    ).all()


# Mistakes


@pytest.mark.parametrize(
    "wrong", [{"speakers": 0}, {"population": "everyone"}, {"language": "xx"}, {"digits": [4, 2]}, {"voices": 3}]
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SyntheticSettings.model_validate(wrong)


def test_a_cache_that_is_a_file_is_a_users_mistake(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    with pytest.raises(UserError, match="cannot make the cache folder"):
        synthetic_corpus(SyntheticSettings(speakers=1, cache=taken), quiet=True)


def test_a_missing_wheel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voices, "_WHEEL", "no-such-wheel")
    with pytest.raises(UserError, match="pip install no-such-wheel"):
        synthetic_corpus(SyntheticSettings(speakers=1, cache=tmp_path), quiet=True)


def test_progress_is_said_unless_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = SyntheticSettings(speakers=1, utterances=1, cache=tmp_path)
    synthetic_corpus(settings)
    assert "voices (federated) 1/1" in capsys.readouterr().err
    synthetic_corpus(settings.model_copy(update={"seed": 1}), quiet=True)
    assert capsys.readouterr().err == ""
