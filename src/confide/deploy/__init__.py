"""Clients on other machines, over gRPC: what a round is, what a client does, and the way between them."""
