"""How long it takes to hear everybody of a simulated population once, as audio and as features.

    python benchmarks/population.py --people 20000 --processes 2

The base voices are made first, and timed apart; whoever has them in the cache already makes none.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from confide.speech.corpora.population import PopulationSettings
from confide.speech.corpus import read_audio
from confide.speech.features import FeatureSettings, log_mel


def hear(people: int, first: int, step: int) -> tuple[int, float, float]:
    """Every `step`-th person from `first` on: utterances, seconds of sound, processor seconds for it."""
    corpus = PopulationSettings(people=people).read()
    begin, count, sound = time.process_time(), 0, 0.0
    for own in list(corpus.speakers.values())[first::step]:
        for utterance in own:
            log_mel(read_audio(utterance), FeatureSettings())
            count, sound = count + 1, sound + utterance.seconds
    return count, sound, time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--people", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    begin = time.perf_counter()
    PopulationSettings(people=1).read()
    print(f"base voices: {time.perf_counter() - begin:.1f} s")
    begin = time.perf_counter()
    with ProcessPoolExecutor(asked.processes, mp_context=get_context("spawn")) as executor:
        jobs = [executor.submit(hear, asked.people, first, asked.processes) for first in range(asked.processes)]
        done = [job.result() for job in jobs]
    utterances, sound, busy = (sum(each) for each in zip(*done, strict=True))
    print(f"{asked.people:,} people, {utterances:,} utterances, {sound / 3600:.1f} h of sound")
    print(
        f"{time.perf_counter() - begin:.1f} s with {asked.processes} processes; {busy:.1f} s of one core, of which an"
    )
    print(f"utterance takes {1000 * busy / utterances:.2f} ms")


if __name__ == "__main__":
    main()
