"""How the ranks that `torchrun` starts find each other, agree to begin, and part.

Every rank runs the same command line. Rank 0 reads it; the others wait at torchrun's store until rank 0 hands them a
recipe or sends them home. So a mistake in a recipe, a folder that holds a finished run or `--help` is dealt with once,
and the others need no copy of the recipe's file. Each of them builds the task and writes at the store that it is ready,
or why not. When all are, they make the process group: gloo for tensors on the CPU, nccl for those on GPUs.

A rank that is killed closes its connections, which the others notice at their next exchange. If its machine vanishes,
they give it up after CONFIDE_RANK_TIMEOUT seconds (1800 unless set), which must be longer than the longest evaluation
and the longest window of parts. torch is imported only where it is used: `confide --help` calls `place` too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING

from confide.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

_DEVICE = "CONFIDE_DEVICE"
_TIMEOUT, _DEFAULT_TIMEOUT = "CONFIDE_RANK_TIMEOUT", 1800.0
RECIPE, BEGIN = "recipe", "begin"
"""The two orders of rank 0: build the task of this recipe, and make the process group."""
READY, FAULT = "ready", "fault"
"""The two kinds of answer: to the recipe, and when a part failed."""
_LEAVE = "leave"
_POLL_SECONDS, _LEAVE_SECONDS = 0.02, 10.0


class LostRank(Exception):
    """A rank was killed or cannot be reached; the step that was under way is not made."""


@dataclass(frozen=True)
class Place:
    """Which of how many ranks this process is."""

    rank: int
    ranks: int
    restarted: bool = False
    """Whether torchrun started the ranks again after one was lost (`--max-restarts`)."""


@dataclass(frozen=True)
class Answer:
    """What a rank other than 0 writes at the store."""

    rank: int
    fingerprint: str = ""
    environment: str = ""
    error: str = ""
    mistake: bool = False
    """Whether the error is the user's to mend; its text is then a message and not a traceback."""


def place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Which rank this process is, if torchrun (or anything that sets the same variables) started it."""
    if not all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        return None
    rank, ranks = environ["RANK"], environ["WORLD_SIZE"]
    if not (rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)):
        raise UserError(f"RANK={rank} and WORLD_SIZE={ranks} in the environment: expected 0 <= RANK < WORLD_SIZE")
    return Place(int(rank), int(ranks), environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")


def give_order(name: str, text: str = "go") -> None:
    """Rank 0: tell the others what to do next."""
    _store().set(name, text)


def wait_for_order(name: str, here: Place) -> str | None:
    """Another rank: the text of an order, or none if rank 0 sends it home or has ended."""
    try:
        order = _wait(name)
        if order == _LEAVE:
            _store().set(f"{_LEAVE}/{here.rank}", "")
    except RuntimeError:  # rank 0 kept the store and has ended
        return None
    return None if order == _LEAVE else order


def write_answer(kind: str, answer: Answer) -> None:
    _store().set(f"{kind}/{answer.rank}", json.dumps(asdict(answer)))


def read_answer(kind: str, rank: int) -> Answer:
    """What a rank has written, once it has."""
    return Answer(**json.loads(_wait(f"{kind}/{rank}")))


def dismiss(here: Place) -> None:
    """Rank 0, before it ends: send the ranks home that still wait for an order."""
    try:
        now = [bytes(_store().compare_set(order, "", _LEAVE)).decode() for order in (RECIPE, BEGIN)]
        if _LEAVE in now and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            # Without torchrun the store ends with this process; let the others read their order before.
            _store().wait([f"{_LEAVE}/{rank}" for rank in range(1, here.ranks)], timedelta(seconds=_LEAVE_SECONDS))
    except RuntimeError:
        pass  # they or the store are gone already


def device(environ: Mapping[str, str] = os.environ) -> torch.device:
    """Where this process trains: its GPU if the machine has any, unless CONFIDE_DEVICE (--device) says otherwise."""
    import torch

    if environ.get(_DEVICE) == "mps":
        raise UserError(
            "--device mps (or CONFIDE_DEVICE): a user's norm has to be measured in double precision, which torch does "
            "not have there; expected auto, cpu or cuda"
        )
    wanted, count = environ.get(_DEVICE, "auto"), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {wanted} (or {_DEVICE} in the environment): expected auto, cpu or cuda")
    if wanted == "cuda" and count == 0:
        raise UserError(
            f"--device cuda (or {_DEVICE} in the environment), but torch finds no GPU here; use cpu or auto, or "
            "install a torch that is built for this machine's GPU"
        )
    if wanted == "cpu" or count == 0:
        return torch.device("cpu")
    local = environ.get("LOCAL_RANK", "0")
    return torch.device("cuda", (int(local) if local.isdecimal() else 0) % count)


def asks_for_gpu(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether somebody wants a GPU and nothing else."""
    return environ.get(_DEVICE) == "cuda"


def choose_device(name: str | None) -> None:
    """Take note of --device, for this process and those that it starts; none leaves what the environment says."""
    if name is not None:
        os.environ[_DEVICE] = name
    device()


def join(here: Place, where: torch.device) -> None:
    """Make the process group."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore

    if where.type == "cuda":
        torch.cuda.set_device(where)
    backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
    store = PrefixStore("group", _store())
    with together("at the start"):
        dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.ranks, timeout=timeout())


def leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def together(when: str) -> Iterator[None]:
    """Wrap exchanges and nothing else: there, an error of torch means that a rank is missing."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise LostRank(
            f"a rank was lost {when}, or did not answer in {timeout().total_seconds():g} s ({reason})"
        ) from None


def timeout() -> timedelta:
    given = os.environ.get(_TIMEOUT, str(_DEFAULT_TIMEOUT))
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise UserError(f"{_TIMEOUT}={given!r} in the environment: expected a number of seconds above 0")
    return timedelta(seconds=seconds)


@cache
def _store() -> Store:
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timeout()))
    # One store may outlive a restart of the ranks, with all that was said at it.
    return PrefixStore(f"confide/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _wait(name: str) -> str:
    # Without a limit of its own: who started the ranks watches over them, and a task may take long to build.
    while not _store().check([name]):
        time.sleep(_POLL_SECONDS)
    return bytes(_store().get(name)).decode()
