"""Everything the demo model ever reads, generated from a seed.

An :class:`Item` is one question with one exact answer. Its ``key`` is the canonical form of what is
asked; a hash of the key says for good whether the item is for training or held out, so the two sets
are disjoint by construction, whatever the seed. Commuted sums and shuffled lists share a key.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

HELD_OUT_ONE_IN = 20
TASKS = ("addition", "copy", "reverse", "sort", "question", "story")
MAX_ITEMS = 8


@dataclass(frozen=True)
class Item:
    """One prompt with its only right answer, and the key that assigns it to a split."""

    task: str
    prompt: str
    answer: str
    key: str

    @property
    def held_out(self) -> bool:
        """Whether this item belongs to the held-out set."""
        return is_held_out(self.key)


def is_held_out(key: str) -> bool:
    """Assign a canonical key to a split by a stable hash."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


# --- Tables ------------------------------------------------------------------------------------

WORDS = (
    "apple", "bag", "ball", "bear", "bell", "bird", "boat", "book", "box", "cake", "car", "cat",
    "chair", "clock", "cup", "dog", "door", "drum", "duck", "egg", "fan", "fish", "flag", "fork",
    "fox", "frog", "hat", "house", "jar", "key", "kite", "lamp", "leaf", "moon", "nest", "owl",
    "pen", "pig", "ring", "rose", "ship", "shoe", "sock", "star", "sun", "tree", "vase", "wolf",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
SHE = ("Mia", "Anna", "Lily", "Rosa", "Nora", "Zoe", "Ella", "Ruby", "Ida", "Kate")
HE = ("Tom", "Max", "Ben", "Leo", "Sam", "Finn", "Otto", "Jack", "Hugo", "Paul")
NAMES = (*SHE, *HE)
ROOMS = (
    "kitchen",
    "garden",
    "park",
    "school",
    "shop",
    "library",
    "barn",
    "tower",
    "office",
    "hall",
)

OPPOSITES = {
    "big": "small", "hot": "cold", "up": "down", "day": "night", "fast": "slow", "happy": "sad",
    "open": "closed", "wet": "dry", "old": "young", "light": "dark", "full": "empty",
    "hard": "soft", "high": "low", "early": "late", "left": "right", "rich": "poor",
    "strong": "weak", "loud": "quiet", "clean": "dirty", "near": "far", "good": "bad",
    "black": "white", "long": "short", "sweet": "sour",
}  # fmt: skip
COLOURS = {
    "grass": "green", "the sky": "blue", "snow": "white", "the sun": "yellow", "coal": "black",
    "blood": "red", "a carrot": "orange", "a banana": "yellow", "a plum": "purple",
    "chocolate": "brown", "a lemon": "yellow", "milk": "white", "a frog": "green", "a rose": "red",
    "the sea": "blue", "a crow": "black", "an elephant": "grey", "a flamingo": "pink",
    "a tomato": "red", "a leaf": "green", "a pumpkin": "orange", "a bear": "brown",
}  # fmt: skip
SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink",
    "lion": "roar", "hen": "cluck", "frog": "ribbit", "bee": "buzz", "mouse": "squeak",
    "snake": "hiss", "horse": "neigh", "wolf": "howl", "crow": "caw", "bird": "tweet",
}  # fmt: skip
HOMES = {
    "bird": "nest", "bee": "hive", "fish": "sea", "bear": "cave", "cow": "barn", "fox": "den",
    "spider": "web", "frog": "pond", "camel": "desert", "monkey": "jungle", "horse": "stable",
    "king": "castle", "wolf": "forest", "penguin": "ice", "mole": "ground", "lion": "savanna",
}  # fmt: skip


@dataclass(frozen=True)
class Animal:
    """What a story says of its hero."""

    size: str
    walk: str
    food: str


@dataclass(frozen=True)
class Place:
    """What a story says of where it happens; ``plot`` picks the skeleton."""

    plot: int
    weather: str
    spot: str
    friend: str


@dataclass(frozen=True)
class Thing:
    """What a story says of the thing that is found."""

    colour: str
    use: str
    lesson: str


