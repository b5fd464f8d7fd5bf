"""The plain Flower app is one that Flower accepts and loads, and parcels survive Flower's records and their chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="deployment needs Flower: pip install 'confide[deploy]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.app.message import array as chunking

from confide.deploy import records as flower_records
from confide.deploy.parcels import Parcel
from confide.deploy.policy import write_policy
from confide.deploy.records import from_records, to_records

APP = Path(__file__).parents[2] / "examples" / "flower-app"


def test_flower_builds_and_loads_the_app() -> None:
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    found = load_and_validate(APP / "pyproject.toml", check_module=False)
    config = found[0] if isinstance(found, tuple) else found
    assert config is not None
    assert len(build_fab_from_disk(APP)) > 100
    import importlib

    for part, kind in (("serverapp", ServerApp), ("clientapp", ClientApp)):
        module, _, name = config["tool"]["flwr"]["app"]["components"][part].partition(":")
        assert isinstance(getattr(importlib.import_module(module), name), kind)


def test_the_client_app_answers_a_server_that_asks_it_to_join(tiny: str, tmp_path: Path) -> None:
    from flwr.supercore.task_identity import TaskIdentity

    from confide.deploy import app

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 2, 3
    write_policy(tmp_path / "policy.yaml", "here:1", None)
    config: Any = {"users": "0+3", "recipe": tiny, "policy": str(tmp_path / "policy.yaml")}
    context = Context(run_id=1, node_id=2, node_config=config, state=RecordDict(), run_config={})
    message = Message(to_records(Parcel({"version": "0"})), 2, "query.join")
    answer = app.client(message, context)
    facts = from_records(answer.content).facts
    assert list(facts["users"]) == [0, 3]
    assert facts["refuses"] == "version"
    # A file that the server names is not read.
    told = Context(
        run_id=1,
        node_id=2,
        node_config=config,
        state=RecordDict(),
        run_config={"recipe": str(tmp_path / "policy.yaml")},
    )
    del config["recipe"]
    assert app.client(message, told).error.reason == "failed"


def test_a_large_array_travels_in_chunks_and_comes_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    monkeypatch.setattr(chunking, "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 1000)
    monkeypatch.setattr(flower_records, "_PART", 4096)
    parcel = Parcel({"step": 3, "norms": [1.0, 2.0]}, {"update": np.arange(2500, dtype=np.float32)})
    records = to_records(parcel)
    objects = {name: made.deflate() for name, made in get_all_nested_objects(records).items()}
    assert max(map(len, objects.values())) < 1500
    assert len(objects) >= 10 + 3
    back = from_records(inflate_object_from_contents(records.object_id, objects))  # type: ignore[arg-type]
    assert np.array_equal(back.arrays["update"], parcel.arrays["update"])
    assert back.facts["step"] == 3


@pytest.mark.parametrize(
    "array",
    [
        Array(dtype="|O", shape=(1,), stype="confide.raw", data=b"12345678"),
        Array(dtype="<f4", shape=(3,), stype="confide.raw", data=b"1234"),
        Array(dtype="nonsense", shape=(1,), stype="confide.raw", data=b"1234"),
        Array(dtype="<f4", shape=(1,), stype="numpy.ndarray", data=b"1234"),
    ],
)
def test_what_is_no_array_of_numbers_is_left_out(array: Array) -> None:
    records = RecordDict({"facts": ConfigRecord({"a": 1}), "arrays": ArrayRecord({"update/0": array})})
    assert from_records(records).arrays == {}
    assert from_records(RecordDict()).facts == {}
