"""A `Link` over the grid that Flower gives to the server's side of an app."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flwr.app import Message
from flwr.app.error import Error
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from confide.deploy.parcels import Parcel
from confide.deploy.records import from_records, to_records
from confide.deploy.refusals import meaning
from confide.deploy.remote import Reply


class GridLink:
    """A `Link` over the grid that Flower hands to a ServerApp."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def nodes(self) -> set[int]:
        return set(self.grid.get_node_ids())

    def ask(self, kind: str, parcels: Sequence[tuple[int, Parcel]], seconds: float) -> list[str | None]:
        # One by one: a request with many models would be large, and one that fails should not take others with it.
        tickets: list[str | None] = []
        for node, parcel in parcels:
            message = Message(to_records(parcel), node, f"query.{kind}", ttl=max(seconds, 1.0))
            tickets += list(self.grid.push_messages([message])) or [None]
        return tickets

    def replies(self, tickets: Iterable[str]) -> list[Reply]:
        for ticket in tickets:
            for message in self.grid.pull_messages([ticket]):
                node = message.metadata.src_node_id
                if message.has_error():
                    return [Reply(ticket, node, None, _reason(message.error))]
                return [Reply(ticket, node, from_records(message.content))]  # one at a time is all that is held
        return []

    def close(self) -> None:
        pass


def _reason(error: Error) -> str:
    """Why there is no answer; of what a client said only the code counts."""
    by_client = error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    return meaning(error.reason) if by_client else f"Flower could not deliver the answer (error {error.code})"
