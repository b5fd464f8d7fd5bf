"""One client against two: the same training of adapter and head, over TLS between processes on this machine.

python benchmarks/deploy_speed.py [--documents 40] [--queries 10] [--epochs 1] [--rounds 5]

One client holds all queries, or each of two holds half; MiniLM (`confide encoder get minilm`), one thread a client.
Needs two idle cores. What is compared is the median time from the question to the last answer of a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from confide.runs import folder
from support.loopback import Loopback

RECIPE = """\
task:
  kind: retrieval
  encoder: {{source: minilm, pooling: mean}}
  data: {{kind: embedded, documents: {documents}, queries_per_document: {queries}}}
  clients: {{kind: even, clients: {clients}}}
  method: adapter_head
sampling: {{kind: fixed, cohort: {clients}}}
local: {{epochs: {epochs}, batch_size: 8, learning_rate: 0.1, gradient_clip: 1}}
bounding: {{rule: clip, bound: 1}}
central: {{kind: sgd, learning_rate: 1}}
evaluation: {{every: 1000000}}
run: {{steps: {rounds}}}
"""


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name, value in (("documents", 40), ("queries", 10), ("epochs", 1), ("rounds", 5)):
        words.add_argument(f"--{name}", type=int, default=value)
    given = vars(words.parse_args())
    one, two = (seconds(RECIPE.format(clients=clients, **given), clients) for clients in (1, 2))
    print(f"a round with one client {one:.2f} s, with two {two:.2f} s: {one / two:.2f} times as fast")


def seconds(recipe: str, clients: int) -> float:
    with tempfile.TemporaryDirectory() as place, Loopback(Path(place), clients) as here:
        path = here.folder / "recipe.yaml"
        path.write_text(recipe)
        for number in range(clients):
            here.client(number, [number], path)
        here.serve(path, "--wait-for", clients, "--minimum", 1, "--deadline", 3600)
        here.finish(36_000)
        lines = (here.run / folder.TIMES).read_text().splitlines()
    return statistics.median(float(json.loads(line)["train"]) for line in lines)


if __name__ == "__main__":
    main()
