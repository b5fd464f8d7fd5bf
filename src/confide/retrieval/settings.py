"""The recipe's section of the retrieval task (CAR section 6: four combinations of adapter, head and search)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from confide.encoders.encoder import EncoderSettings
from confide.federated.task import WIDE, Task, TaskSection
from confide.retrieval.corpora import DataSettings
from confide.retrieval.embedded import EmbeddedSettings
from confide.retrieval.experts import ExpertsSettings
from confide.retrieval.head import HeadSettings
from confide.retrieval.search import SearchSettings
from confide.retrieval.splits import ClientSplit, ColumnSplit, EvenSplit
from confide.settings import MADE_UP, LocalPath, Unit

Method = Literal["head", "adapter_head", "adapter_search", "search"]


class RetrievalSettings(TaskSection):
    """Retrieval over clients that keep their queries, on a frozen language model."""

    kind: Literal["retrieval"] = "retrieval"
    encoder: EncoderSettings = Field(EncoderSettings(), description="the frozen language model")
    data: DataSettings = Field(
        default_factory=EmbeddedSettings, description="documents, training queries and test queries"
    )
    clients: ClientSplit = Field(
        default_factory=EvenSplit, description="how the training queries are dealt to the users; clients: 1 is central"
    )
    method: Method = Field(
        "head",
        description="head: a classifier on fixed vectors; adapter_head: the soft-embedding adapter too; "
        "adapter_search: the adapter alone, for inner-product search; search: nothing trains, for `confide evaluate`",
    )
    head: HeadSettings = Field(HeadSettings(), description="for head and adapter_head")
    experts: ExpertsSettings | None = Field(
        None, description="for head and adapter_head: a gate and expert heads in place of the one head"
    )
    search: SearchSettings = Field(SearchSettings(), description="for adapter_search and search")
    start: LocalPath | None = Field(
        None,
        description="run folder or safetensors file to begin from, such as a head trained on kept states; an "
        "adapter that it lacks stays the identity; none: fresh weights",
    )
    negatives: Annotated[int, Field(ge=1)] | None = Field(
        None, description="for adapter_search: a step compares with so many other documents; none: with all"
    )
    k: int = Field(5, ge=1, description="K of the top-K share in evaluations; at most the number of documents counts")
    cache: LocalPath | None = Field(None, description="where hidden states are kept; none: the user's cache folder")

    @property
    def population(self) -> int | None:
        """How many clients there are, where that is known before the data are read."""
        return None if isinstance(self.clients, ColumnSplit) else self.clients.clients

    @property
    def size(self) -> int:
        layers = [self.head.pre_classifier or 0]
        if self.experts is not None:
            layers += [self.experts.clusters or 0, self.experts.gate_rank or 0]
        return sum(layers) * WIDE

    @property
    def unit(self) -> Unit:
        if self.data.kind == "embedded":
            column = isinstance(self.clients, ColumnSplit)
            return Unit(name="made-up household", person=False, origin="made-up") if column else MADE_UP
        if isinstance(self.clients, ColumnSplit):
            return Unit(name="owner of queries, by the data's client column", person=False, origin="found")
        return Unit(name="random share of the queries", person=False, origin="dealt")

    @property
    def trains_adapter(self) -> bool:
        return self.method in ("adapter_head", "adapter_search")

    @property
    def has_head(self) -> bool:
        return self.method in ("head", "adapter_head")

    def held_out(self, percent: int) -> dict[str, Any] | None:
        return {"data.held_out": percent / 100}

    def make(self, seed: int) -> Task:
        from confide.retrieval.task import Retrieval

        return Retrieval(self, seed)