ANIMALS = {
    "fox": Animal("clever", "ran", "berries"),
    "bear": Animal("big", "walked", "honey"),
    "cat": Animal("quiet", "crept", "milk"),
    "dog": Animal("happy", "ran", "bread"),
    "frog": Animal("tiny", "hopped", "soup"),
    "mouse": Animal("little", "crept", "cheese"),
    "duck": Animal("funny", "waddled", "corn"),
    "horse": Animal("strong", "trotted", "apples"),
    "pig": Animal("round", "waddled", "pears"),
    "rabbit": Animal("fast", "hopped", "carrots"),
    "wolf": Animal("brave", "walked", "stew"),
    "goat": Animal("proud", "trotted", "grass"),
}
PLACES = {
    "forest": Place(0, "sunny", "under a tall tree", "bird"),
    "village": Place(1, "rainy", "behind an old door", "baker"),
    "valley": Place(2, "windy", "near a small river", "sheep"),
    "castle": Place(1, "cold", "on a dark stair", "king"),
    "garden": Place(0, "warm", "between the roses", "bee"),
    "desert": Place(2, "hot", "in the soft sand", "camel"),
    "harbour": Place(1, "foggy", "inside a wooden boat", "sailor"),
    "canyon": Place(2, "snowy", "on a grey rock", "eagle"),
    "meadow": Place(0, "bright", "in the long grass", "cow"),
    "jungle": Place(2, "stormy", "beside a fallen log", "parrot"),
}
THINGS = {
    "kite": Thing("red", "fly it high in the sky", "the wind is free"),
    "lamp": Thing("golden", "light the way home", "a small light is enough"),
    "drum": Thing("blue", "play a merry song", "music is for all"),
    "map": Thing("yellow", "find a hidden path", "every road leads home"),
    "key": Thing("silver", "open a secret gate", "patience opens doors"),
    "book": Thing("green", "read a long tale", "stories are treasure"),
    "bell": Thing("bright", "call the others", "friends will come"),
    "boat": Thing("white", "cross the deep water", "courage floats"),
    "ring": Thing("shiny", "make a good wish", "kindness is worth more"),
    "ball": Thing("pink", "play until night", "a game needs two"),
    "hat": Thing("purple", "look like a queen", "a smile looks better"),
    "seed": Thing("brown", "grow a great tree", "great things start small"),
}


# --- Stories -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Story:
    """Four free elements; the tables decide every other word."""

    name: str
    animal: str
    place: str
    thing: str

    @property
    def key(self) -> str:
        """The canonical form: a held-out story is held out in every use of it."""
        return f"story:{self.name}:{self.animal}:{self.place}:{self.thing}"

    @property
    def text(self) -> str:
        """The story itself, a pure function of its elements."""
        she = self.name in SHE
        animal, place, thing = ANIMALS[self.animal], PLACES[self.place], THINGS[self.thing]
        pronoun, her = ("She", "her") if she else ("He", "his")
        opening = (
            f"Once upon a time there was a {animal.size} {self.animal} named {self.name}. "
            f"{pronoun} lived in the {self.place}. "
        )
        found = f"{self.name} found a {thing.colour} {self.thing} {place.spot}. "
        plots = (
            (
                f"One {place.weather} day {found}{pronoun} {animal.walk} to {her} friend, the "
                f"{place.friend}. Together they used the {self.thing} to {thing.use}. "
                f"Then they shared some {animal.food}. "
            ),
            (
                f"It was a {place.weather} morning. {self.name} had lost {her} {animal.food}. "
                f"{pronoun} {animal.walk} all around, and at last {found}The {place.friend} said, "
                f'"You can use it to {thing.use}!" So they did. '
            ),
            (
                f"Every {place.weather} evening {pronoun.lower()} ate {animal.food} with the "
                f"{place.friend}. But one day {found}{pronoun} {animal.walk} home to "
                f"{thing.use}. The {place.friend} was very happy. "
            ),
        )
        return f"{opening}{plots[place.plot]}{self.name} learned that {thing.lesson}."


