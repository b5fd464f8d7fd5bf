"""The papers' bounds as functions of measured quantities, and what they say about a run (docs/theory.md).

`pfl_asr`, `norm` and `car` hold the theorems, as printed; `measure` takes from a checkpoint what they need; `terms`
splits the error of a central step as their proofs do, with measured numbers in place of worst cases; `advice` says what
to change.
"""
