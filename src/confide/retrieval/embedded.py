"""A small corpus that needs nothing: a help desk for household devices, made from a grammar.

Serves CAR, section 3.2, where no file is at hand. A document explains one task on one device; a query asks for it in
other words, with synonyms that the document does not use, so that retrieval is more than matching words. Beyond the
number of pairs of a device and a task, documents are told apart by the device's series as well. Queries come with the
name of the household that asks, for the split by column. The same settings always give the same corpus.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from confide.errors import UserError
from confide.randomness import generator
from confide.retrieval.data import Document, RetrievalCorpus, Row, SplitSettings, assemble

# The document's word first, then what people call it.
DEVICES: tuple[tuple[str, ...], ...] = (
    ("thermostat", "heating control", "thing that sets the temperature"),
    ("dishwasher", "dish machine", "machine for the plates"),
    ("washing machine", "washer", "laundry machine"),
    ("tumble dryer", "dryer", "machine that dries clothes"),
    ("refrigerator", "fridge", "cooler in the kitchen"),
    ("oven", "cooker", "baking thing"),
    ("microwave", "food heater", "little oven that beeps"),
    ("coffee machine", "espresso maker", "coffee maker"),
    ("vacuum cleaner", "hoover", "floor sucker"),
    ("router", "wifi box", "internet box"),
    ("printer", "printing machine", "thing that prints"),
    ("television", "telly", "big screen in the living room"),
    ("loudspeaker", "speaker", "music box"),
    ("doorbell", "bell at the door", "front door chime"),
    ("smoke detector", "fire alarm", "smoke sensor"),
    ("garage door", "gate of the garage", "car port door"),
    ("lawn mower", "grass cutter", "mowing robot"),
    ("water boiler", "hot water tank", "boiler"),
    ("air conditioner", "cooling unit", "AC"),
    ("ceiling fan", "ventilator", "fan above the bed"),
    ("electric kettle", "kettle", "water heater for tea"),
    ("toaster", "bread grill", "thing for toast"),
    ("blender", "mixer", "smoothie machine"),
    ("shower pump", "pump in the bathroom", "pressure pump"),
    ("window blind", "shutter", "roller in front of the window"),
)

# A title, what the document says to do, and how people put the same wish.
TASKS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Resetting the {d}", "Hold the round button of the {d} for ten seconds until the light blinks twice.",
     ("how do I bring my {q} back to factory state", "start over with the {q}", "my {q} is stuck")),
    ("Cleaning the {d}", "Unplug the {d}, wipe it with a damp cloth and leave the flap open until it is dry.",
     ("my {q} is dirty", "what do I wash the {q} with", "there is grime all over the {q}")),
    ("Replacing the filter of the {d}", "Slide the cover of the {d} to the left and change the grey cartridge.",
     ("where does the new cartridge go in the {q}", "the sieve of my {q} is clogged", "swap the mesh in the {q}")),
    ("Lowering the noise of the {d}", "Stand the {d} on the rubber feet and tighten the four screws below it.",
     ("my {q} is far too loud", "the {q} rattles all night", "can the {q} be made quieter")),
    ("Warranty of the {d}", "The {d} is covered for three years from the day of purchase; keep the receipt.",
     ("who pays if my {q} breaks", "is the repair of the {q} free", "my two year old {q} died")),
    ("Locking the {d} for children", "Press the two outer buttons of the {d} together; a key appears on the display.",
     ("my toddler keeps playing with the {q}", "how to keep kids off the {q}", "make the {q} safe for a baby")),
    ("Setting the clock of the {d}", "Turn the wheel of the {d} to the hour, press it, then turn to the minute.",
     ("the time on my {q} is wrong", "daylight saving and the {q}", "the {q} shows midnight at noon")),
    ("Saving energy with the {d}", "Choose the leaf programme of the {d}; it takes longer and needs half the current.",
     ("the {q} makes my bill explode", "use less electricity with the {q}", "is there an eco setting on the {q}")),
    ("Connecting the {d} to a phone", "Open the app, choose add, and hold the phone near the {d} until both beep.",
     ("steer the {q} from my mobile", "pair my handset with the {q}", "the app cannot find my {q}")),
    ("Error code E4 on the {d}", "E4: the {d} gets no water. Open the valve and straighten the hose.",
     ("what does E4 mean on the {q}", "my {q} stops and shows a letter and a four", "strange code on the {q}")),
    ("A leak under the {d}", "Close the tap, tip the {d} forward and press the seal back into its groove.",
     ("there is a puddle beneath my {q}", "water drips out of the {q}", "the {q} is wet underneath")),
    ("Ordering spare parts for the {d}", "The number of each part is on the inner side of the door of the {d}.",
     ("where can I buy a knob for the {q}", "I lost a piece of my {q}", "get a replacement part for the {q}")),
    ("Moving house with the {d}", "Empty the {d}, fix the drum with the red bolts and keep it upright in the van.",
     ("transport the {q} to a new flat", "can the {q} lie on its side", "we relocate with the {q}")),
    ("Updating the software of the {d}", "Leave the {d} on over night; it fetches the new version by itself.",
     ("install the latest firmware on my {q}", "my {q} says a new release is out", "new features for the {q}")),
    ("A burning smell from the {d}", "Pull the plug of the {d} at once, open a window and call the service.",
     ("it stinks of scorched plastic near the {q}", "smoke comes out of my {q}", "the {q} gets hot and smells odd")),
    ("Disposing of the {d}", "Take the {d} to the recycling yard; the shop takes it back if you buy another one.",
     ("how do I get rid of my old {q}", "can I throw the {q} in the bin", "scrap the {q}")),
    ("Using the {d} while away", "Set the {d} to the suitcase symbol; it wakes up on the day you come back.",
     ("I go on holiday, what about the {q}", "nobody is home and the {q} runs", "the {q} alone for long")),
    ("Language of the {d}", "Press menu on the {d} three times and choose the flag.",
     ("my {q} talks to me in Finnish", "switch the {q} to English", "I cannot read the words on the {q}")),
    ("First start of the {d}", "Remove the blue tape, level the {d} and let it run empty once.",
     ("I just unpacked a new {q}", "set up my {q} for the first time", "what to do before I use the {q}")),
    ("Sharing the {d} with guests", "Give guests the four digits on the back of the {d}; they work for a day.",
     ("can visitors use my {q}", "let a friend operate the {q}", "a code so that others may use the {q}")),
)  # fmt: skip

SERIES = (
    "Aster", "Birch", "Cedar", "Dahlia", "Elm", "Fern", "Gorse", "Hazel", "Iris", "Juniper",
    "Kelp", "Larch", "Maple", "Nettle", "Oak", "Poppy", "Quince", "Rowan", "Sorrel", "Thyme",
)  # fmt: skip

_OPENINGS = ("", "hello, ", "please help: ", "quick question, ", "hi there, ", "sorry to bother you, ", "urgent: ")
_CLOSINGS = ("", "?", ", any idea?", ", what now?", ", thanks", " - please advise", ", can you help?")


class EmbeddedSettings(SplitSettings):
    """A made-up help desk: needs no files."""

    kind: Literal["embedded"] = "embedded"
    documents: int = Field(
        100, ge=2, le=len(DEVICES) * len(TASKS) * len(SERIES), description="documents; up to 500 without series names"
    )
    queries_per_document: int = Field(10, ge=2, le=100, description="different ones")
    households: int = Field(20, ge=1, description="clients of the split by column")
    corpus_seed: int = Field(0, ge=0, lt=2**63, description="which devices, tasks and words are drawn")

    def read(self, seed: int) -> RetrievalCorpus:
        draw = generator(self.corpus_seed, "embedded corpus")
        pairs = len(DEVICES) * len(TASKS)
        with_series = self.documents > pairs
        chosen = draw.permutation(pairs * (len(SERIES) if with_series else 1))[: self.documents]
        documents, rows = [], []
        for number in chosen.tolist():
            pair, series = number % pairs, SERIES[number // pairs] if with_series else ""
            names, task = DEVICES[pair // len(TASKS)], TASKS[pair % len(TASKS)]
            title, body, _ = task
            named = f"{series} {names[0]}".strip()
            identity = f"{title.format(d=named)}"
            documents.append(Document(identity, f"{identity}. {body.format(d=named)}"))
            for text in _queries(names, task, series, self.queries_per_document, draw):
                rows.append(Row(text, identity, f"household-{int(draw.integers(self.households)):03}"))
        return assemble("embedded", self, seed, rows, documents)


def _queries(
    names: tuple[str, ...], task: tuple[str, str, tuple[str, ...]], series: str, count: int, draw: np.random.Generator
) -> list[str]:
    """Different ways to ask for the same thing."""
    forms = [(wish, name, o, c) for wish in task[2] for name in names for o in _OPENINGS for c in _CLOSINGS]
    if count > len(forms):
        raise UserError(f"queries_per_document={count}; the grammar has {len(forms)} ways to ask: lower it")
    picked = [forms[i] for i in draw.permutation(len(forms))[:count]]
    return [f"{o}{wish.format(q=f'{series} {name}'.strip())}{c}" for wish, name, o, c in picked]
