"""The Flower client app, in a module of its own so that Ray's processes import it once and keep model and data."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod

from peers.floors import workload

app = ClientApp(mods=[fixedclipping_mod])


@cache
def held(name: str) -> tuple[Any, ...]:
    torch.set_num_threads(1)
    return workload(name)


@app.train()
def train(message: Any, context: Context) -> Any:
    import numpy as np

    name = str(message.content["config"]["workload"])
    model, loss, batches, _ = held(name)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    user = int(context.node_config["partition-id"])
    for inputs, labels in batches(user, np.random.default_rng()):
        optimiser.zero_grad()
        loss(model(inputs), labels).backward()
        optimiser.step()
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)
