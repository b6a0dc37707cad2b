"""The texts of the worlds: who takes part, what each knows, what is asked. Text only; equal in every run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvservice.client.demo import texts


@dataclass(frozen=True, slots=True)
class Scene:
    """One world as text. ``agents``: private history by name. ``blocks``: shared texts that a tool gave; without any,
    every agent speaks once and what it said is shared, up to ``output_tokens``.

    ``questions`` are put behind the shared run, ``verdicts`` to judges: their answer is an agent's name.
    """

    name: str
    setting: str
    agents: Mapping[str, str]
    ask: str
    output_tokens: int
    questions: Sequence[str]
    verdicts: Sequence[str] = ()
    blocks: Sequence[str] = ()

    def history(self, agent: str) -> str:
        """An agent's private history in the model's chat form."""
        return f"<|im_start|>system\n{self.agents[agent]}<|im_end|>\n<|im_start|>user\n{self.setting}\n"

    @property
    def request(self) -> str:
        """What asks an agent to speak."""
        return f"{self.ask}<|im_end|>\n<|im_start|>assistant\n"

    def verdict(self, question: str) -> str:
        """A judge's question, up to where the name of an agent must follow."""
        names = ", ".join(name.lower() for name in self.agents)
        return f"{tail(f'{question} Choose one of: {names}.')}My choice is the"


def tail(question: str) -> str:
    """What a prompt ends with."""
    return f"\n{question}<|im_end|>\n<|im_start|>assistant\n"


def opening(agent: str) -> str:
    """How an agent's output begins."""
    return f"\n{agent} said: "


_QUESTIONS: Final = (
    "Whose proposal do you support, and why?",
    "Sum up in two sentences what was said.",
    "What is the strongest argument against the last proposal?",
)
_VERDICTS: Final = (
    "Whose proposal is the most urgent?",
    "Whose proposal is the cheapest?",
    "Whose proposal helps the most people?",
    "Who gave the weakest reasons?",
    "Who knows the most about the matter?",
    "Whose proposal should be done last?",
)

STREET: Final = Scene(
    "street", texts.SCENE, texts.AGENTS, texts.ASK, output_tokens=105, questions=_QUESTIONS, verdicts=_VERDICTS
)

TRIO: Final = Scene(
    "trio",
    "Three officers of a small freighter with a broken rudder talk about what to do before the storm comes.",
    {
        "The captain": "You are the captain. The owner wants the freight in port by Friday and has called twice.",
        "The doctor": "You are the ship's doctor. One sailor has a fever that you cannot treat on board.",
        "The mechanic": "You are the mechanic. You can mend the rudder in nine hours if the sea stays calm.",
    },
    "Speak now: say what the ship should do, step by step, and what speaks against the other ways.",
    output_tokens=200,
    questions=_QUESTIONS,
    verdicts=_VERDICTS,
)

ASSEMBLY: Final = Scene(
    "assembly",
    "Ten people who share a house decide what to repair first. Each says one thing.",
    {
        "The painter": "You paint. Damp comes through the north wall of your room.",
        "The student": "You study. The heating in the attic fails whenever it freezes.",
        "The widow": "You are seventy-eight. The lift has stood still for six weeks.",
        "The driver": "You drive a bus. The yard gate jams and you leave at four in the morning.",
        "The cook": "You cook for a school. The kitchen drain of the house smells.",
        "The lawyer": "You know contracts. The landlord must pay for the roof, but not for the cellar.",
        "The gardener": "You keep the garden. The big ash is rotten and leans towards the roof.",
        "The singer": "You sing at night and sleep by day. The stairs creak and the doors slam.",
        "The clerk": "You keep the house's books. There are four thousand crowns left, not more.",
        "The guard": "You work as a guard. The lock of the front door can be opened with a card.",
    },
    "Say in two sentences what must be repaired first.",
    output_tokens=60,
    questions=_QUESTIONS,
    verdicts=_VERDICTS,
)

