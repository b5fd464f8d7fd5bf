"""The one exception for mistakes that the person at the keyboard can mend.

A message says what was given, what was expected and what to do. The command line prints it without a traceback
and exits with code 2; anything else that escapes is a defect of the program.
"""

from __future__ import annotations


class UserError(Exception):
    """Something given from outside is wrong: a recipe, a file, a folder, an option."""


class Stopped(Exception):
    """Somebody asked the program to stop; everything is saved."""
