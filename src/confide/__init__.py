"""Confide: private federated learning with a stated, checked guarantee for every user."""

__version__ = "0.1.0"
