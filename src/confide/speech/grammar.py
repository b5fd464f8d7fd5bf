"""Sentences for the embedded corpus: connected digits and short commands in English, French and German.

Words only, in lower case and spelt as the token sets have them, so that an utterance's text is what is said.
A command is a template whose slots, in braces, are filled from the lists of the language.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np

from confide.speech.corpus import Language

T = TypeVar("T")
Sentences = Literal["digits", "commands", "both"]

DIGITS: dict[Language, tuple[str, ...]] = {
    "en": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "fr": ("zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf"),
    "de": ("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"),
}

TEMPLATES: dict[Language, tuple[str, ...]] = {
    "en": (
        "turn {switch} the {device}", "turn {switch} the {device} in the {room}", "set the {device} to {digit}",
        "set a timer for {digit} {unit}", "wake me up in {digit} {unit}", "call {name}", "send a message to {name}",
        "play {music}", "go to the {room}", "what's the weather {day}", "stop the music", "open the door",
    ),
    "fr": (
        "allume {device}", "éteins {device}", "allume {device} dans {room}", "éteins {device} dans {room}",
        "règle {device} sur {digit}", "réveille-moi dans {digit} {unit}", "appelle {name}",
        "envoie un message à {name}", "joue {music}", "va dans {room}", "quel temps fait-il {day}",
        "arrête la musique", "ouvre la porte",
    ),
    "de": (
        "schalte {device} {switch}", "schalte {device} {room} {switch}", "stelle {device} auf {digit}",
        "wecke mich in {digit} {unit}", "rufe {name} an", "schicke {name} eine nachricht", "spiele {music}",
        "wie wird das wetter {day}", "beende die musik", "öffne die tür",
    ),
}  # fmt: skip

SLOTS: dict[Language, dict[str, tuple[str, ...]]] = {
    "en": {
        "switch": ("on", "off"),
        "device": ("light", "lamp", "heating", "radio", "television", "fan"),
        "room": ("kitchen", "bedroom", "living room", "garden", "office"),
        "digit": DIGITS["en"][2:],
        "unit": ("minutes", "hours"),
        "name": ("anna", "peter", "maria", "john", "sarah"),
        "music": ("the next song", "the last song", "some music", "the news"),
        "day": ("today", "tomorrow", "on monday", "on friday"),
    },
    "fr": {
        "device": ("la lumière", "la lampe", "le chauffage", "la radio", "la télévision"),
        "room": ("la cuisine", "la chambre", "le salon", "le jardin", "le bureau"),
        "digit": DIGITS["fr"][2:],
        "unit": ("minutes", "heures"),
        "name": ("anne", "pierre", "marie", "jean", "sophie"),
        "music": ("la prochaine chanson", "la dernière chanson", "de la musique", "les nouvelles"),
        "day": ("aujourd'hui", "demain", "lundi", "vendredi"),
    },
    "de": {
        "switch": ("an", "aus"),
        "device": ("das licht", "die lampe", "die heizung", "das radio", "den fernseher"),
        "room": ("in der küche", "im schlafzimmer", "im wohnzimmer", "im garten", "im büro"),
        "digit": DIGITS["de"][2:],
        "unit": ("minuten", "stunden"),
        "name": ("anna", "peter", "maria", "hans", "sabine"),
        "music": ("das nächste lied", "das letzte lied", "etwas musik", "die nachrichten"),
        "day": ("heute", "morgen", "am montag", "am freitag"),
    },
}


def make_sentence(language: Language, kind: Sentences, digits: tuple[int, int], draw: np.random.Generator) -> str:
    """Draw a sentence. `digits` gives the fewest and the most of a sentence of digits; "both" tosses a fair coin."""
    # Only `random` is called: of numpy's methods it is the one least likely to change its numbers.
    if kind == "digits" or (kind == "both" and draw.random() < 0.5):
        count = digits[0] + int(draw.random() * (digits[1] - digits[0] + 1))
        return " ".join(choose(DIGITS[language], draw) for _ in range(count))
    slots = SLOTS[language]
    return re.sub(r"\{(\w+)\}", lambda slot: choose(slots[slot[1]], draw), choose(TEMPLATES[language], draw))


def choose(options: Sequence[T], draw: np.random.Generator) -> T:
    """Draw one of the options, each as likely."""
    return options[int(draw.random() * len(options))]