def draw_story(rng: random.Random) -> Story:
    """Draw the four elements."""
    return Story(
        rng.choice(NAMES),
        rng.choice(tuple(ANIMALS)),
        rng.choice(tuple(PLACES)),
        rng.choice(tuple(THINGS)),
    )


def story(rng: random.Random) -> Item:
    """Ask for a story about four given elements."""
    s = draw_story(rng)
    prompts = (
        f"Write a story about a {s.animal} named {s.name}, the {s.place} and a {s.thing}.",
        f"Tell me a story. Name: {s.name}. Animal: {s.animal}. Place: {s.place}. Thing: {s.thing}.",
        f"Please tell a story in which {s.name} the {s.animal} finds a {s.thing} in the {s.place}.",
    )
    return Item("story", rng.choice(prompts), s.text, s.key)


# --- Lists and numbers -------------------------------------------------------------------------


def draw_items(rng: random.Random, *, distinct: bool) -> list[str]:
    """Draw one to eight words, letters, or numbers below 100."""
    kind = rng.choices((WORDS, LETTERS, [str(n) for n in range(100)]), (5, 2, 3))[0]
    size = rng.randint(1, MAX_ITEMS)
    if distinct or rng.random() < 0.7:
        return rng.sample(kind, size)
    return rng.choices(kind, k=size)


def addition(rng: random.Random) -> Item:
    """Add two numbers of one to three digits."""
    a, b = (rng.randrange(10 ** rng.choices((1, 2, 3), (1, 2, 4))[0]) for _ in range(2))
    low, high = sorted((a, b))
    prompts = (f"What is {a} + {b}?", f"{a} + {b} =", f"Add {a} and {b}.")
    return Item("addition", rng.choice(prompts), str(a + b), f"addition:{low}+{high}")


def copy(rng: random.Random) -> Item:
    """Repeat a list."""
    items = " ".join(draw_items(rng, distinct=False))
    prompt = rng.choice(("Copy: ", "Repeat after me: ", "Say exactly this: ")) + items
    return Item("copy", prompt, items, f"copy:{items}")


def reverse(rng: random.Random) -> Item:
    """Say a list backwards."""
    items = draw_items(rng, distinct=False)
    prompt = rng.choice(("Reverse: ", "Say this backwards: ", "Write in reverse order: "))
    text = " ".join(items)
    return Item("reverse", prompt + text, " ".join(reversed(items)), f"reverse:{text}")


def sort(rng: random.Random) -> Item:
    """Sort words by the alphabet or numbers by size."""
    items = draw_items(rng, distinct=True)
    ordered = sorted(items, key=int) if items[0].isdigit() else sorted(items)
    prompt = rng.choice(("Sort: ", "Put in order: ", "Sort these from first to last: "))
    text = " ".join(ordered)
    return Item("sort", prompt + " ".join(items), text, f"sort:{text}")


# --- Questions ---------------------------------------------------------------------------------


def _fact(rng: random.Random, kind: str, table: dict[str, str], templates: tuple[str, ...]) -> Item:
    """Ask a fact; since facts cannot be guessed, the pair of fact and wording is the key."""
    subject = rng.choice(tuple(table))
    wording = rng.randrange(len(templates))
    prompt = templates[wording].format(subject)
    return Item("question", prompt, table[subject], f"{kind}:{subject}:{wording}")


def ask_opposite(rng: random.Random) -> Item:
    """Ask for a word's opposite, in either direction."""
    both_ways = OPPOSITES | {second: first for first, second in OPPOSITES.items()}
    wordings = (
        "What is the opposite of {}?",
        "Opposite of {}:",
        "Tell me the opposite of {}.",
        "Which word means the opposite of {}?",
        "If it is not {}, what is it?",
        "Give the opposite of the word {}.",
    )
    return _fact(rng, "opposite", both_ways, wordings)


def ask_colour(rng: random.Random) -> Item:
    """Ask for a thing's colour."""
    wordings = (
        "What colour is {}?",
        "Which colour is {}?",
        "What is the colour of {}?",
        "Tell me the colour of {}.",
        "Colour of {}:",
        "Name the colour of {}.",
    )
    return _fact(rng, "colour", COLOURS, wordings)


