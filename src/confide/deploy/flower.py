"""Confide in a Flower federation, through Flower's public interface alone: a ServerApp and a ClientApp.

Stock SuperLink and SuperNodes carry the messages; round, checks, bounds, noise, ledger and the client's policy are
those of `confide deploy`. The differences follow from Flower. A ServerApp can only poll, so a message takes some tenths
of a second. A ClientApp may be a new process for every message, so each carries what a client is told when it joins,
and trust is central or local: secure aggregation needs clients that remember a round. An app does not see whose key a
node has, so a node says itself for whom it speaks: let the SuperLink admit known SuperNodes alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from confide.deploy.deployment import Client, carry_out, check_deployable, remote_engine
from confide.deploy.link import Came, Event, Gone, NodeId, Reply
from confide.deploy.metrics import Meter
from confide.deploy.parcels import Parcel
from confide.deploy.policy import read_policy
from confide.deploy.refusals import code_of, meaning
from confide.deploy.remote import JOIN, Remote, Terms
from confide.deploy.wire import HEAD, largest_head
from confide.errors import UserError
from confide.federated.task import Task
from confide.privacy.plan import Plan
from confide.privacy.trust.roster import UNSIGNED
from confide.recipe import Recipe, load

HERE = "flower"
"""What a policy's `servers` call whatever SuperLink its SuperNode was connected to."""
_PAUSE = 0.2


def packed(kind: str, parcel: Parcel, join: Any = None) -> RecordDict:
    """A parcel as records: what it says as one value of bytes, and its arrays."""
    head: bytes = msgpack.packb([kind, dict(parcel.facts), join])
    arrays = ArrayRecord({name: Array(array) for name, array in parcel.arrays.items()})
    return RecordDict({"head": ConfigRecord({"head": head}), "arrays": arrays})


def unpacked(content: RecordDict, most: int = HEAD) -> tuple[str, Parcel, Any]:
    """What `packed` was given. Nothing in it is code; whoever reads it checks what it says."""
    head = content.config_records["head"]["head"]
    if not isinstance(head, bytes) or len(head) > most:
        raise ValueError("a head that is too long")
    kind, facts, join = msgpack.unpackb(head)
    if not isinstance(kind, str) or not isinstance(facts, dict):
        raise ValueError("no head")
    return kind, Parcel(facts, {name: array.numpy() for name, array in content.array_records["arrays"].items()}), join


class GridLink:
    """A `Link` over Flower's grid."""

    def __init__(self, grid: Grid, users: int = 1) -> None:
        """`users`: how many there are in the federation."""
        self.grid, self.most, self.arrays, self.roster, self.meter = (
            grid,
            largest_head(JOIN, users),
            0,
            UNSIGNED,
            Meter(),
        )
        self.here: set[int] = set()
        self.join: Any = None
        self.waiting: dict[str, tuple[int, int, float]] = {}
        """Messages that were sent, with ticket, node, and when their time is over."""
        self.tickets = 0

    def ask(self, kind: str, parcels: Sequence[tuple[NodeId, Parcel]], seconds: float) -> list[int]:
        given, messages = list[int](), list[Message]()
        for node, parcel in parcels:
            self.tickets += 1
            given.append(self.tickets)
            if kind == JOIN:
                self.join = dict(parcel.facts)
            content = packed(kind, parcel, self.join)
            messages.append(Message(content, dst_node_id=int(node), message_type="train", ttl=max(seconds, 1.0)))
        ends = time.monotonic() + seconds
        for ticket, (node, _), name in zip(given, parcels, self.grid.push_messages(messages), strict=True):
            self.waiting[name] = ticket, int(node), ends
        return given

    def events(self, seconds: float) -> list[Event]:
        ends = time.monotonic() + seconds
        while True:
            found = [*self._moves(), *self._replies()]
            if found or time.monotonic() >= ends:
                return found
            time.sleep(_PAUSE)

    def _moves(self) -> list[Event]:
        now, before = set(self.grid.get_node_ids()), self.here
        self.here, self.meter.connected = now, len(now)
        return [*(Gone(node) for node in before - now), *(Came(node) for node in now - before)]

    def _replies(self) -> list[Event]:
        found, now = list[Event](), time.monotonic()
        for message in self.grid.pull_messages(list(self.waiting)) if self.waiting else ():
            asked = self.waiting.pop(message.metadata.reply_to_message_id, None)
            if asked is not None:
                found.append(self._reply(message, *asked[:2]))
        self.waiting = {name: each for name, each in self.waiting.items() if each[2] > now and each[1] in self.here}
        return found

    def _reply(self, message: Message, ticket: int, node: int) -> Reply:
        if message.has_error():
            return Reply(ticket, node, None, "its app failed")
        try:
            code, parcel, _ = unpacked(message.content, self.most)
        except Exception as error:  # whatever a node sends, it is one that does not answer
            return Reply(ticket, node, None, f"what it sends is no parcel ({type(error).__name__})")
        if sum(array.nbytes for array in parcel.arrays.values()) > self.arrays:
            return Reply(ticket, node, None, "its arrays are larger than the model")
        return Reply(ticket, node, None, meaning(code), code) if code else Reply(ticket, node, parcel)

    def drop(self, node: NodeId) -> None:
        """A grid cannot cut a node; it is not asked any more, since another speaks for its users."""

    def close(self) -> None: ...


server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Run a recipe. The run's config names `recipe`, `out` and `users`, and may say how a round is held."""
    given = context.run_config
    wanted, out, users = load(str(given["recipe"]), []), Path(str(given["out"])), int(given["users"])
    check_deployable(wanted)
    if wanted.privacy.trust == "distributed":
        raise UserError(
            "privacy.trust=distributed: a Flower app keeps nothing between two messages, which secure aggregation "
            "needs; use trust local or central, or `confide deploy server`"
        )
    terms = Terms(deadline=float(given.get("deadline", 600)), minimum=float(given.get("minimum", 0.5)))

    def engine(wanted: Recipe, task: Task, plan: Plan) -> Remote:
        return remote_engine(wanted, task, plan, GridLink(grid, users), None, terms, int(given.get("wait-for", 1)))

    carry_out(wanted, out, users, engine, quiet=True)


@client.train()
def answer(message: Message, context: Context) -> Message:
    """Answer a question by this node's own policy: `--node-config 'policy="policy.yaml" users="0"'`."""
    kind, parcel, join = unpacked(message.content)
    try:
        given = context.node_config
        if "policy" not in given:
            raise UserError("this SuperNode has no policy; start it with --node-config 'policy=\"policy.yaml\"'")
        policy = read_policy(Path(str(given["policy"])))
        policy.check_server(HERE, None)
        member = Client(policy, [int(user) for user in str(given.get("users", "0")).split(",")])
        if kind != JOIN:  # this process may be a new one
            member.answer(JOIN, Parcel(join))
        said = packed("", member.answer(kind, parcel))
    except Exception as error:  # its owner reads it in the SuperNode's log; what travels is a code
        print(f"did not answer {kind!r:.40}: {error}", flush=True)
        said = packed(code_of(error), Parcel())
    return Message(said, reply_to=message)
