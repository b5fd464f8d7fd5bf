"""Clients on other machines, over Flower: what a round is, what a client does, and the way between them."""