def ask_sound(rng: random.Random) -> Item:
    """Ask for an animal's sound."""
    wordings = (
        "What does a {} say?",
        "Which sound does a {} make?",
        "What sound does a {} make?",
        "Tell me the sound of a {}.",
        "Sound of a {}:",
        "How does a {} sound?",
    )
    return _fact(rng, "sound", SOUNDS, wordings)


def ask_home(rng: random.Random) -> Item:
    """Ask for an animal's home."""
    wordings = (
        "Where does a {} live?",
        "What is the home of a {}?",
        "Tell me the home of a {}.",
        "Home of a {}:",
        "Where is a {} at home?",
        "Name the place where a {} lives.",
    )
    return _fact(rng, "home", HOMES, wordings)


def ask_calendar(rng: random.Random) -> Item:
    """Ask which day or month comes before or after another."""
    unit, cycle = rng.choice((("day", DAYS), ("month", MONTHS)))
    step, relation = rng.choice(((1, "after"), (-1, "before")))
    table = {name: cycle[(i + step) % len(cycle)] for i, name in enumerate(cycle)}
    wordings = (
        f"Which {unit} comes {relation} {{}}?",
        f"What {unit} is {relation} {{}}?",
        f"Tell me the {unit} {relation} {{}}.",
        f"Name the {unit} that comes {relation} {{}}.",
        f"The {unit} {relation} {{}}:",
    )
    return _fact(rng, f"{unit}-{relation}", table, wordings)


def ask_neighbour(rng: random.Random) -> Item:
    """Ask which number comes before or after another."""
    number = rng.randrange(1, 999)
    step, relation = rng.choice(((1, "after"), (-1, "before")))
    wordings = (
        f"What number comes {relation} {number}?",
        f"Which number is {relation} {number}?",
    )
    key = f"neighbour:{number}:{relation}"
    return Item("question", rng.choice(wordings), str(number + step), key)


def ask_bigger(rng: random.Random) -> Item:
    """Ask which of two numbers is bigger or smaller."""
    a, b = rng.sample(range(10 ** rng.choice((1, 2, 3))), 2)
    word, pick = rng.choice((("bigger", max), ("smaller", min)))
    prompt = f"Which is {word}, {a} or {b}?"
    return Item("question", prompt, str(pick(a, b)), f"{word}:{min(a, b)}:{max(a, b)}")


def ask_count(rng: random.Random) -> Item:
    """Ask how many items a list has."""
    items = " ".join(draw_items(rng, distinct=True))
    prompt = rng.choice(("How many items are here: {}", "Count the items: {}")).format(items)
    return Item("question", prompt, str(len(items.split())), f"count:{items}")


def ask_position(rng: random.Random) -> Item:
    """Ask for the n-th item of a list."""
    items = draw_items(rng, distinct=True)
    index = rng.randrange(len(items))
    ordinal = "last" if index == len(items) - 1 and rng.random() < 0.5 else ORDINALS[index]
    text = " ".join(items)
    prompt = f"What is the {ordinal} item of: {text}"
    return Item("question", prompt, items[index], f"position:{index}:{text}")


def ask_where(rng: random.Random) -> Item:
    """Ask where one of several people is."""
    people = rng.sample(NAMES, rng.randint(1, 14))
    rooms = rng.choices(ROOMS, k=len(people))
    verbs = ("is in", "went to", "sits in")
    facts = " ".join(
        f"{p} {rng.choice(verbs)} the {r}." for p, r in zip(people, rooms, strict=True)
    )
    index = rng.randrange(len(people))
    prompt = f"{facts} Where is {people[index]}?"
    return Item("question", prompt, f"In the {rooms[index]}.", f"where:{prompt}")


