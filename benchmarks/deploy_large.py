"""One round with a model above gRPC's 2 GB, over TLS between processes on this machine: time and memory.

python benchmarks/deploy_large.py [--parameters 540000000]

One client, whose training hardly takes time. The default needs 16 GB of memory and some ten minutes; a smaller model
goes the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from confide.bench.compare import peak_mib
from confide.runs import folder
from support.loopback import Loopback

RECIPE = """\
task: {{kind: bench/vector, parameters: {parameters}, users: 1}}
sampling: {{kind: fixed, cohort: 1}}
local: {{steps: 1, learning_rate: 0.1}}
bounding: {{rule: clip, bound: 0.5}}
privacy: {{mechanism: gaussian, noise_multiplier: 1, delta: 1.0e-5}}
central: {{kind: sgd, learning_rate: 1}}
evaluation: {{every: 1000000}}
run: {{steps: 1}}
"""


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--parameters", type=int, default=540_000_000)
    parameters = words.parse_args().parameters
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # freed memory is given back at once
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place, Loopback(Path(place), 1) as here:
        path = here.folder / "recipe.yaml"
        path.write_text(RECIPE.format(parameters=parameters))
        began = time.perf_counter()
        client = here.client(0, [0], path)
        server = here.serve(path, "--wait-for", 1, "--minimum", 1, "--deadline", 36_000)

        def done() -> bool:
            for name, process in (("server", server), ("client", client)):
                found = peak_mib(process.pid or 0)
                if found is not None:
                    peaks[name] = max(peaks.get(name, 0.0), found)
            return not server.is_alive()

        here.wait(done, 36_000)
        here.finish(600)
        whole = time.perf_counter() - began
        times = json.loads((here.run / folder.TIMES).read_text().splitlines()[0])
    size = parameters * 4 / 2**20
    print(f"model {size:,.0f} MiB; question to answer {times['train']:.1f} s, whole run {whole:.1f} s")
    for name, peak in peaks.items():
        print(f"{name}: at most {peak:,.0f} MiB, {peak / size:.1f} times the model")


if __name__ == "__main__":
    main()
