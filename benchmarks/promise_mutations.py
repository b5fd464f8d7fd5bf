"""Break the code in the way that makes a sentence of docs/guarantee.md false, and see that one of its tests fails.

    python benchmarks/promise_mutations.py                  # all of them: half an hour
    python benchmarks/promise_mutations.py --only "The key" # those of the sentences that begin so

An entry of `MUTATIONS` is how a sentence of docs/guarantee-checks.md begins (the whole of it, with a $ at the end), and
an edit of a file of the package: what stands there once, and what stands there instead. Every edit is made in a copy of
the tree, and the sentence's tests run there by themselves. Where all of them pass though their sentence is false, test,
sentence or code has to be mended. Run it when the page or its tests change; an entry that no longer fits is named.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| (.+) \| `(tests/[\w/]+\.py::test_\w+)` \|$", re.MULTILINE)
SHARED = ("torch", "scipy.stats", "dp_accounting", "pydantic", "pytest", "hypothesis", "yaml", "typer")
"""What every test needs and no edit changes: imported once, before processes are forked."""
SECONDS = 400

# fmt: off
MUTATIONS: dict[str, list[tuple[str, str, str]]] = {
    "privacy/accountant.py": [
        ("up to 1 strong", "= mo", " mo"),
        ("Epsilons with different", "len({event.adjacency for event in counts}) > 1", "False"),
        ("T sampled Gaussians (amp", "e, event)", "e / 2, event)"),
        ("one user's data are replaced", " / 2 if replace else z", ""),
        ("T sampled Gaussians of z", " / 2 if replace else z", ""),
        ("T sampled Gaussians of z", ' / 2 if sampler == "fixed" else z', ""),
        ("one user's data are there or", "rate, event)", "0.9 * rate, event)"),
        ("dp-accounting composes", "float(_", "0.98 * float(_"),
        ("below a delta of", "5e-10", "5e-13"),
        ("Every epsilon that", ", ROUND_CEILING", ""),
        ("(epsilon, delta) holds", "(1 + math.exp(min(found, 700.0)))", "1"),
        ("The accountant takes", " * (1 - share)", ""),
        ("T Gaussians of z / 2", '0.5 if kind == "local" else ', ""),
        ("Every adjacency above", 'z * (0.5 if sampler == "local" else 1.0)', "2 * z"),
        ("It is also none", "delta is not None and population is not None and delta * population > 1", "False"),
        ("T Gaussians$", 'kind == "everyone"', "False"),
        ("dp-accounting composes", "float(_", "0.9 * float(_"),
    ],
    "privacy/events.py": [
        ("The number of users, K", '; the number of users is the same for both"', '"'),
        ("so that all together", "2 *", "3 *"),
        ("Update and counts", "1 / math.sqrt(left)", "self.noise_multiplier"),
        ("Update, counts of", "1 / math.sqrt(left)", "self.noise_multiplier"),
        ("Epsilon stays", "1 / math.sqrt(left)", "self.noise_multiplier"),
        ("The ledger holds", "value f", '0 if name == "counters" else value f'),
        ("T / bands", "-(-self.rounds // self.separation", "max(1, self.rounds // self.separation // 2"),
        ("T steps cost", "-(-self.r", "max(1, self.r"),
        ("With `most` = S", "one *", "1e9 * one *"),
        ("with probability p", " * groups", ""),
        ("and compare five", "turn_rate(self.rate, self.separation)", "self.rate"),
        ("compare five settings with", "turn_rate(self.rate, self.separation)", "self.rate"),
        ("Its event has no", "self.noise_multiplier > 0 and self.sensitivity is not Non", "Tru"),
        ("one user sends nothing; the schedule", "leave out one user, with a public schedule",
         "add-or-remove one user"),
        ("one user sends nothing; the groups", "leave out one user, with public groups", "add-or-remove one user"),
    ],
    "privacy/plan.py": [
        ("What would leave no", "most and plan.event.privat", "Fals"),
        ("The divisor is the expected cohort.", "self.ra", "0.9 * self.ra"),
        ("`privacy.metrics.noise`", ".count_noise,", ".count_noise / 2,"),
        ("It can never count too", "self.ledger.record(self.step, self.event, self.environment, self.repeatable)", "0"),
        ("Nothing in it depends", "self.step, self.event, self.environment, self.repeatable",
         "\n            self.step, replace(self.event, cohort=max(1, len(self.cohort))), self.environment"),
        ("one Gaussian for the", "1)", "0)"),
    ],
    "privacy/sampling.py": [
        ("T Gaussians$", '"everyone" if settings.cohort == population else ', ""),
        ("Poisson cohorts have no", "se drawn", "se drawn[: 2 * cohort]"),
        ("If more users are", "_part(drawn, most, seed, purpose, step)", "drawn[:most]"),
        ("Noise and cohorts then", "os.urandom(16) ", 'b"0" * 16 '),
        ("Noise and cohorts then", "os.urandom(16),", 'b"0" * 16,'),
        ("The keys come from the operating system and", "os.urandom(16) ", 'b"0" * 16 '),
        ("draws each user", "_bernoulli(turn_rate(cohort / population, groups), len(users), seed, _place(step, attempt",
         ": round(turn_rate(cohort / population, groups) * len(users"),
        ("Poisson cohorts have no", "se drawn", "se drawn[: cohort + 2]"),
    ],
    "privacy/gaussian.py": [
        ("The keys come from the operating system$", "os.urandom(32)", 'b"0" * 32'),
        ("This noise ends", "_open_tail(radius)", "pass"),
        ("Its noise also ends", "62", "70"),
        ("An update on one", "62", "70"),
        ("any of 2,000", "34", "20"),
        ("The released sum is dithered and rounded to a grid, against", "1.5 * 2.0 ** np.finfo(kind).nmant * step",
         "0.0"),
        ("The released sum is dithered and rounded to a grid$", "step * 2.0**-16", "0 * step"),
    ],
    "privacy/mechanisms/base.py": [
        ("All data of one user", "bound *", "0.5 * bound *"),
        ("One user moves g", "ax()", "ean()"),
        ("The divisor is the expected cohort, not", "n self.setting.rate",
         "n max(1, len(cohort)) / len(self.setting.weights)"),
        ("Tests of the plan", "n self.setting.rate", "n max(1, len(cohort)) / len(self.setting.weights)"),
        ("Gaussian noise of z", " event.update_multiplier", " 0.9"),
        ("With `placement: client`", 'self.setting.privacy.placement == "client"', "False"),
        ("The shares add up", "np.sqrt(np.square(weights).sum()", "weights.sum("),
        ("Sampler, noise and event", "self.sampler", '"everyone"'),
        ("or a sampler other", "self.sampler", '"poisson"'),
        ("s is a twentieth", "0.8", "2"),
        ("by RDP$", 'pld" ', '?" '),
        ("A combination that no", 'asked.sampling.kind.startswith("cyclic")', "False"),
        ("both need central trust", 'trust != "central" and asked.follows == "quantile"', "False"),
        ("The server adds this", 'cls.trust != "central"', "False"),
        ("and a deployment, refuse", "asked.privacy.metrics is None:\n            return []\n        r",
         "True:\n            return []\n        r"),
        ("That is refused with", "cls.guaranteed and asked.private_weights", "False"),
        ("Equal weights and a", "asked.private_weights", "not asked.uniform"),
        ("`confide train` warns", "if not too_large(delta, users):\n            ", ""),
        ("The noise is added after", ", address))", " * (1 + len(cohort) / 50), address))"),
    ],
    "privacy/mechanisms/banded.py": [
        ("the whole run is one", " * self.column", ""),
        ("with z measured in", "min(setting.steps, self.bands) if self.amplified else setting.steps", "1"),
        ("`sampling.kind: cyclic_p", "n=self.bands", "n=self.bands + 1"),
        ("With `privacy.source: s", "_go_on(memory,", "occasion.memory.update(memory)\n        _go_on(memory,"),
        ("After a stop the noise", "line is not None and line != int(follows)", "False"),
        ("So does `banded`", '"privacy.m', '] and ["privacy.m'),
    ],
    "privacy/mechanisms/local.py": [
        ("so sampling adds nothing", 'n "local', 'n "poisson'),
        ("a user is charged as", 'n "local', 'n "poisson'),
        ("Every message carries", "n.rate", "n.rate / 1.2"),
        ("Local trust refuses", '"s', '] and ["s'),
    ],
    "privacy/mechanisms/realised.py": [
        ("One user moves the mean", "2 *", "1.8 *"),
        ("users who all send", " *", ".2 *"),
        ("So it needs about", "2 * ", ""),
        ("Sampling amplifies", "2 *", "0.5 *"),
        ("Cohorts of fixed size, t", 'asked.sampling.kind == "fixed"', "False"),
    ],
    "privacy/mechanisms/distributed.py": [
        ("the noise must not tell", "RELEASED * least - arrived", "least"),
        ("In a deployment the server tops", "RELEASED * least - arrived", "max(0, least - arrived)"),
    ],
    "privacy/mechanisms/car.py": [
        ("no epsilon is stated", "math.inf", "1.0"),
        ("Its event has no", "math.inf", "1.0"),
    ],
    "privacy/factorisation.py": [
        ("A user's turns are", "% g", "* step % g"),
        ("Users are dealt into", " + (group < larger)", ""),
        ("`sampling.kind: cyclic` t", " + (group < larger)", ""),
        ("The groups are public", 'seed, "', '0, "'),
        ("later steps take back", "out.sub_(ring[(step - lag) % len(ring)], alpha=scale * coefficient)", "pass"),
        ("Each band needs", "ring[s", 'state["ring"] = ring.clone()\n        state["ring"][s'),
    ],
    "privacy/ledger.py": [
        ("The step becomes one", "event.to_json()", '{**event.to_json(), "noise_multiplier": 9.0}'),
        ("`confide ledger RUN` r", "] if", "[1:]] if"),
        ("If the environment", "(past.environment, past.event) == (environment, event)", "past.event == event"),
        ("Its line in the ledger", "repeatable a", "False a"),
        ("A run that is killed", "1]", "2]"),
        ("because a step that is made", "+ 1 ", ""),
        ("a run in which any step", " * repeats", ""),
        ("A step that was made again", "replace(event, noise_multiplier=event.noise_multiplier / math.sqrt(more))",
         "event"),
        ("every line of the ledger", "max(event.rounds, turns * event.separation)", "event.rounds"),
        ("Every release is charged", "            self._write(body, entry)\n", ""),
        ("A kill leaves a charge", "self.pay is not Non", "Fals"),
        ("that step and all later", "n entry is past", "n True"),
    ],
    "privacy/chain.py": [
        ("The line is synced", "    os.fsync(file.fileno())\n    e", "e"),
        ("The line is synced", "while l", "os.fsync(file.fileno())\n        while l"),
        ("names the first line", "digest != hashlib.sha256(_encode(body)).hexdigest()", "False"),
        ("So it does if", "digest != hashlib.sha256(_encode(body)).hexdigest()", "False"),
        ("removed or moved", "previous != head", "False"),
        ("whose lines are chained", "digest != hashlib.sha256(_encode(body)).hexdigest()", "False"),
    ],
    "privacy/budget.py": [
        ("Two runs at once", "self._catch_up(file)\n            ", ""),
        ("in a file that is", "fcntl.flock(file, fcntl.LOCK_EX)", "pass"),
        ("A step that is repeated", "(run, key) in self.keys", "False"),
        ("Epsilon and delta of", "link(w", "replace(w"),
        ("It tells populations", "others:", "False:"),
        ("What PLD gives", " / len(groups)", ""),
    ],
    "privacy/renyi_filter.py": [
        ("The budget is a privacy", ") <= 1", ") <= 3"),
        ("RDP at fixed orders", " / len(ORDERS)", ""),
        ("`confide budget` says", "f.overflow)", "f.overflow) / 2"),
        ("a bound that holds", "math.log(len(ORDERS) / self.delta)", "0.0"),
        ("It is not stated where", "self.overflow > 0", "False"),
    ],
    "run.py": [
        ("The ledger has the line", "turn tally, release.record()",
         "lease.attempt = 0\n                return tally, release"),
    ],
    "privacy/guarantee.py": [
        ("A ledger from before that is read", "n UNSAID", 'n Unit(name="user", person=True, origin="found")'),
        ("what is taken as public", "[*found, EXAMPLES]", "found"),
        ("Publishing all data", "delta is not None and delta * users >= 1", "False"),
        ("promises nothing against", '_trust(header, events) == "distributed":\n        found.append(\n',
         "False:\n        found.append(\n"),
        ("the server learns who", '_trust(header, events) != "central" or header.get("deployed")', "False"),
        ("The epsilon of the steps", "a number o", '" and "a number o'),
        ("epsilon by PLD and", 'rdp"', 'pld"'),
        ("Summary, page and", "accountant_used(kind, delta)", "kind"),
        ("The guarantee, the summary and", "[*found, EXAMPLES]", "found"),
        ("against them sampling hides", 'found.append("w', '"" and found.append("w'),
    ],
    "privacy/adversaries.py": [
        ("any number of them", ', "they', ' / 2, "they'),
        ("an epsilon of its own", " - count", ""),
        ("c clients that are not", " - count", ""),
        ("The server that adds", 'r", None', 'r", spent'),
        ("An epsilon is stated for", ", 10", ""),
        ("who takes part in which", ", in the same rounds", ""),
        ("every adversary with its own", ", in the same rounds", ""),
        ("with its own adjacency and", "is trusted: it ", ""),
        ("In ledgers from before", ' if book.header.get("threshold") == THRESHOLD else half', ""),
        ("protects against the server", 'server", "m', "m"),
    ],
    "privacy/trust/server_view.py": [
        ("Against them the epsilon", "draws + len(entries) - steps", "max(1, draws // 2)"),
        ("so sampling hides nobody", 'everyone", rate=1.0', 'poisson", rate=event.rate'),
        ("The server with c", "1 / (clients + 1", "2 / (clients + 2"),
        ("one leaves 3/2", "least(some + 1", "(1 + least(some + 1)"),
        ("and m Gaussians of", "replaced or ", ""),
        ("More than half of V", "5", "6"),
    ],
    "privacy/profile.py": [
        ("Every point is", "accountant.epsilon(events, a", "0.99 * accountant.epsilon(events, a"),
        ("The privacy profile", ", 0.3", ""),
        ("Without sampling it", "(1 + 1e-12)", "1.01"),
        ("smallest mu whose", "ax(fo", "in(fo"),
    ],
    "privacy/wording.py": [
        ("Every output names", "({found.adjacency}: {found.neighbours})", ""),
        ("Where a user is not", ' if unit.person else "a given user"', ""),
        ("in the summary, and in every", "{found.unit.name} ", "user "),
    ],
    "federated/cohort.py": [
        ("A user with empty data", "        finite &= self.with_data[users].to(finite.device)\n", ""),
        ("the mean `loss`", ', "b', '.clamp(max=1), "b'),
        ("It never holds", "t: Tensor | None = None\n    ) -> Tally:",
         "t: Tensor | None = None\n    ) -> Tally:\n        self.__dict__.setdefault('kept', []).append(into.clone())"),
    ],
    "runs/checkpoint.py": [
        ("the checkpoint holds", ": state.noise", ": {name: 0 * held for name, held in state.noise.items()}"),
    ],
    "commands/printing.py": [
        ("`confide train` warns", "is not below 1/population", ""),
    ],
    "runs/stated.py": [
        ("That the last lines", "book.count < saved.ledger_count", "False"),
        ("Every output names", '        "adjacency": found.adjacency,\n', ""),
        ("and in a published folder by", "head != book.head", "False"),
        ("`confide guarantee`, `confide ledger` and", "!= b", "== b"),
        ("If the summary says", 'f"{folder / S', '] and [f"{folder / S'),
    ],
    "runs/publish.py": [
        ("A run that stopped early is", 'found.steps == recipe.run.steps or "stopped_by_budget" in summary', "True"),
        ("They are published only", " if with_test_metrics else {}", ""),
        ("the recipe without paths", "r_others(found.recipe)", "und.recipe"),
        ("writes a new folder with only", "{key: own[key] for key in _KEPT if key in own}", "dict(own)"),
        ("The file must not leave", "folder.MODEL).",
         "SECRET).write_bytes((run / SECRET).read_bytes())\n        (new / folder.MODEL)."),
        ("What somebody puts", "[{name: line[name] for name in names} for line in lines]", "lines"),
        ("the figures with noise, if", "RELEASED:", "} and {RELEASED:"),
        ("its first line says so", 'copy["last_hash_of_the_original"] = found.book.head', "pass"),
        ("(not where the digests", 'own.get("inputs_keyed") or not own.get("inputs")', "True"),
        ("It refuses seeded noise", "not found.noise.for_relea", "Fal"),
        ("a run without a guarantee or", "found.epsilon is Non", "Fals"),
        ("a model that is not", "not sam", "Fals"),
        ("A task without test", "not (found.folder / items.FILE).exists()", "False"),
        ("the statement, made from the copy", "promised.model_dump_", "found.promised.model_dump_"),
        ("how many there were is part", "not entries[0].event.whole_run", "False"),
        ("The copy tells only how many", " = sorted(tries) + [max(tries)] * (len(entries) - len(tries))",
         ", entries = sorted(tries), entries[: len(tries)]"),
        ("so the copy has a chain", "copy}", '{"copy": True}}'),
        ("a model card", "words or ", ""),
        ("Everything is written from a list", "[{name: line[name] for name in names} for line in lines]", "lines"),
        ("or not finished", "y is None:",
         'y is None and (summary := {"steps": stated(run).steps, "recipe": recipe.digest, "metrics": {}}) is None:'),
        ("a ledger that does not verify", "not whole or differences(run, found)", "False"),
        ("and a folder that is not empty", "out.is_dir() and any(out.iterdir())", "False"),
        ("only paths of this machine", "len(wrong) >= _LEAST and wrong in text", "False"),
    ],
    "runs/card.py": [
        ("the card says that", "does not cover the people of the test data", ""),
    ],
    "runs/notes.py": [
        ("the final model, written anew", 'adjacency", "', ""),
    ],
    "runs/shared_recipe.py": [
        ("the recipe without paths", 'value.startswith(("/", "~", "."))', "False"),
    ],
    "runs/folder.py": [
        ("`confide resume` refuses", '"published" in book.header', "False"),
        ("A checkpoint is written after", " if repeats else 1", ""),
        ("A kill makes at most", " if repeats else 1", ""),
        ("The step that would pass", "break", "raise"),
        ("A resume over changed data", "    fingerprint.check(folder, book.header, header)\n", ""),
        ("have digests of the users'", "    fingerprint.check(folder, book.header, header)\n", ""),
        ("The built-in tasks can", "    fingerprint.check(folder, book.header, header)\n", ""),
        ("A task of your own can if", "    fingerprint.check(folder, book.header, header)\n", ""),
    ],
    "runs/fingerprint.py": [
        ("the digests are keyed by 32", ", mode=0o600", ""),
        ("Without it the run", "begun:", "False:"),
        ("Runs from before there was", 'b""', "new_secret()"),
        ("A run from before that is checked", "before)", "after)"),
    ],
    "files.py": [
        ("the digests are keyed by 32", "32", "16"),
        ("Therefore the digests are keyed", "not key", "True"),
    ],
    "build.py": [
        ("The unit is in the ledger's", '        "unit": unit.model_dump(),\n', ""),
        ("Therefore the digests are keyed", "seal(dict(task.fingerprint) | code_digests(recipe), key",
         "dict(task.fingerprint) | code_digests(recipe"),
    ],
    "deploy/client.py": [
        ("says so in its guarantee. So", ', from a model made elsewhere" if self.begins_elsewhere else "', ""),
        ("The server learns only the sum of masked integers$", " + session.mask(ring)", ""),
    ],
    "deploy/judge.py": [
        ("which counts against the server", " * math.sqrt(HONEST)", ""),
        ("that is what the client's own", " * math.sqrt(HONEST)", ""),
        ("Without a roster it can", 'recipe.privacy.trust == "distributed" and not roster.signed', "False"),
    ],
    "deploy/masked.py": [
        ("In a deployment the server tops", "deviation > 0", "False"),
        ("the noise must not tell", "lattice=grid(stated)", ""),
        ("because at least t shares", "threshold(cohort, self.terms.needed(cohort)) if cohort else 0", "1"),
        ("no sum of fewer than", "len(users) < self.least", "False"),
    ],
    "privacy/trust/secure.py": [
        ("more than two thirds of its", "2 * size // 3", "size // 2"),
        ("whatever the server says", '        self._enough(agree_ | {self.user}, "have signed the same list")\n', ""),
        ("With a roster of", " or not self.roster.verify(user, signature, message)", ""),
    ],
    "privacy/trust/neighbours.py": [
        ("while less than a third", "2 * size // 3", "size // 2"),
    ],
    "privacy/trust/secure_sum.py": [
        ("Bounding leaves room", "2, 2 *", "8, 2 *"),
        ("which is exact", "t6", "t32).astype(np.float6"),
    ],
    "federated/bounding.py": [
        ("Every user's update is", "s).expand_as(norms) * ROUNDING", "s).expand_as(norms) * 1.00001"),
        ("There is one counter", "0.5)", "1.0)"),
    ],
    "federated/bounds.py": [
        ("Each step also releases, with", "-s", "s"),
    ],
    "federated/measures.py": [
        ("What is beyond the bound", ", max=bound", ""),
        ("One user adds value", " - 0.5", ""),
        ("Update, counts of", " - 0.5", ""),
    ],
    "runs/audit.py": [
        ("A lower bound above", "self.lower_bound <= self.claimed and not self.follows_cohort", "True"),
        ("Too few canaries", "r one_run.b", "r 0 * one_run.b"),
        ("A claim that 100,000", "needed is Non", "Fals"),
        ("For each of up to", "1000", "2000"),
        ("It is used where", "recipe.bounding.adaptive is Non", "Tru"),
        ("Where the claim rests on secret", " Noise.is_checked(loop) and", ""),
        ("the command measures in", ', "cohort-variance"', ""),
    ],
    "privacy/one_run.py": [
        ("It takes the best of", "e=Tru", "e=Fals"),
        ("turns the number of right", "1 / (", "0.9 / ("),
        ("The last is the sharpest", "  cu", "  epsilon *= 2\n        cu"),
    ],
    "privacy/noise_check.py": [
        ("an exact test asks", ", _DRAWS)", " + 1, _DRAWS) / 2"),
        ("the command prints its", "0.001", "1e-9"),
    ],
    "runs/canaries.py": [
        ("they share no", "+ d", "// 2 + d"),
    ],
    "runs/broken.py": [
        ("break the mechanism on purpose", "self.share()", "1.0"),
        ("`--break no-noise`", '"unbounded": "updates that are not bounded",\n', ""),
    ],
    "commands/audit.py": [
        ("`--no-power` leaves", "power and ", ""),
        ("the command prints its", "(p-value {found.cohort_chance:.4g})", ""),
    ],
    "commands/budget.py": [
        ("A filter promises no", "{percent(so_far['used'])} of it", "epsilon {so_far['used'] * head['epsilon']}"),
        ("It counts against whoever", ", and not against the server of distributed trust", ""),
    ],
    "privacy/advice.py": [
        ("`confide plan mechanism` says", "least if least.rms < (1 - WORTH) * plain.rms else ", ""),
        ("Which noise is the least", "least if least.rms < (1 - WORTH) * plain.rms else ", ""),
    ],
}
# fmt: on


def listed() -> list[tuple[str, str]]:
    """Sentences and their tests."""
    return ROW.findall((ROOT / "docs" / "guarantee-checks.md").read_text())


def tests_of(sentence: str) -> list[str]:
    whole = sentence.removesuffix("$")
    return [test for said, test in listed() if said == whole or (whole == sentence and said.startswith(whole))]


def run_test(tree: Path, test: str, log: Path) -> None:
    """One test in this process, which was forked before anything of the package was imported."""
    to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(to, 1)
    os.dup2(to, 2)
    os.chdir(tree)
    sys.path.insert(0, str(tree / "src"))
    os.environ["PYTHONPATH"] = str(tree / "src")
    import pytest

    os._exit(int(pytest.main(["-x", "-p", "no:cacheprovider", "--rootdir", str(tree), str(tree / test)])))


def fails(tree: Path, test: str) -> bool:
    process = get_context("fork").Process(target=run_test, args=(tree, test, tree / "log.txt"))
    process.start()
    process.join(SECONDS)
    if process.exitcode not in (0, 1):  # killed by its time limit, or no test was run at all
        process.kill()
        print(f"{test} ended with {process.exitcode}; {tree / 'log.txt'} says why", file=sys.stderr)
    return process.exitcode == 1


def edits(tree: Path, only: str) -> Iterator[tuple[str, list[str]]]:
    """Make each edit, hand over its sentence and tests, and take the edit back."""
    stamp = 1_600_000_000  # a time of its own for each edit, or Python would take what it compiled before
    for name, entries in MUTATIONS.items():
        place = tree / "src" / "confide" / name
        text = place.read_text()
        for sentence, old, new in entries:
            tests = tests_of(sentence)
            if not sentence.startswith(only):
                continue
            if text.count(old) != 1 or not tests:
                print(f"no longer fits: {name}, {sentence!r}, {old!r}")
                continue
            stamp += 10
            place.write_text(text.replace(old, new))
            os.utime(place, (stamp, stamp))
            yield sentence, tests
        place.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="how the sentences begin")
    only = parser.parse_args().only
    for name in SHARED:
        importlib.import_module(name)
    proved, survived = set[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for part in ("src", "tests", "docs", "benchmarks"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "mkdocs.yml"):
            shutil.copy(ROOT / file, tree)
        for sentence, tests in edits(tree, only):
            killed = [test for test in dict.fromkeys(tests) if fails(tree, test)]
            proved |= set(killed)
            survived += not killed
            print(f"{'found' if killed else 'SURVIVED'}: {sentence} ({', '.join(killed or tests)})", flush=True)
    rest = [said for said, test in listed() if test not in proved and said.startswith(only)]
    print(f"{survived} survived; no edit was found by the tests of {len(rest)} sentences: {'; '.join(rest)}")
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
