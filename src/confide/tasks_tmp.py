"""From the recipe's task section to the task."""

from __future__ import annotations

from typing import Any

from confide.convex.logistic import LogisticRegression, LogisticSettings
from confide.convex.quadratics import Quadratics, QuadraticSettings
from confide.federated.custom import PythonTaskSettings, make_python_task
from confide.federated.task import Task
from confide.retrieval.settings import RetrievalSettings
from confide.speech.settings import SpeechSettings
from confide.workloads.settings import MlpSettings, SpeechClientSettings, VectorSettings


def make_task(settings: Any, seed: int) -> Task:
    if isinstance(settings, LogisticSettings):
        return LogisticRegression(settings, seed)
    if isinstance(settings, QuadraticSettings):
        return Quadratics(settings, seed)
    if isinstance(settings, SpeechSettings):
        from confide.speech.task import Speech

        return Speech(settings, seed)
    if isinstance(settings, RetrievalSettings):
        from confide.retrieval.task import Retrieval

        return Retrieval(settings, seed)
    if isinstance(settings, PythonTaskSettings):
        return make_python_task(settings, seed)
    if isinstance(settings, MlpSettings | SpeechClientSettings | VectorSettings):
        from confide.workloads import tasks as bench

        made: dict[type, Any] = {
            MlpSettings: bench.Mlp, SpeechClientSettings: bench.SpeechClient, VectorSettings: bench.Vector,
        }  # fmt: skip
        task: Task = made[type(settings)](settings, seed)
        return task
    raise ValueError(f"no task for {type(settings).__name__}")