def ask_story(rng: random.Random) -> Item:
    """Tell a story and ask about it; the story's own split decides."""
    s = draw_story(rng)
    thing, place = THINGS[s.thing], PLACES[s.place]
    question, answer = rng.choice(
        (
            (f"What animal was {s.name}?", f"A {s.animal}."),
            (f"Where did {s.name} live?", f"In the {s.place}."),
            (f"What did {s.name} find?", f"A {thing.colour} {s.thing}."),
            (f"What colour was the {s.thing}?", thing.colour.capitalize() + "."),
            (f"Who found the {s.thing}?", f"{s.name} the {s.animal}."),
            (f"What did {s.name} learn?", f"That {thing.lesson}."),
            (f"Where was the {s.thing}?", place.spot.capitalize() + "."),
        )
    )
    prompt = f"{s.text}\n{question}"
    return Item("question", prompt, answer, s.key)


QUESTIONS: tuple[Callable[[random.Random], Item], ...] = (
    ask_opposite,
    ask_colour,
    ask_sound,
    ask_home,
    ask_calendar,
    ask_neighbour,
    ask_bigger,
    ask_count,
    ask_position,
    ask_where,
    ask_story,
)
QUESTION_WEIGHTS = (2, 2, 1, 1, 2, 2, 3, 3, 3, 4, 3)


def question(rng: random.Random) -> Item:
    """Ask any of the simple questions."""
    return rng.choices(QUESTIONS, QUESTION_WEIGHTS)[0](rng)


GENERATORS: dict[str, Callable[[random.Random], Item]] = {
    "addition": addition,
    "copy": copy,
    "reverse": reverse,
    "sort": sort,
    "question": question,
    "story": story,
}
TASK_WEIGHTS = {"addition": 30, "copy": 8, "reverse": 14, "sort": 16, "question": 26, "story": 6}


# --- Training conversations --------------------------------------------------------------------

SMALL_TALK = (
    ("Hello!", "Hello! What can I do for you?"),
    ("Hi", "Hello! What can I do for you?"),
    ("Who are you?", ("I am a very small language model. I can add, copy, reverse, sort, answer "
     "simple questions and tell stories.")),
    ("What can you do?", ("I can add numbers up to 999, copy, reverse and sort up to 8 items, "
     "answer simple questions and tell stories.")),
    ("What is your name?", "My name is Demo."),
    ("Thank you!", "You are welcome!"),
    ("Thanks", "You are welcome!"),
    ("Goodbye", "Goodbye!"),
)  # fmt: skip


def draw_train(rng: random.Random, make: Callable[[random.Random], Item]) -> Item:
    """Draw until the item is one for training."""
    while (item := make(rng)).held_out:
        pass
    return item


def train_item(rng: random.Random) -> Item:
    """Draw one training item of any task."""
    task = rng.choices(TASKS, [TASK_WEIGHTS[t] for t in TASKS])[0]
    return draw_train(rng, GENERATORS[task])


def train_turn(rng: random.Random) -> tuple[str, str]:
    """Draw one user message and its reply: mostly a task, now and then small talk."""
    if rng.random() < 0.99:
        item = train_item(rng)
        return item.prompt, item.answer
    if rng.random() < 0.2:
        return rng.choice(("Tell me a story.", "Tell a story.")), train_story(rng).text
    return rng.choice(SMALL_TALK)


def train_story(rng: random.Random) -> Story:
    """Draw a story that is not held out."""
    while is_held_out((drawn := draw_story(rng)).key):
        pass
    return drawn


# --- Held-out items ----------------------------------------------------------------------------


def _held_out(rng: random.Random, make: Callable[[random.Random], Item]) -> Item:
    """Draw until the item is one to hold out."""
    while not (item := make(rng)).held_out:
        pass
    return item


def _makers(task: str) -> Iterator[Callable[[random.Random], Item]]:
    """Yield the task's generators in turn, so that every kind of question is asked as often."""
    while True:
        yield from QUESTIONS if task == "question" else (GENERATORS[task],)


def held_out_items(seed: int, per_task: int) -> list[Item]:
    """Draw ``per_task`` different held-out items of each task."""
    rng = random.Random(seed)
    chosen: list[Item] = []
    for task in TASKS:
        seen: dict[str, Item] = {}
        for make in _makers(task):
            item = _held_out(rng, make)
            seen.setdefault(item.prompt, item)
            if len(seen) == per_task:
                break
        chosen += seen.values()
    return chosen
