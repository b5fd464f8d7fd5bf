"""Runners of other systems, in their own environments (`benchmarks/setup_peers.sh`); none of them is needed.

Each is written as its documentation would have it, with whatever it offers to be fast on a processor; where a choice is
open (one process or two, one backend or another) `confide bench` runs both and takes the better.
"""
