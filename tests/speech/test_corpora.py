"""Reading corpora: published layouts, shares of speakers, and what is skipped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from confide.errors import UserError
from confide.speech.corpora import read_corpus, shares
from confide.speech.corpora.common_voice import CommonVoiceSettings
from confide.speech.corpora.digits import AudioMnistSettings, FsddSettings
from confide.speech.corpora.librispeech import LibriSpeechSettings
from confide.speech.corpora.listing import decode_all
from confide.speech.corpora.own import FolderSettings, PythonCorpusSettings
from confide.speech.corpora.tables import An4Settings, TsvSettings
from confide.speech.corpus import SAMPLE_RATE, Corpus, Undecodable, count_by_reason, read_audio
from confide.speech.grammar import DIGITS

DATA = Path(os.environ.get("CONFIDE_DATA") or Path(__file__).parents[2] / ".." / "shared" / "data")


def real(name: str) -> Path:
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; name the folder that holds {name} in CONFIDE_DATA")
    return folder


def write(path: Path, seconds: float = 0.2, rate: int = SAMPLE_RATE, channels: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(len(path.name)).uniform(-0.1, 0.1, (round(seconds * rate), channels))
    soundfile.write(path, noise, rate)
    return path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def reasons(corpus: Corpus) -> dict[str, str]:
    return {item.id: item.kind for item in corpus.skipped}


# Shares of speakers, and the control without speakers.

names = st.sets(st.text(min_size=1, max_size=8), min_size=20, max_size=80)


@settings(max_examples=40)
@given(names, st.sampled_from([5, 10, 25, 40, 49]))
def test_a_share_and_its_complement_are_disjoint_and_complete(speakers: set[str], percent: int) -> None:
    small, large = shares.choose_share(speakers, percent), shares.choose_share(speakers, 100 - percent)
    assert len(small) == len(speakers) * percent // 100
    assert not small & large
    assert small | large == speakers


def test_half_is_no_share_because_it_would_be_its_own_complement() -> None:
    with pytest.raises(ValidationError, match="use 49 and 51"):
        An4Settings(share=50)


@settings(max_examples=40)
@given(names, st.randoms(use_true_random=False))
def test_a_share_does_not_depend_on_the_order_of_the_listing(speakers: set[str], random: Any) -> None:
    order = sorted(speakers)
    random.shuffle(order)
    assert shares.choose_share(order, 10) == shares.choose_share(sorted(speakers), 10)


@settings(max_examples=40)
@given(names)
def test_smaller_shares_lie_inside_larger_ones(speakers: set[str]) -> None:
    assert shares.choose_share(speakers, 5) <= shares.choose_share(speakers, 10)


@pytest.mark.parametrize(
    ("speakers", "percent", "published"),
    [
        (34_753, 10, 3_475), (34_753, 90, 31_278), (34_753, 5, 1_737), (34_753, 95, 33_016),
        (6_856, 10, 685), (6_856, 90, 6_171), (7_127, 10, 712), (7_127, 90, 6_415),
    ],
)  # fmt: skip
def test_shares_have_as_many_speakers_as_table_2(speakers: int, percent: int, published: int) -> None:
    assert len(shares.choose_share(map(str, range(speakers)), percent)) == published


def test_a_share_that_holds_nobody_is_an_error() -> None:
    with pytest.raises(UserError, match=r"5 % of 12 speakers is not one speaker"):
        shares.choose_share(map(str, range(12)), 5)


def test_shares_and_draws_are_the_same_under_every_hash_seed() -> None:
    program = (
        "from confide.speech.corpora import shares\n"
        "people = {f'client{n}' for n in range(200)}\n"
        "bits = [shares.hash_to_integer(0, 'iid', p) for p in sorted(people)]\n"
        "print(sorted(shares.choose_share(people, 10)), bits[:3])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "4242")
    }
    assert len(outputs) == 1
    # Written down once: another machine or a later version must find the same people.
    assert outputs.pop().startswith("['client103', 'client106', 'client113', 'client119', 'client143', ")


@pytest.fixture
def people(tmp_path: Path) -> Path:
    """Twelve speakers with four utterances each."""
    for speaker in range(12):
        for number in range(4):
            audio = write(tmp_path / "people" / f"s{speaker:02d}" / f"u{number}.wav")
            audio.with_suffix(".txt").write_text(f"sentence {number}\n")
    return tmp_path / "people"


def test_the_iid_control_keeps_all_utterances_and_mixes_the_speakers(people: Path) -> None:
    plain = read_corpus(FolderSettings(folder=people))
    mixed = read_corpus(FolderSettings(folder=people, users="iid"))
    assert mixed.name == "people-IID"
    assert {u.id for u in mixed.utterances()} == {u.id for u in plain.utterances()}
    assert set(mixed.speakers) <= set(plain.speakers)
    assert all(u.speaker == user for user, own in mixed.speakers.items() for u in own)
    moved = sum(u.id.split("/")[0] != u.speaker for u in mixed.utterances())
    assert moved > 30
    assert mixed == read_corpus(FolderSettings(folder=people, users="iid"))
    assert mixed.speakers != read_corpus(FolderSettings(folder=people, users="iid", seed=1)).speakers


def test_the_iid_control_draws_users_uniformly(people: Path) -> None:
    corpus = read_corpus(FolderSettings(folder=people))
    received: Counter[str] = Counter()
    for seed in range(100):
        received.update({user: len(own) for user, own in shares.assign_at_random(corpus, seed).speakers.items()})
    # 4,800 draws over 12 users: 400 each with a deviation of 19.
    statistic = sum((received[name] - 400) ** 2 / 400 for name in corpus.speakers)
    assert statistic < 31.3  # chi-square with 11 degrees of freedom, 0.1 %


def test_a_damaged_file_moves_no_other_speaker_between_shares(people: Path) -> None:
    before = read_corpus(FolderSettings(folder=people, share=25))
    gone = next(iter(before.speakers))
    for file in (people / gone).glob("*.wav"):
        file.write_text("no audio")
    after = read_corpus(FolderSettings(folder=people, share=25))
    assert set(after.speakers) == set(before.speakers) - {gone}
    assert before.name == "people-25"


# Your own recordings.


def test_a_folder_names_everything_that_it_skips(tmp_path: Path) -> None:
    root = tmp_path / "own"
    good = [
        write(root / "ann" / "flac.flac"),
        write(root / "ann" / "stereo.wav", rate=44_100, channels=2),
        write(root / "bob" / "deep" / "phone.mp3", rate=8_000),
        write(root / "bob" / "exactly30.wav", seconds=30.0, rate=8_000),
    ]
    bad = {
        "ann/long": write(root / "ann" / "long.wav", seconds=30.1, rate=8_000),
        "ann/cut": write(root / "ann" / "cut.wav"),
        "ann/zero": root / "ann" / "zero.wav",
        "ann/notaudio": root / "ann" / "notaudio.mp3",
        "ann/silent": write(root / "ann" / "silent.wav"),
    }
    cut(bad["ann/cut"])
    bad["ann/zero"].touch()
    bad["ann/notaudio"].write_text("hello" * 1_000)
    for path in (*good, *bad.values()):
        path.with_suffix(".txt").write_text("some words\n  here\n")
    (root / "ann" / "silent.txt").write_text(" \n")
    write(root / "ann" / "untold.wav")
    write(root / "loose.wav")
    write(root / "ann" / "latin.wav").with_suffix(".txt").write_bytes(b"caf\xe9")
    (root / "ann" / "orphan.txt").write_text("no audio")
    (root / "ann" / "tape.wma").write_bytes(b"x")
    (root / "README.txt").write_text("about")
    (root / ".hidden").mkdir()
    write(root / ".hidden" / "ghost.wav")
    write(root / "ann" / "flac.ogg")

    corpus = read_corpus(FolderSettings(folder=root))

    assert list(corpus.speakers) == ["ann", "bob"]
    assert [u.id for u in corpus.utterances()] == ["ann/flac", "ann/stereo", "bob/deep/phone", "bob/exactly30"]
    assert corpus.speakers["ann"][0].text == "some words here"
    assert corpus.speakers["bob"][1].seconds == 30.0
    assert reasons(corpus) == {
        "ann/long": "longer than 30 s",
        "ann/cut": "truncated",
        "ann/zero": "no samples",
        "ann/notaudio": "undecodable",
        "ann/silent": "empty text",
        "ann/untold.wav": "no text",
        "loose.wav": "no speaker",
        "ann/latin.wav": "unreadable text",
        "ann/orphan.txt": "text without audio",
        "ann/tape.wma": "not wav, flac, mp3, ogg, opus, m4a",
        "ann/flac": "listed twice",
    }


def test_what_breaks_off_in_the_middle_is_skipped_after_a_thorough_look(people: Path) -> None:
    broken = people / "s03" / "broken.flac"
    write(broken, seconds=3.0).with_suffix(".txt").write_text("half of it")
    cut(broken)
    listed = read_corpus(FolderSettings(folder=people))
    assert "s03/broken" in {u.id for u in listed.utterances()}
    with pytest.raises(Undecodable, match="truncated"):
        read_audio(next(u for u in listed.utterances() if u.id == "s03/broken"))
    steps: list[tuple[int, int]] = []
    looked = decode_all(listed, lambda done, total: steps.append((done, total)))
    assert reasons(looked) == {"s03/broken": "truncated"}
    assert len(looked.utterances()) == 48
    assert steps[-1] == (49, 49)


def test_a_corpus_without_a_usable_speaker_is_an_error_that_says_why(tmp_path: Path) -> None:
    root = tmp_path / "bad"
    write(root / "a" / "x.flac", seconds=3.0).with_suffix(".txt").write_text("")
    write(root / "a" / "y.wav")
    with pytest.raises(UserError, match=r"bad has no usable speaker.*1 no text; 1 empty text; first: a/y.wav"):
        read_corpus(FolderSettings(folder=root))
    (root / "a" / "x.txt").write_text("words")
    cut(root / "a" / "x.flac")
    with pytest.raises(UserError, match=r"no usable speaker.*truncated"):
        decode_all(read_corpus(FolderSettings(folder=root)))
    (tmp_path / "nothing").mkdir()
    for empty in (FolderSettings(folder=tmp_path / "nothing"), FolderSettings(folder=tmp_path / "nothing", share=5)):
        with pytest.raises(UserError, match="no usable speaker, it is empty"):
            read_corpus(empty)
    with pytest.raises(UserError, match="is no folder"):
        read_corpus(FolderSettings(folder=tmp_path / "absent"))


def test_a_table_gives_the_same_corpus_as_the_folder_it_lists(people: Path, tmp_path: Path) -> None:
    rows = [
        f"s{speaker:02d}\ts{speaker:02d}/u{number}.wav\tsentence {number}\ts{speaker:02d}/u{number}"
        for speaker in range(12)
        for number in range(4)
    ]
    table = tmp_path / "table.tsv"
    # A byte order mark, Windows line ends and an empty line at the end are how spreadsheets write.
    table.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(["speaker\tpath\ttext\tutterance", *rows, "", ""]).encode())
    corpus = read_corpus(TsvSettings(file=table, folder=people))
    assert corpus.speakers == read_corpus(FolderSettings(folder=people)).speakers


def test_a_table_names_the_rows_it_skips(people: Path) -> None:
    table = people / "rows.tsv"
    good = "ann\ts00/u0.wav\t\"quoted, with 'marks'\""
    bad = ["ann\ts00/absent.wav\thello", "ann\ts00/u1.wav", "\ts00/u2.wav\thello", "ann\t\thello", "ann\ts00/u3.wav\t "]
    table.write_text("\n".join(["speaker\tpath\ttext", good, *bad, good]))
    corpus = read_corpus(TsvSettings(file=table))
    assert [(u.id, u.text) for u in corpus.utterances()] == [("s00/u0.wav", "\"quoted, with 'marks'\"")]
    assert reasons(corpus) == {
        "s00/absent.wav": "missing",
        "rows.tsv:4": "short row",
        "rows.tsv:5": "no speaker",
        "rows.tsv:6": "no path",
        "s00/u3.wav": "empty text",
        "s00/u0.wav": "listed twice",
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"speaker\tfile\ttext\n", "expected also path"),
        (b"", "has the columns none; expected also speaker, path, text"),
        (b"speaker\tpath\ttext\nann\ta.wav\tcaf\xe9\n", "not UTF-8"),
        (None, "cannot read the table"),
    ],
)
def test_a_wrong_table_is_an_error_that_says_what_was_expected(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    table = tmp_path / "wrong.tsv"
    if content is not None:
        table.write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_corpus(TsvSettings(file=table))


# LibriSpeech.


@pytest.fixture
def libri(tmp_path: Path) -> Path:
    """Three subsets of two speakers each, in the published layout."""
    root = tmp_path / "LibriSpeech"
    for part, first in (("train-clean-100", 10), ("train-clean-360", 20), ("train-other-500", 30), ("dev-clean", 40)):
        for speaker in (first, first + 1):
            chapter = root / part / str(speaker) / "7"
            lines = []
            for number in range(3):
                name = f"{speaker}-7-{number:04d}"
                write(chapter / f"{name}.flac", seconds=0.2 + 0.1 * number)
                lines.append(f"{name} WORDS OF {number} IT'S")
            (chapter / f"{speaker}-7.trans.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.parametrize(
    ("subset", "speakers", "name"),
    [
        ("LS-100", [10, 11], "LS-100"),
        ("train-clean-360", [20, 21], "LS-360"),
        ("LS-860", [20, 21, 30, 31], "LS-860"),
        ("LS-960", [10, 11, 20, 21, 30, 31], "LS-960"),
        ("dev-clean", [40, 41], "LS-dev-clean"),
    ],
)
def test_librispeech_subsets_and_unions(libri: Path, subset: str, speakers: list[int], name: str) -> None:
    for folder in (libri, libri.parent):
        corpus = read_corpus(LibriSpeechSettings(folder=folder, subset=subset))
        assert list(corpus.speakers) == [str(s) for s in speakers]
        assert corpus.name == name
        assert len(corpus.utterances()) == 3 * len(speakers)
        assert not corpus.skipped


def test_an_absent_subset_is_an_error_that_lists_those_there_are(libri: Path) -> None:
    with pytest.raises(UserError, match=r"no subset folder 'test-clean'.*dev-clean, train-clean-100"):
        read_corpus(LibriSpeechSettings(folder=libri, subset="test-clean"))


def test_librispeech_skips_what_lhotse_stops_at(libri: Path) -> None:
    chapter = libri / "dev-clean" / "40" / "7"
    (chapter / "40-7-0000.flac").unlink()
    (chapter / "40-7-0001.flac").write_text("no audio")
    with (chapter / "40-7.trans.txt").open("a") as transcript:
        transcript.write("40-7-0009\n")
    write(chapter / "40-7-0009.flac")
    corpus = read_corpus(LibriSpeechSettings(folder=libri, subset="dev-clean"))
    assert reasons(corpus) == {"40-7-0000": "missing", "40-7-0001": "undecodable", "40-7-0009": "empty text"}
    assert len(corpus.utterances()) == 4


def listed_by_lhotse(manifests: Any) -> set[tuple[str, str, float, str]]:
    return {(s.id, s.speaker, round(s.duration, 6), s.text) for s in manifests["supervisions"]}


def listed(corpus: Corpus) -> set[tuple[str, str, float, str]]:
    return {(u.id, u.speaker, round(u.seconds, 6), u.text) for u in corpus.utterances()}


def test_librispeech_is_the_list_that_lhotse_makes(libri: Path) -> None:
    recipe = pytest.importorskip("lhotse.recipes.librispeech")
    theirs = recipe.prepare_librispeech(libri, dataset_parts="train-clean-100")["train-clean-100"]
    assert listed(read_corpus(LibriSpeechSettings(folder=libri, subset="LS-100"))) == listed_by_lhotse(theirs)


def test_real_librispeech_is_the_list_that_lhotse_makes() -> None:
    folder = real("LibriSpeech")
    recipe = pytest.importorskip("lhotse.recipes.librispeech")
    theirs = recipe.prepare_librispeech(folder, dataset_parts="train-clean-5")["train-clean-5"]
    corpus = read_corpus(LibriSpeechSettings(folder=folder, subset="train-clean-5"))
    assert len(corpus.speakers) == 8
    assert listed(corpus) == listed_by_lhotse(theirs)


# Common Voice.

CV_COLUMNS = "client_id\tpath\tsentence\tup_votes\tdown_votes\tage\tgender\taccents\tvariant\tlocale\tsegment"


def make_common_voice(root: Path, language: str, speakers: int) -> Path:
    folder = root / language
    lines = [CV_COLUMNS]
    for speaker in range(speakers):
        clip = f"common_voice_{language}_{speaker}.mp3"
        write(folder / "clips" / clip, rate=48_000)
        sentence = f'"Phrase {speaker}, naïve — unbalanced'
        lines.append("\t".join([f"id{speaker:04x}", clip, sentence, "2", "0", "", "", "", "", language, ""]))
    for part in ("train", "dev", "test"):
        (folder / f"{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    release = tmp_path_factory.mktemp("data") / "cv-corpus-13.0-2023-03-09"
    make_common_voice(release, "fr", 40)
    make_common_voice(release, "de", 3)
    return release


def test_common_voice_is_found_from_every_folder_around_it(voices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        read_corpus(CommonVoiceSettings(folder=folder, language="de"))
        for folder in (voices, voices.parent, voices / "de")
    ]
    monkeypatch.setenv("CONFIDE_DATA", str(voices.parent))
    found.append(read_corpus(CommonVoiceSettings(language="de")))
    for corpus in found:
        assert corpus == found[0]
    assert (found[0].name, found[0].language) == ("CV-de-train", "de")
    assert found[0].speakers["id0002"][0].text == '"Phrase 2, naïve — unbalanced'
    assert read_audio(found[0].speakers["id0002"][0]).shape == (3_200,)


def test_common_voice_does_not_take_one_language_for_another(voices: Path) -> None:
    with pytest.raises(UserError, match=r"no fr/train.tsv in it.*commonvoice.mozilla.org"):
        read_corpus(CommonVoiceSettings(folder=voices / "de", language="fr"))


def test_two_releases_side_by_side_are_an_error(tmp_path: Path) -> None:
    for release in ("cv-corpus-13.0-2023-03-09", "cv-corpus-17.0-2024-03-15"):
        make_common_voice(tmp_path / release, "de", 1)
    with pytest.raises(UserError, match="more than once"):
        read_corpus(CommonVoiceSettings(folder=tmp_path, language="de"))


def test_the_papers_names_mean_shares_of_the_speakers(voices: Path) -> None:
    everyone = set(read_corpus(CommonVoiceSettings(folder=voices, language="fr")).speakers)
    for small, large in (("10", "90"), ("05", "95")):
        first, rest = (
            read_corpus(CommonVoiceSettings.model_validate({"folder": voices, "subset": f"CV-fr-train-{share}"}))
            for share in (small, large)
        )
        assert first.name == f"CV-fr-train-{small}"
        assert len(first.speakers) == 40 * int(small) // 100
        assert set(first.speakers) | set(rest.speakers) == everyone
        assert not set(first.speakers) & set(rest.speakers)


def test_names_are_written_down_as_settings() -> None:
    named = CommonVoiceSettings.model_validate({"subset": "CV-fr-train-05"})
    assert named == CommonVoiceSettings(language="fr", subset="train", share=5)
    assert CommonVoiceSettings.model_validate({"subset": "train-5", "language": "fr"}) == named
    assert CommonVoiceSettings.model_validate_json(named.model_dump_json()) == named
    for wrong in (
        {"subset": "CV-fr-train-10", "share": 20},
        {"subset": "CV-fr-train", "language": "de"},
        {"subset": "CV-xx-train"},
        {"subset": "validated-10"},
        {"subset": "train-00"},
        {"share": 100},
    ):
        with pytest.raises(ValidationError):
            CommonVoiceSettings.model_validate(wrong)


def test_common_voice_is_the_list_that_lhotse_makes(voices: Path, tmp_path: Path) -> None:
    recipe = pytest.importorskip("lhotse.recipes.commonvoice")
    theirs = recipe.prepare_commonvoice(voices, tmp_path, languages="de", splits=["train"])["de"]["train"]
    assert listed(read_corpus(CommonVoiceSettings(folder=voices, language="de"))) == listed_by_lhotse(theirs)


# Digits.


def make_digits(folder: Path, name: Callable[[int, int], str], takes: int = 3) -> None:
    for digit in range(10):
        for take in range(takes):
            write(folder / name(digit, take), seconds=0.1, rate=8_000)


def test_passes_use_every_take_as_often_beside_others(tmp_path: Path) -> None:
    make_digits(tmp_path / "01", lambda digit, take: f"{digit}_01_{take}.flac")
    once = read_corpus(AudioMnistSettings(folder=tmp_path, subset="all"))
    twice = read_corpus(AudioMnistSettings(folder=tmp_path, subset="all", passes=2))
    first, both = ({u.id for u in corpus.speakers["01"]} for corpus in (once, twice))
    assert first < both
    uses = Counter(path.name for utterance in twice.speakers["01"] for path in utterance.audio)
    assert len(uses) == 30
    assert set(uses.values()) == {2}


def test_joined_digits_use_every_take_once_and_say_its_word(tmp_path: Path) -> None:
    for speaker in ("01", "48", "49"):
        make_digits(tmp_path / speaker, lambda digit, take, s=speaker: f"{digit}_{s}_{take}.flac")  # type: ignore[misc]
    corpus = read_corpus(AudioMnistSettings(folder=tmp_path))
    assert list(corpus.speakers) == ["01", "48"]
    assert list(read_corpus(AudioMnistSettings(folder=tmp_path, subset="test")).speakers) == ["49"]
    assert len(read_corpus(AudioMnistSettings(folder=tmp_path, subset="all")).speakers) == 3
    used = Counter(path.name for u in corpus.utterances() for path in u.audio)
    assert len(used) == 60
    assert set(used.values()) == {1}
    for utterance in corpus.utterances():
        assert 2 <= len(utterance.audio) <= 4
        assert utterance.seconds == pytest.approx(0.1 * len(utterance.audio))
        digits = [int(path.name[0]) for path in utterance.audio]
        assert utterance.text == " ".join(DIGITS["en"][digit] for digit in digits)
        assert {path.parent.name for path in utterance.audio} == {utterance.speaker}
        assert len(read_audio(utterance)) == 1_600 * len(digits)


def test_joining_depends_on_the_seed_alone_and_ids_name_the_audio(tmp_path: Path) -> None:
    make_digits(tmp_path / "01", lambda digit, take: f"{digit}_01_{take}.flac")
    first, again, other = (read_corpus(AudioMnistSettings(folder=tmp_path, seed=seed)) for seed in (0, 0, 1))
    assert first == again
    assert first.speakers != other.speakers
    audio: dict[str, tuple[Path, ...]] = {}
    for utterance in (*first.utterances(), *other.utterances()):
        assert audio.setdefault(utterance.id, utterance.audio) == utterance.audio


def test_a_damaged_take_costs_only_itself(tmp_path: Path) -> None:
    make_digits(tmp_path, lambda digit, take: f"{digit}_eve_{take}.wav")
    (tmp_path / "3_eve_1.wav").write_text("no audio")
    write(tmp_path / "5_max_0.wav")
    corpus = read_corpus(FsddSettings(folder=tmp_path))
    assert list(corpus.speakers) == ["eve"]
    assert sum(len(u.audio) for u in corpus.utterances()) == 29
    assert reasons(corpus) == {"3_eve_1.wav": "undecodable", "5_max_0.wav": "too few recordings"}


@pytest.mark.parametrize(("fewest", "most"), [(1, 1), (2, 4), (3, 5), (4, 7)])
@pytest.mark.parametrize("takes", [1, 2])
def test_no_recording_is_left_over(tmp_path: Path, fewest: int, most: int, takes: int) -> None:
    make_digits(tmp_path, lambda digit, take: f"{digit}_eve_{take}.wav", takes)
    for seed in range(5):
        corpus = read_corpus(FsddSettings(folder=tmp_path, fewest=fewest, most=most, seed=seed))
        lengths = [len(u.audio) for u in corpus.utterances()]
        assert sum(lengths) == 10 * takes
        assert fewest <= min(lengths) <= max(lengths) <= most
    with pytest.raises(ValidationError, match="left over"):
        FsddSettings(fewest=2, most=2)


# Where corpora are looked for, and the real ones.


def test_a_corpus_that_is_not_there_says_where_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIDE_DATA", str(tmp_path))
    sources = {"openslr.org": LibriSpeechSettings(), "commonvoice": CommonVoiceSettings(), "cmu.edu": An4Settings()}
    for source, asked in sources.items():
        with pytest.raises(UserError, match=rf"{tmp_path.name}.*{source}.*CONFIDE_DATA"):
            read_corpus(asked)  # type: ignore[arg-type]
    monkeypatch.delenv("CONFIDE_DATA")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"\.\./shared/data/fsdd"):
        read_corpus(FsddSettings())


def test_real_an4_has_the_speakers_that_its_readme_states() -> None:
    folder = real("an4")
    train, test = (read_corpus(An4Settings(folder=folder, subset=part)) for part in ("train", "test"))
    assert (len(train.speakers), len(train.utterances()), len(train.skipped)) == (74, 948, 0)
    assert (len(test.speakers), len(test.utterances())) == (10, 130)
    assert not set(train.speakers) & set(test.speakers)
    utterance = train.utterances()[0]
    assert len(read_audio(utterance)) == round(utterance.seconds * SAMPLE_RATE)


def test_real_digits_are_read_whole() -> None:
    test = read_corpus(AudioMnistSettings(folder=real("audiomnist"), subset="test"))
    assert list(test.speakers) == [str(n) for n in range(49, 61)]
    assert sum(len(u.audio) for u in test.utterances()) == 12 * 10 * 12
    fsdd = read_corpus(FsddSettings(folder=real("fsdd")))
    assert len(fsdd.speakers) == 6
    assert sum(len(u.text.split()) for u in fsdd.utterances()) == 3_000
    assert not count_by_reason((*test.skipped, *fsdd.skipped))
    utterance = fsdd.utterances()[0]
    assert len(read_audio(utterance)) == pytest.approx(utterance.seconds * SAMPLE_RATE, abs=4)


def test_settings_survive_a_recipe() -> None:
    asked = AudioMnistSettings(folder=Path("x"), subset="test", users="iid", seed=3)
    assert AudioMnistSettings.model_validate(json.loads(asked.model_dump_json())) == asked


OWN = """
from pathlib import Path
from confide.speech.corpora.listing import Entry

def calls(options):
    for file in sorted(Path(options["place"]).rglob("*.wav")):
        speaker = file.parent.name
        yield Entry(f"{speaker}/{file.stem}", speaker, (file,), file.with_suffix(".txt").read_text().strip())

def names(options):
    return ["ann", "bob"]
"""


@pytest.mark.usefixtures("own_code")
def test_a_corpus_of_ones_own_is_listed_by_a_function_and_checked_like_any_other(
    people: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_corpus.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    options = {"place": str(people)}
    corpus = read_corpus(PythonCorpusSettings(factory="own_corpus:calls", options=options))
    plain = read_corpus(FolderSettings(folder=people))
    assert corpus.speakers == plain.speakers
    shared = PythonCorpusSettings(factory="own_corpus:calls", options=options, share=25)
    assert set(read_corpus(shared).speakers) == set(read_corpus(FolderSettings(folder=people, share=25)).speakers)
    with pytest.raises(UserError, match=r"item 1 that it gave is a str; expected an Entry"):
        read_corpus(PythonCorpusSettings(factory="own_corpus:names"))
