"""Simulated people: always the same, each like nobody else, and never stored."""

from __future__ import annotations

import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from confide.errors import UserError
from confide.privacy.plan import make_plan
from confide.recipe import load
from confide.speech.corpora.listing import decode_all
from confide.speech.corpora.population import PopulationSettings, Spoken
from confide.speech.corpus import SAMPLE_RATE, Corpus, read_audio
from confide.speech.features import FeatureSettings, frame_count, log_mel
from confide.speech.grammar import DIGITS
from confide.speech.personas import Crowd
from confide.speech.pool import PoolSettings, base_voice, open_pool, voice_pairs
from confide.speech.settings import SpeechSettings
from confide.speech.store import LogMel, open_store
from confide.speech.tokens import Tokens

WORDS = ["yes", "no", "seven"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pools")


@pytest.fixture(scope="module")
def ask(cache: Path) -> Callable[..., Corpus]:
    def read(**settings: Any) -> Corpus:
        return PopulationSettings(**{"words": WORDS, "voices": 12, "people": 8, "cache": cache, **settings}).read()

    return read


@pytest.fixture(scope="module")
def crowd(cache: Path) -> Crowd:
    pool = open_pool(PoolSettings("en", "train", 12, tuple(WORDS)), cache, True)
    return Crowd(pool, 0, "population/en/train", (1, 3))


# The same, whoever asks


def test_a_person_sounds_the_same_in_every_order_and_in_every_crowd(ask: Callable[..., Corpus]) -> None:
    few, many = ask(people=3), ask(people=40, utterances=4)
    forwards = {u.id: read_audio(u) for u in few.utterances()}
    for utterance in reversed(many.utterances()):
        if utterance.id in forwards:
            assert np.array_equal(read_audio(utterance), forwards.pop(utterance.id))
    assert not forwards
    assert [u.text for u in few.utterances()] == [u.text for own in list(many.speakers.values())[:3] for u in own[:2]]


def test_another_process_hears_the_same(ask: Callable[..., Corpus], cache: Path) -> None:
    program = (
        "import sys, zlib\n"
        "from pathlib import Path\n"
        "from confide.speech.corpora.population import PopulationSettings\n"
        "from confide.speech.corpus import read_audio\n"
        f"asked = PopulationSettings(words={WORDS}, voices=12, people=8, cache=Path(sys.argv[1]))\n"
        "print([zlib.crc32(read_audio(u).tobytes()) for u in asked.read().utterances()[::5]])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(cache)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([zlib.crc32(read_audio(u).tobytes()) for u in ask().utterances()[::5]])


def test_many_sayings_are_those_asked_for_one_by_one(crowd: Crowd) -> None:
    assert crowd.sayings(6, 3) == [[crowd.saying(person, number) for number in range(3)] for person in range(6)]


def test_another_seed_gives_other_people_over_the_same_base_voices(ask: Callable[..., Corpus], cache: Path) -> None:
    ask()
    before = sorted(cache.iterdir())
    first, second = ask(seed=1).utterances(), ask(seed=2).utterances()
    assert sorted(cache.iterdir()) == before
    assert [u.seconds for u in first] != [u.seconds for u in second]
    assert {u.made.address for u in first if u.made}.isdisjoint(u.made.address for u in second if u.made)


# Who is who


def test_no_base_voice_is_in_two_parts() -> None:
    for language in ("en", "fr", "de"):
        parts = [set(voice_pairs(language, part)) for part in ("seed", "train", "validation", "test")]
        assert all(parts)
        assert len(set.union(*parts)) == sum(map(len, parts))


def test_base_voices_take_turns_and_differ_in_pitch_and_rate() -> None:
    settings = PoolSettings("de", "seed", 50, tuple(WORDS))
    voices = [base_voice(settings, number) for number in range(50)]
    used = [(voice.accent, voice.variant) for voice in voices]
    assert all(used.count(pair) == 10 for pair in voice_pairs("de", "seed"))
    assert len({(voice.pitch, voice.rate) for voice in voices}) > 45


def test_test_people_borrow_voices_of_their_own_unless_asked_otherwise(ask: Callable[..., Corpus]) -> None:
    train, own, borrowed = (ask(part=part, new_voices=new) for part, new in
                            (("train", True), ("test", True), ("test", False)))  # fmt: skip
    pools = [corpus.utterances()[0].made for corpus in (train, own, borrowed)]
    assert all(isinstance(made, Spoken) for made in pools)
    same = [np.array_equal(made.crowd.pool.lengths, pools[0].crowd.pool.lengths) for made in pools]  # type: ignore[union-attr]
    assert same == [True, False, True]
    assert borrowed.utterances()[0].seconds != train.utterances()[0].seconds, "they are other people still"


def test_personas_lie_in_the_ranges_of_people_and_fill_them(crowd: Crowd) -> None:
    people = [crowd.persona(number) for number in range(2_000)]
    bounds = {
        "tract": (0.87, 1.15), "low": (40, 300), "high": (3_400, 8_000), "pause": (0.03, 0.35), "slope": (-3, 3),
        "reverberation": (0.05, 0.5), "echo": (0, 0.7), "snr": (8, 35), "tilt": (0, 1), "level": (0.1, 0.85),
    }  # fmt: skip
    for name, (low, high) in bounds.items():
        values = np.array([getattr(person, name) for person in people])
        assert low <= values.min() < low + 0.02 * (high - low), name
        assert high - 0.02 * (high - low) < values.max() <= high, name
    counts = np.bincount([person.voice for person in people], minlength=12)
    assert np.square(counts - 2_000 / 12).sum() / (2_000 / 12) < 31.3, "chi-square with 11 degrees, one in a thousand"
    tract, level = (np.array([getattr(person, name) for person in people]) for name in ("tract", "level"))
    assert abs(np.corrcoef(tract, level)[0, 1]) < 0.08


def test_a_person_is_more_like_themself_than_like_others(ask: Callable[..., Corpus]) -> None:
    corpus = ask(people=40, utterances=6, count=(3, 3))
    settings = FeatureSettings()
    # (people, utterances, mels): the mean spectrum of each utterance
    means = np.array([[log_mel(read_audio(u), settings).mean(axis=0) for u in own] for own in corpus.speakers.values()])
    within = means.var(axis=1, ddof=1).mean()
    between = means.mean(axis=1).var(axis=0, ddof=1).mean()
    assert between > 3 * within
    shuffled = np.random.default_rng(0).permutation(means.reshape(-1, means.shape[-1])).reshape(means.shape)
    assert shuffled.mean(axis=1).var(axis=0, ddof=1).mean() < shuffled.var(axis=1, ddof=1).mean()


# What is heard


def test_no_recording_is_clipped_silent_or_of_another_length_than_promised(ask: Callable[..., Corpus]) -> None:
    for utterance in ask(people=60).utterances():
        sound = read_audio(utterance)
        assert sound.dtype == np.float32
        assert utterance.made is not None
        assert len(sound) == utterance.made.length == round(utterance.seconds * SAMPLE_RATE)
        assert 0.05 < np.abs(sound).max() < 0.96
        assert np.array_equal(sound * 32768, np.round(sound * 32768)), "as a recorder with 16 bits has it"


def test_a_shorter_tract_raises_all_frequencies(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = replace(crowd.persona(3), low=40.0, high=8_000.0, slope=0.0, snr=60.0, echo=0.0)
    original = Crowd._persona
    centre = {}
    for tract in (0.9, 1.1):
        monkeypatch.setattr(
            Crowd, "_persona", lambda self, draw, t=tract: (original(self, draw), replace(plain, tract=t))[1]
        )
        spectrum = np.abs(np.fft.rfft(crowd.speak(3, 0), 65_536)) ** 2
        hertz = np.fft.rfftfreq(65_536, 1 / SAMPLE_RATE)
        centre[tract] = (spectrum * hertz).sum() / spectrum.sum()
    assert centre[1.1] / centre[0.9] == pytest.approx(1.1 / 0.9, rel=0.08)


def test_nothing_of_those_who_telephone_is_left_above_four_kilohertz(ask: Callable[..., Corpus]) -> None:
    plain = ask(people=200, utterances=1).utterances()
    some = ask(people=200, utterances=1, telephones=0.25).utterances()
    changed = 0
    for wide, narrow in zip(plain, some, strict=True):
        assert wide.made is not None
        assert narrow.made is not None
        assert wide.made.address != narrow.made.address, "or features of the one would be taken for the other's"
        assert (wide.text, wide.seconds) == (narrow.text, narrow.seconds)
        before, after = read_audio(wide), read_audio(narrow)
        if np.array_equal(before, after):
            continue
        changed += 1
        above, below = (_energy_above(sound, 4_050) for sound in (before, after))
        assert below < 1e-4 * max(above, _energy_above(after, 0)), "no more than the ends of the recording leave"
    assert 30 <= changed <= 70


def _energy_above(sound: np.ndarray, hertz: float) -> float:
    window = np.hanning(len(sound))
    spectrum = np.square(np.abs(np.fft.rfft(sound * window)))
    return float(spectrum[np.fft.rfftfreq(len(sound), 1 / SAMPLE_RATE) > hertz].sum())


def test_texts_are_the_words_that_were_asked_for(ask: Callable[..., Corpus]) -> None:
    texts = [u.text.split() for u in ask(people=200, count=(2, 4)).utterances()]
    assert {len(text) for text in texts} == {2, 3, 4}
    assert {word for text in texts for word in text} == set(WORDS)
    assert PopulationSettings()._spelt() == DIGITS["en"]
    assert PopulationSettings(words=["Yes!", "yes", "turn it on"])._spelt() == ("yes", "turn it on")
    with pytest.raises(UserError, match=r"words=42: no letter"):
        PopulationSettings(words=["yes", "42"]).read()
    with pytest.raises(ValidationError, match="the smaller one first"):
        PopulationSettings(count=(3, 2))


# What is kept


def test_features_are_computed_and_nothing_is_written(ask: Callable[..., Corpus], tmp_path: Path) -> None:
    corpus, settings = ask(people=20), FeatureSettings()
    store = open_store(corpus, Tokens("en"), LogMel(settings), tmp_path / "features", quiet=True)
    assert not (tmp_path / "features").exists()
    assert store.speakers == list(corpus.speakers)
    for user in range(20):
        utterances = store.utterances(user)
        found = store.features(user, range(len(utterances)))
        for each, utterance, frames in zip(found, utterances, store.frames(user), strict=True):
            plain = log_mel(read_audio(utterance), settings)
            assert len(each) == frames == frame_count(round(utterance.seconds * SAMPLE_RATE), settings)
            np.testing.assert_array_equal(each, plain.astype(np.float16).astype(np.float32))
        spoken = [Tokens("en").decode(target.tolist()) for target in store.targets(user, range(len(utterances)))]
        assert spoken == [u.text for u in utterances]


def test_the_memory_of_features_is_bounded(ask: Callable[..., Corpus], monkeypatch: pytest.MonkeyPatch) -> None:
    from confide.speech import store

    monkeypatch.setattr(store, "_REMEMBERED", 5)
    opened = open_store(ask(people=8), Tokens("en"), LogMel(FeatureSettings()), quiet=True)
    twice = [[opened.features(user, [0])[0] for user in range(8)] for _ in range(2)]
    assert all(np.array_equal(a, b) for a, b in zip(*twice, strict=True))
    assert len(opened._remembered) == 5


def test_labels_that_do_not_fit_are_counted(ask: Callable[..., Corpus]) -> None:
    opened = open_store(ask(people=30), Tokens("en"), LogMel(FeatureSettings(), stride=12), quiet=True)
    assert {item.kind for item in opened.skipped} == {"label too long"}
    assert len(opened.skipped) + int(opened.examples.sum()) == 60


@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_pool_is_made_again(tmp_path: Path, damage: str) -> None:
    asked = PoolSettings("en", "test", 2, ("yes",))
    before = np.array(open_pool(asked, tmp_path, True).samples)
    path = next(tmp_path.glob("*.npy"))
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    open_pool.cache_clear()
    if damage == "gone":
        path.with_suffix(".json").unlink()
    else:
        path.unlink()
        path.write_bytes(content if damage == "changed" else content[:-200])
    assert np.array_equal(open_pool(asked, tmp_path, True).samples, before)
    assert sorted(item.suffix for item in tmp_path.iterdir()) == [".json", ".npy"]


def test_a_pool_does_not_grow_with_the_people(ask: Callable[..., Corpus], cache: Path) -> None:
    ask(people=10)
    before = {item: item.stat().st_size for item in cache.iterdir()}
    corpus = ask(people=3_000)
    decode_all(Corpus(corpus.name, "en", dict(list(corpus.speakers.items())[-20:]), []))
    assert {item: item.stat().st_size for item in cache.iterdir()} == before


def test_the_control_without_speakers_keeps_the_sound(ask: Callable[..., Corpus]) -> None:
    plain, mixed = ask(people=30), ask(people=30, users="iid")
    assert {u.id: u.made for u in plain.utterances()} == {u.id: u.made for u in mixed.utterances()}
    assert any(u.speaker != u.id[: len(u.speaker)] for u in mixed.utterances())


def test_statistics_of_a_population_are_listed(command: Callable[..., tuple[int, str, str]], cache: Path) -> None:
    words = ("--set", f"words={WORDS}", "--set", "voices=12", "--set", f"cache={cache}")
    code, out, _ = command("corpus", "stats", "population", "--set", "people=500", *words)
    assert code == 0
    assert "population-train: 500 speakers" in out
    assert "1,000 utterances used, 0 skipped" in out


# The recipes


def test_the_recipe_is_private_as_it_is_trained_and_tested_on_other_people() -> None:
    recipe, seed = load("speech/population/private"), load("speech/population/seed")
    everybody = np.full(20_000, 1 / 20_000)
    plan = make_plan(recipe.privacy, recipe.sampling, everybody, bound=1.0, steps=recipe.run.steps, seed=0)
    assert plan.epsilon(recipe.run.steps) <= 8
    assert recipe.privacy.delta is not None
    assert recipe.privacy.delta < 1 / 20_000
    assert isinstance(recipe.task, SpeechSettings)
    assert isinstance(seed.task, SpeechSettings)
    assert isinstance(recipe.task.corpus, PopulationSettings)
    assert isinstance(recipe.task.test, PopulationSettings)
    assert (recipe.task.corpus.people, recipe.sampling.cohort, recipe.run.steps) == (20_000, 500, 60)
    parts = [s.part for s in (recipe.task.corpus, recipe.task.test, seed.task.corpus, seed.task.test)
             if isinstance(s, PopulationSettings)]  # fmt: skip
    assert parts == ["train", "test", "seed", "validation"], "settings are chosen on people who are not tested on"


def test_the_recipe_trains_on_a_handful(
    command: Callable[..., tuple[int, str, str]], cache: Path, tmp_path: Path
) -> None:
    few = [
        f"task.{part}.{key}" for part in ("corpus", "test") for key in (f"words={WORDS}", "voices=12", f"cache={cache}")
    ]
    few += ["task.start=null", "task.corpus.people=40", "task.test.people=6", "sampling.cohort=8", "run.steps=2"]
    few += ["final.count=2", "evaluation.every=2"]
    code, out, err = command(
        "train", "speech/population/private", "--out", tmp_path / "run", *(w for s in few for w in ("--set", s))
    )
    assert code == 0, err
    assert "epsilon" in out
