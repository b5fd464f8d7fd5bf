"""Published collections, users' own tables and the embedded corpus, and what happens to bad files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from confide.errors import UserError
from confide.retrieval.corpora import DataSettings
from confide.retrieval.data import RetrievalCorpus


def _read(seed: int = 0, **settings: Any) -> RetrievalCorpus:
    adapter: TypeAdapter[DataSettings] = TypeAdapter(DataSettings)
    return adapter.validate_python(settings).read(seed)


def test_sms_spam_is_read_whole_and_split_by_a_fifth(data: Path) -> None:
    corpus = _read(kind="sms_spam", file=data / "sms_spam" / "SMSSpamCollection")
    assert (len(corpus.train), len(corpus.test), corpus.left_out) == (4459, 1115, {})
    assert [document.id for document in corpus.documents] == ["ham", "spam"]
    assert np.bincount(corpus.test.labels).tolist() == [965, 150]  # 747 of 5,574 are spam


def test_ag_news_keeps_its_official_test_and_mends_its_references(data: Path) -> None:
    corpus = _read(kind="ag_news", folder=data / "ag_news")
    assert (len(corpus.train), np.bincount(corpus.test.labels).tolist()) == (10646, [1900] * 4)
    texts = [*corpus.train.texts, *corpus.test.texts]
    assert not any("#39;" in text or "\\" in text for text in texts)
    assert any("Haiti's straits" in text for text in texts)


def test_the_arxiv_sample_has_its_categories_in_training_and_test(data: Path) -> None:
    corpus = _read(kind="arxiv", file=data / "arxiv" / "arxiv_sample.tsv.gz", per_category=10, text="title")
    assert (len(corpus.documents), len(corpus.train), len(corpus.test)) == (167, 1336, 334)
    assert len(np.unique(corpus.test.labels)) == 167
    assert corpus.left_out == {"beyond per_category": 167 * 50}


def test_arxiv_json_lines_as_published_are_read(tmp_path: Path) -> None:
    papers = [
        {"id": f"{n:04}", "title": f"T{n}", "abstract": f"  Abstract\n number {n} ", "categories": "cs.LG stat.ML"}
        if n % 2
        else {"id": f"{n:04}", "title": f"T{n}", "abstract": f"Text {n}", "categories": "math.CO"}
        for n in range(20)
    ]
    papers.append({"id": "rare", "title": "", "abstract": "alone", "categories": "hep-th"})
    path = tmp_path / "arxiv.json.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, papers)).encode()))
    corpus = _read(kind="arxiv", file=path)
    assert [document.id for document in corpus.documents] == ["cs.LG", "math.CO"]
    assert "Abstract number 1" in [*corpus.train.texts, *corpus.test.texts]
    assert corpus.left_out == {"rare category": 1}


def test_the_embedded_corpus_is_always_the_same_and_the_seed_only_splits_it() -> None:
    first, again, other = _read(kind="embedded"), _read(kind="embedded"), _read(1, kind="embedded")
    assert (len(first.documents), len(first.train), len(first.test)) == (100, 800, 200)
    assert first.train.texts == again.train.texts != other.train.texts
    assert sorted([*first.train.texts, *first.test.texts]) == sorted([*other.train.texts, *other.test.texts])
    assert len({*first.train.texts, *first.test.texts}) == 1000  # no query twice, none in both parts
    assert first.train.groups is not None
    assert len(set(first.train.groups)) == 20


def test_the_embedded_corpus_grows_to_thousands_of_different_documents() -> None:
    corpus = _read(kind="embedded", documents=2000, queries_per_document=2)
    assert len({document.text for document in corpus.documents}) == 2000
    assert len(corpus.train) + len(corpus.test) == 4000


def _table(folder: Path, rows: str, documents: str | None = None, **more: Any) -> RetrievalCorpus:
    (folder / "queries.csv").write_text(rows, encoding="utf-8")
    if documents is not None:
        (folder / "documents.jsonl").write_text(documents, encoding="utf-8")
        more["documents"] = folder / "documents.jsonl"
    return _read(kind="table", queries=folder / "queries.csv", **more)


ROWS = "query,document,who\n" + "".join(f"question {n},{'ab'[n % 2]},client {n % 3}\n" for n in range(20))
DOCUMENTS = '{"id": "a", "text": "About A"}\n{"id": "b", "text": "About B"}\n'


def test_a_table_with_texts_of_documents_makes_each_text_a_class(tmp_path: Path) -> None:
    corpus = _table(tmp_path, ROWS)
    assert [document.text for document in corpus.documents] == ["a", "b"]
    assert len(corpus.train) == 16


def test_a_table_with_ids_takes_the_texts_from_the_documents_file(tmp_path: Path) -> None:
    corpus = _table(tmp_path, ROWS, DOCUMENTS, client_column="who")
    assert [document.text for document in corpus.documents] == ["About A", "About B"]
    assert corpus.train.groups is not None
    assert set(corpus.train.groups) == {"client 0", "client 1", "client 2"}


def test_settings_are_chosen_on_training_rows_alone() -> None:
    """With a part held out, training and evaluation together are the training rows, and the test is not touched."""
    whole = _read(kind="embedded")
    held = _read(kind="embedded", held_out=0.25)
    assert sorted([*held.train.texts, *held.test.texts]) == sorted(whole.train.texts)
    assert len(held.test) == pytest.approx(0.25 * len(whole.train), rel=0.05)
    assert held.documents == whole.documents


def test_the_folds_of_one_seed_test_every_row_once(tmp_path: Path) -> None:
    path = tmp_path / "sms"
    path.write_text("".join(f"{'spam' if n % 5 == 0 else 'ham'}\tmessage {n}\n" for n in range(40)))
    corpora = [_read(kind="sms_spam", file=path, fold=fold) for fold in range(5)]
    assert sorted(text for corpus in corpora for text in corpus.test.texts) == sorted(f"message {n}" for n in range(40))
    for corpus in corpora:
        assert sorted([*corpus.train.texts, *corpus.test.texts]) == sorted(f"message {n}" for n in range(40))
    with pytest.raises(UserError, match=r"fold=5 .* expected 0 to 4"):
        _read(kind="sms_spam", file=path, fold=5)
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text('"1","War","somewhere"\n"2","Match","won"\n')
    with pytest.raises(UserError, match="whose test is given"):
        _read(kind="ag_news", folder=tmp_path, fold=0)


def test_a_deal_of_its_own_keeps_the_test_rows_whatever_the_seed_is(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("query,document\n" + "".join(f"text {n},{'ab'[n % 2]}\n" for n in range(40)))
    table = {"kind": "table", "queries": tmp_path / "rows.csv"}
    plain = [_read(seed, **table).test.texts for seed in (0, 1)]
    dealt = [_read(seed, deal=1, **table).test.texts for seed in (0, 1, 2)]
    assert plain[0] != plain[1]
    assert dealt == [plain[1]] * 3
    assert _read(0, deal=1, held_out=0.2, **table).test.texts == _read(1, held_out=0.2, **table).test.texts


def test_a_label_that_no_training_query_has_is_left_out_of_the_test_and_counted(tmp_path: Path) -> None:
    """Nothing could retrieve it; without the count its queries would be missing from the score unseen."""
    rows = ['"1","War","somewhere"', '"2","Match","won"', '"1","Peace","at last"', '"2","Cup","lost"']
    (tmp_path / "train.csv").write_text("\n".join(rows))
    (tmp_path / "test.csv").write_text("\n".join([*rows[:2], '"4","Chip","faster"']))
    corpus = _read(kind="ag_news", folder=tmp_path)
    assert [document.id for document in corpus.documents] == ["World", "Sports"]
    assert (len(corpus.test), corpus.left_out) == (2, {"unknown document": 1})


def test_what_cannot_be_used_is_counted(tmp_path: Path) -> None:
    documents = (
        DOCUMENTS + DOCUMENTS.splitlines()[0] + '\n{"id": "c", "text": "Nobody asks"}\n{"id": "d", "text": ""}\n'
    )
    corpus = _table(tmp_path, ROWS + ",a,x\nwhat,,x\nlost,zzz,x\nquestion 0,a,x\n", documents, drop_duplicates=True)
    assert corpus.left_out == {
        "duplicate document": 1, "document without id or text": 1, "document without a query": 1, "empty text": 1,
        "no document": 1, "duplicate text": 1, "unknown document": 1,
    }  # fmt: skip


def test_documents_can_be_trained_on_by_their_own_text(tmp_path: Path) -> None:
    corpus = _table(tmp_path, ROWS, DOCUMENTS, documents_as_queries=True)
    assert "About A" in [*corpus.train.texts, *corpus.test.texts]


@pytest.mark.parametrize(
    ("rows", "documents", "more", "said"),
    [
        ("question,document\nx,y\n", None, {}, "expected query, document: query is missing"),
        ("query,document\nx,y\nz,y\n", None, {}, "expected at least two"),
        ("query,document\nx\n", None, {}, "fewer cells than the 2 columns"),
        (ROWS, DOCUMENTS + '{"id": "a", "text": "Other"}\n', {}, "the id 'a' a second time, with another text"),
        (ROWS, "[1]\n", {}, "expected one JSON object a line"),
        (ROWS, '{"id": "a", "text": null}\n', {}, "no text in 'text'"),
        (ROWS, None, {"client_column": "whose"}, "whose is missing"),
        ("query,document\n", None, {}, "0 documents"),
    ],
)
def test_a_bad_table_is_refused_with_its_reason(
    tmp_path: Path, rows: str, documents: str | None, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        _table(tmp_path, rows, documents, **more)


def test_missing_files_other_endings_and_other_encodings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file; get it from"):
        _read(kind="sms_spam", file=tmp_path / "nothing")
    with pytest.raises(UserError, match="there is no file"):
        _read(kind="table", queries=tmp_path / "nothing.csv")
    (tmp_path / "queries.xlsx").write_bytes(b"PK")
    with pytest.raises(UserError, match=r"ends in \.xlsx; expected \.csv"):
        _read(kind="table", queries=tmp_path / "queries.xlsx")
    (tmp_path / "sms").write_bytes("ham\tcaf\xe9\n".encode("latin-1"))
    with pytest.raises(UserError, match="line 1 is not UTF-8"):
        _read(kind="sms_spam", file=tmp_path / "sms")
    (tmp_path / "sms").write_bytes(b"maybe\thello\n")
    with pytest.raises(UserError, match="line 1 begins with 'maybe"):
        _read(kind="sms_spam", file=tmp_path / "sms")
    (tmp_path / "sms").write_bytes(b"ham\thello\nham\tbye\n")
    with pytest.raises(UserError, match="expected at least two"):
        _read(kind="sms_spam", file=tmp_path / "sms")
    (tmp_path / "cut.tsv.gz").write_bytes(gzip.compress(b"arxiv_id\tprimary_category\ttitle\tabstract\n" * 9)[:-12])
    with pytest.raises(UserError, match="breaks off"):
        _read(kind="arxiv", file=tmp_path / "cut.tsv.gz")


def test_where_whole_clients_are_tested_whole_clients_are_held_out_too(tmp_path: Path) -> None:
    table = tmp_path / "mail.csv"
    rows = [f"words {n},{'ab'[n % 2]},owner{n % 20}" for n in range(200)]
    table.write_text("\n".join(["text,label,owner", *rows]))
    columns: dict[str, Any] = {"query_column": "text", "document_column": "label"}
    columns |= {"client_column": "owner", "test_by": "clients"}
    whole = _read(kind="table", queries=table, **columns)
    chosen = _read(kind="table", queries=table, held_out=0.25, **columns)
    training, tested, held = (set(part.groups or ()) for part in (chosen.train, whole.test, chosen.test))
    assert (len(training), len(tested), len(held)) == (12, 4, 4)
    assert training.isdisjoint(held)
    assert training | held == set(whole.train.groups or ())
