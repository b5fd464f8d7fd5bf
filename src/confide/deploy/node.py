"""A client's connection: Flower's Fleet API over gRPC, as a SuperNode speaks it, and only this program behind it.

A stock SuperNode runs whatever program the server's bundle holds, and looks for messages every three seconds. This one
answers parcels with the code that is installed here: whoever holds the server can ask for a bounded update and for
nothing else. TLS, node authentication (every call is signed with the client's key), objects and heartbeats are
Flower's own. When the server is gone the client waits and connects again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import grpc
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict
from flwr.app.error import Error
from flwr.app.message import remove_content_from_message
from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.grpc import create_channel
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.interceptors import RuntimeVersionClientInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes

from confide.deploy import keys
from confide.deploy.parcels import Parcel
from confide.deploy.records import from_records, to_records
from confide.deploy.refusals import code_of
from confide.deploy.superlink import Address
from confide.errors import UserError

_HEARTBEAT = 10.0  # the shortest that Flower takes; a client that is silent for two of them counts as gone
_CALL_SECONDS = 30.0
_GRACE = 3 * _HEARTBEAT  # a client that was killed is let in again when its silence was noticed

Answer = Callable[[str, Parcel], Parcel]


@dataclass(frozen=True)
class Access:
    """How to reach the server. Without `ca` everything is plain and the client has no name."""

    server: Address
    ca: Path | None
    key: Path | None


class Connection:
    """One node, connected."""

    def __init__(self, access: Access) -> None:
        pair = generate_key_pairs() if access.key is None else _pair(access.key)
        interceptors = [RuntimeVersionClientInterceptor(component_name="SuperNode"), NodeAuthClientInterceptor(*pair)]
        self.channel = create_channel(
            server_address=str(access.server),
            insecure=access.ca is None,
            root_certificates=None if access.ca is None else access.ca.read_bytes(),
            interceptors=interceptors,
        )
        self.stub, self.stopping, public = FleetStub(self.channel), threading.Event(), public_key_to_bytes(pair[1])
        if access.key is None:
            self.stub.RegisterNode(RegisterNodeFleetRequest(public_key=public), timeout=_CALL_SECONDS)
        wanted = ActivateNodeRequest(public_key=public, heartbeat_interval=_HEARTBEAT)
        self.node = Node(node_id=self.stub.ActivateNode(wanted, timeout=_CALL_SECONDS).node_id)
        self.heart = threading.Thread(target=self._beat, daemon=True)
        self.heart.start()

    def _beat(self) -> None:
        request = SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=_HEARTBEAT)
        while not self.stopping.wait(_HEARTBEAT / 2):
            with contextlib.suppress(grpc.RpcError):  # the loop sees the same error and connects again
                self.stub.SendNodeHeartbeat(request, timeout=_CALL_SECONDS)

    def pull(self) -> Message | None:
        found = self.stub.PullMessages(PullMessagesRequest(node=self.node), timeout=_CALL_SECONDS)
        if not found.messages_list:
            return None
        about, tree = message_from_proto(found.messages_list[0]).metadata, found.message_object_trees[0]
        message = pull_and_inflate_object_from_tree(
            tree,
            make_pull_object_fn_protobuf(self.stub.PullObject, self.node, about.run_id),
            make_confirm_message_received_fn_protobuf(self.stub.ConfirmMessageReceived, self.node, about.run_id),
            return_type=Message,
        )
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def push(self, message: Message, seconds: float) -> None:
        message.metadata.__dict__["_message_id"] = message.object_id
        run = message.metadata.run_id
        with no_object_id_recompute():
            sent = self.stub.PushMessages(
                PushMessagesRequest(
                    node=self.node,
                    messages_list=[message_to_proto(remove_content_from_message(message))],
                    message_object_trees=[get_object_tree(message)],
                    clientapp_runtime_list=[seconds],
                ),
                timeout=_CALL_SECONDS,
            )
            push_objects(
                get_all_nested_objects(message),
                make_push_object_fn_protobuf(self.stub.PushObject, self.node, run, sent.session_id),
                object_ids_to_push=set(sent.objects_to_push),
            )

    def close(self) -> None:
        self.stopping.set()
        with contextlib.suppress(grpc.RpcError):
            self.stub.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id), timeout=2.0)
        self.channel.close()


def serve(
    access: Access,
    answer: Answer,
    patience: float = 3600.0,
    poll: float = 0.2,
    say: Callable[[str], None] | None = None,
) -> None:
    """Answer until somebody stops it, or until the server has been away for `patience` seconds."""
    speak = say or (lambda text: print(text, file=sys.stderr, flush=True))
    with _ended_by_signal() as stop:
        away, refused = time.monotonic(), 0.0
        while not stop.is_set():
            try:
                check_reachable(access)
                connection = Connection(access)
            except (OSError, grpc.RpcError) as error:
                # A server that has just started learns the keys in its first seconds.
                refused = (refused or time.monotonic()) if _is_refusal(error) else 0.0
                if refused and time.monotonic() - refused > min(_GRACE, patience):
                    raise UserError(
                        f"the server at {access.server} does not let this client in ({_reason(error)}); its public key "
                        "must be in the server's federation.json, and one client at a time may use a key"
                    ) from None
                if time.monotonic() - away > patience:
                    raise UserError(
                        f"no server at {access.server} for {patience:g} s ({_reason(error)}); start it with `confide "
                        "deploy server`, or check the address and firewalls"
                    ) from None
                stop.wait(min(1.0, 5 * poll))
                continue
            speak(f"connected to {access.server} as node {connection.node.node_id}")
            try:
                _answer_all(connection, answer, poll, stop, speak)
            except grpc.RpcError as error:
                if not stop.is_set():
                    speak(f"the server is away ({_reason(error)}); connecting again")
            finally:
                connection.close()
            away, refused = time.monotonic(), 0.0
    speak("stopped")


def _answer_all(
    connection: Connection, answer: Answer, poll: float, stop: threading.Event, say: Callable[[str], None]
) -> None:
    while not stop.is_set():
        message = connection.pull()
        if message is None:
            stop.wait(poll)
            continue
        began = time.monotonic()
        # The reply gets no name: it may be as large as the model, and would be held while the next is awaited.
        connection.push(reply_to(message, answer, say), time.monotonic() - began)


def reply_to(message: Message, answer: Answer, say: Callable[[str], None] | None = None) -> Message:
    """A client's reply. What went wrong here is said to its owner in full, and to the server as a code."""
    kind = message.metadata.message_type.partition(".")[2]
    try:
        content: RecordDict = to_records(answer(kind, from_records(message.content)))
    except Exception as error:  # a batch that does not fit in memory, a damaged file: the round goes on without it
        what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        (say or print)(f"did not answer {kind!r}: {what}")
        refused = Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=code_of(error))
    else:
        return Message(content, reply_to=message)
    return Message(refused, reply_to=message)


def check_reachable(access: Access) -> None:
    """A plain look at the server's port and certificate, whose refusals are easier to explain than gRPC's."""
    with socket.create_connection((access.server.host, access.server.port), timeout=5) as plain:
        if access.ca is None:
            return
        keys.check_certificate(access.ca)
        context = ssl.create_default_context(cafile=str(access.ca))
        context.set_alpn_protocols(["h2"])
        try:
            context.wrap_socket(plain, server_hostname=access.server.host).close()
        except ssl.SSLCertVerificationError as error:
            raise UserError(
                f"the certificate of {access.server} is not trusted: {error.verify_message}. It must be signed by "
                f"{access.ca}, be in date, and name the host as this client does"
            ) from None
        except ssl.SSLError as error:
            raise UserError(
                f"{access.server} does not speak TLS ({error.reason}); a server without it needs --plain on both sides"
            ) from None


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, grpc.RpcError) and error.code() in (
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
    )


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name.lower()}: {str(error.details() or '')[:200]}"
    return str(error)


def _pair(path: Path) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey]:
    key = keys.read_key(path)
    return key, key.public_key()


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[threading.Event]:
    """The first Ctrl-C ends after the answer under way, the second one at once."""
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
