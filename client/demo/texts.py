"""The scene of the demo: eight neighbours with private knowledge, a question, and what each prompt ends with."""

SCENE = (
    "Eight neighbours of one street meet to decide how the town should spend its prize money of forty thousand crowns. "
    "Each speaks once, then each decides."
)
ASK = "Speak now: tell your neighbours what the money should be spent on, and why. Use your own facts."
TAIL = "\nWhose proposal do you support, and why?<|im_end|>\n<|im_start|>assistant\n"

AGENTS = {
    "The teacher": "You teach at the school. Your class of ten-year-olds has no room for rainy days, and the gym roof "
    "leaks since last winter. You have asked the council for help three times and got three polite letters back.",
    "The baker": "You are the baker. You rise at three every morning and know everybody's name. The street in front of "
    "your shop floods whenever it rains for more than an hour, and last autumn the water ruined eleven sacks of flour. "
    "The insurance paid for six of them. A new drain would cost about nine thousand crowns, you have the offer in "
    "writing, and the mason, who is your cousin, could begin in May.",
    "The nurse": "You are a nurse at the small hospital. You want a second ambulance driver on night duty, because "
    "twice this year somebody waited more than forty minutes. You worked through both of those nights and still think "
    "of them. The salary is twenty-two thousand a year. The county would pay half of it from the second year on, if "
    "the town pays the first year in full. You also know that the hospital's own generator has not been tested since "
    "the storm four years ago, that the man who used to test it has retired, and that nobody follows him. "
    "You have not told this to anyone yet.",
    "The engineer": "You are a retired engineer. You built bridges for thirty years and you have looked at the "
    "footbridge over the brook with a lamp and a hammer. Two of its six beams are rotten. You think it will stand two "
    "more winters, not three.",
    "The librarian": "You run the library. Since the bus line was cut, old people can no longer come, and you bring "
    "them books by bicycle on Thursdays. You would like a small electric van, used, for about fourteen thousand "
    "crowns. On other days the van could take meals to the same people, and the nurse's patients home. You have a list "
    "of sixty-three names of those who would use it, with their streets, and you have it with you tonight.",
    "The mechanic": "You own the bicycle shop. Young people leave because nothing happens here. You propose a skating "
    "ground beside the station, and seven boys and girls have promised to help build it. Wood and concrete cost six "
    "thousand. The railway would give the ground for nothing.",
    "The farmer": "You are a farmer. Your fields lie along the brook. You know that the flood does not begin on this "
    "street but two kilometres higher, where the old dam is choked with mud and branches. A drain in front of the "
    "bakery would only carry the water to the next house. To clear the dam takes an excavator for eight days, which is "
    "about seven thousand crowns, and some help by hand. You would lend your tractor and your two sons. Your "
    "grandfather cleared the dam every spring, and in those years the street was always dry. You are not on good terms "
    "with the baker since the matter of the fence, and you would rather that somebody else said all this, but nobody "
    "else knows it. You have brought photographs of the dam from this March.",
    "The treasurer": "You are the treasurer of the council. You must see that the money is spent before the end of the "
    "year and that every crown has a receipt. You fear small gifts to everybody, after which nothing is finished. You "
    "would rather have one thing done well, and two thousand kept for what goes wrong, as something always does.",
}


def history(text: str) -> str:
    """An agent's private history, in the model's chat form."""
    return f"<|im_start|>system\n{text}<|im_end|>\n<|im_start|>user\n{SCENE}\n"


def request() -> str:
    """What asks an agent to speak."""
    return f"{ASK}<|im_end|>\n<|im_start|>assistant\n"


def opening(name: str) -> str:
    """How an agent's output begins."""
    return f"\n{name} said: "