_TRADES: Final = ("wool", "salt", "copper", "timber", "grain", "tar", "linen", "glass", "hides", "wine", "lamp oil")
_TOWNS: Final = ("Norwick", "Halden", "Ostrava", "Brill", "Lindau", "Marstal", "Tonder", "Visby", "Kolding")
_EVENTS: Final = (
    "arrived two days late because of fog",
    "was weighed twice and found short by a tenth",
    "was paid in advance and never collected",
    "was sold at the quay to a buyer who gave no name",
    "was insured for less than half of what it cost",
    "spoiled under a leaking hatch, which nobody reported",
    "went on by river, although the contract said by road",
)


def _ledger(role: str, seed: int, entries: int) -> str:
    """A long private history: what one clerk wrote down, entry by entry."""
    lines = [f"You are {role}. Your own notes of the year, which nobody else has read:"]
    for number in range(entries):
        turn = seed * 13 + number * (3 + seed)
        lines.append(
            f"Entry {number + 1}: {12 + turn % 61} loads of {_TRADES[turn % 11]} from {_TOWNS[turn % 9]} "
            f"for {300 + turn * 17 % 900} crowns; it {_EVENTS[(turn // 2) % 7]}."
        )
    lines.append("You have compared these notes with the books of the harbour, and they do not agree.")
    return "\n".join(lines)


ARCHIVE: Final = Scene(
    "archive",
    "Four clerks of a trading house meet to find out where the money of the year went.",
    {
        "The broker": _ledger("the broker", 1, 26),
        "The captain": _ledger("the captain", 2, 22),
        "The inspector": _ledger("the inspector", 3, 24),
        "The notary": _ledger("the notary", 4, 18),
    },
    "Speak now: say which of your entries matter most, and whom you suspect.",
    output_tokens=110,
    questions=(
        "Whose account do you believe, and why?",
        "Sum up in two sentences what was said.",
        "Which goods were mentioned?",
    ),
    verdicts=("Who is most to blame?", "Whose account is the most exact?", "Who should be asked first?"),
)

_STATES: Final = ("open", "closed", "waiting for parts", "escalated", "refunded", "under review", "sent back")
_WARES: Final = (
    "pump",
    "lamp",
    "router",
    "kettle",
    "drill",
    "heater",
    "scale",
    "printer",
    "fan",
    "radio",
    "saw",
    "clock",
)


def _record(number: int) -> str:
    """A short shared text: what a search returned."""
    turn = number * 29 + 7
    return (
        f"\nTicket {4100 + turn % 877}: {_WARES[number % 12]} bought in {_TOWNS[turn % 9]} for {20 + turn % 180} "
        f"crowns, state: {_STATES[turn % 7]}. The customer says that it {_EVENTS[turn % 5]}."
    )


DESK: Final = Scene(
    "desk",
    "Five people of a help desk look at the same search results.",
    {
        "The operator": "You answer the telephone. You promise nothing, and you write everything down at once. Today "
        "eleven people have called about heaters, and you have told each of them to wait until Monday.",
        "The technician": "You repair what comes back. You know that the pumps of the last two years have a seal that "
        "breaks when it freezes, that the drills are good, and that nobody has ever tested the scales. You have four "
        "hours a day for repairs, and a shelf of thirty-one things that wait. The oldest is a printer from March.",
        "The manager": "You lead the desk. You may refund up to two hundred crowns a ticket without asking.",
        "The auditor": "You check the books. You have found three refunds that were paid twice, all of them in "
        "Halden, and you want to know whether there are more. You suspect nobody yet. You have asked the bank for "
        "the statements of the last two quarters and you expect them within the week. Until then you only look, and "
        "ask short questions.",
        "The trainee": "You began on Monday. You want to learn which tickets are urgent.",
    },
    "Search for the tickets of this week.",
    output_tokens=0,
    questions=(
        "Which ticket should be handled first, and why?",
        "Which goods come back most often?",
        "Sum up in two sentences what the tickets say.",
    ),
    blocks=tuple(_record(number) for number in range(24)),
)

SCENES: Final = {scene.name: scene for scene in (STREET, TRIO, ASSEMBLY, ARCHIVE, DESK)}
