"""Listeners that people have open already: TensorBoard, Weights & Biases, MLflow (`confide.runs.listening`).

Each is made in the thread it works in, and its library is imported there, so that a run without it pays nothing. What
these libraries gather by themselves (host, user, command line, git, console, telemetry) is turned off: they get the
figures, and the recipe's settings without paths.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from confide.files import write_atomically
from confide.runs.listening import Kind, Told, Values

_PARAMETERS = 100  # in one message to MLflow
_LOCAL = ("file", "sqlite")


class TensorBoard:
    """Event files in the run's folder.

    Its writer's thread meets a full disk too and would print a traceback beside our own message.
    """

    sends = False

    def __init__(self, told: Told) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.before = threading.excepthook
        threading.excepthook = self._hook
        self.writer = SummaryWriter(str(told.folder), purge_step=told.step + 1)

    def hear(self, step: int, values: Values) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        try:
            self.writer.close()
        finally:
            threading.excepthook = self.before

    def _hook(self, problem: threading.ExceptHookArgs) -> None:
        if not isinstance(problem.exc_value, OSError):
            self.before(problem)


class WandB:
    """Weights & Biases: a folder `wandb` in the run's own, or with `--send` the server that `wandb login` knows.

    The project is WANDB_PROJECT, else confide.
    """

    def __init__(self, told: Told) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        online = told.send and os.environ.get("WANDB_MODE", "online") == "online"
        if online and not wandb.login(prompt=False):
            raise RuntimeError("nobody is logged in; see `wandb login`")
        quiet = wandb.Settings(
            console="off", disable_git=True, save_code=False, disable_job_creation=True, silent=True,
            x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_save_requirements=False,
        )  # fmt: skip
        self.run = wandb.init(
            id=name_of(told.folder, "wandb", lambda: secrets.token_hex(8)), name=told.folder.name,
            project=os.environ.get("WANDB_PROJECT", "confide"), dir=str(told.folder), config=dict(told.settings),
            settings=quiet, mode=None if told.send else "offline", resume="allow" if told.send else None,
        )  # fmt: skip

    def hear(self, step: int, values: Values) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """MLflow: a folder `mlruns` in the run's own, or the place in MLFLOW_TRACKING_URI, if it is here or with `--send`.

    The experiment is MLFLOW_EXPERIMENT_NAME, else confide.
    """

    def __init__(self, told: Told) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        self.client = MlflowClient(tracking_uri=self._place(told))
        self.id = name_of(told.folder, "mlflow", lambda: self._begin(told))

    def hear(self, step: int, values: Values) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self.client.log_batch(self.id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self.client.set_terminated(self.id)

    def _begin(self, told: Told) -> str:
        from mlflow.entities import Param

        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "confide")
        known = self.client.get_experiment_by_name(experiment)
        where = self.client.create_experiment(experiment) if known is None else known.experiment_id
        own: str = self.client.create_run(where, run_name=told.folder.name).info.run_id
        listed = [Param(name, str(value)) for name, value in told.settings.items()]
        for first in range(0, len(listed), _PARAMETERS):
            self.client.log_batch(own, params=listed[first : first + _PARAMETERS])
        return own

    @staticmethod
    def _place(told: Told) -> str:
        wanted = os.environ.get("MLFLOW_TRACKING_URI", "")
        if told.send and not wanted:
            raise RuntimeError("--send, and MLFLOW_TRACKING_URI does not say where to")
        scheme = urlsplit(wanted).scheme
        if wanted and (told.send or scheme in _LOCAL):
            return wanted
        # Of words without a scheme, MLflow takes some for a server (databricks, uc): here each is a path.
        place = Path(wanted) if wanted and not scheme else told.folder / "mlruns"
        return place.resolve().as_uri()


def name_of(folder: Path, listener: str, make: Callable[[], str]) -> str:
    """Under which name a listener knows the run in this folder, so that a resumed one goes on there; made once."""
    path = folder / f"{listener}.id"
    if not path.exists():
        write_atomically(path, make().encode())
    return path.read_text()


KINDS: dict[str, Kind] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
