"""Clients on other machines, over gRPC: what a round is, what a client does, and the way between them."""

import os

# gRPC writes a line for every failed handshake: whoever reaches the port could fill the log. They are counted instead.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
