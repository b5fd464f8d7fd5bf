"""Mistakes that the person at the keyboard can mend, among them an extra of the package that is not installed.

A message says what was given, what was expected and what to do. The command line prints it without a traceback
and exits with code 2; anything else that escapes is a defect of the program.
"""

from __future__ import annotations

from importlib.util import find_spec

MODULES = {
    "speech": ("soundfile", "soxr", "espeakng_loader", "jiwer", "unidecode"),
    "retrieval": ("transformers", "faiss", "gguf", "accelerate", "httpx"),
    "formats": ("av", "num2words"),
    "figures": ("matplotlib",),
    "tensorboard": ("tensorboard",),
    "arrow": ("pyarrow",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "flower": ("flwr",),
    "export": ("onnx", "onnxscript", "onnxruntime"),
}
"""What an extra brings, by the names that Python imports."""


class UserError(Exception):
    """Something given from outside is wrong: a recipe, a file, a folder, an option.

    The message says what was given, what was expected and what to do. The command line prints it and exits with 2.

    Examples:
        >>> import confide
        >>> try:
        ...     confide.train("convex/digit", "runs/wrong")
        ... except confide.UserError as error:
        ...     print(str(error).partition(";")[2])
         did you mean 'convex/digits'?; see `confide recipe list`
    """


def one_line(text: str, most: int = 200) -> str:
    """What another machine or file says, fit to be printed: it cannot begin a line of its own, or steer a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[:most])


class Stopped(Exception):
    """Somebody asked the program to stop. Everything is saved, and `resume` goes on.

    Examples:
        >>> import confide
        >>> def train_or_say(recipe: str, out: str) -> None:
        ...     try:
        ...         confide.train(recipe, out)
        ...     except confide.Stopped as stop:  # Ctrl-C
        ...         print(stop)
        >>> issubclass(confide.Stopped, confide.UserError)
        False
    """


def require(extra: str, what: str) -> None:
    """Refuse, before anything is done, what needs an extra that is not there."""
    lost = missing(extra)
    if lost:
        raise UserError(sentence(extra, what, lost))


def missing(extra: str) -> list[str]:
    return [name for name in MODULES[extra] if find_spec(name) is None]


def sentence(extra: str, what: str, lost: list[str]) -> str:
    listed = lost[0] if len(lost) == 1 else f"{', '.join(lost[:-1])} and {lost[-1]}"
    return f"{what} needs {listed}, which {'is' if len(lost) == 1 else 'are'} not installed; run {line(extra)}"


def line(extra: str) -> str:
    """The command that mends it."""
    return f"`pip install 'confide[{extra}]'`"


def explained(error: ModuleNotFoundError) -> str | None:
    """What to do about a module that is missing, if an extra brings it."""
    name = (error.name or "").partition(".")[0]
    for extra, modules in MODULES.items():
        if name in modules:
            return sentence(extra, "this", [name])
    return None
