"""`python -m confide` is `confide`."""

from confide.cli import main

main()
