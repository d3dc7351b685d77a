"""The document the demo asks about: a table of people, the same in every run."""

import random
from dataclasses import dataclass

NUM_PEOPLE = 60

_FIRST = (
    "Alice Bruno Carla David Elena Felix Greta Hugo Irene Jonas Karin Louis Marta Nils Olga Peter Quinn Rosa "
    "Simon Tilda Ulf Vera Walter Xenia Yusuf Zoe Anton Bella Cyrus Diana"
).split()
_LAST = "Adler Brandt Costa Dupont Eriksen Ferrari Garcia Haas Ivanov Jensen Kowalski Lopez Meyer Novak Okafor".split()
_OCCUPATIONS = "architect baker carpenter dentist engineer farmer gardener historian illustrator journalist".split()
_COUNTRIES = "Austria Brazil Canada Denmark Egypt France Ghana Hungary India Japan Kenya Latvia Mexico Norway".split()
_STREETS = "Oak Maple Cedar Birch Willow Elm Chestnut Poplar".split()


@dataclass(frozen=True, slots=True)
class Person:
    number: int
    name: str
    age: int
    occupation: str
    country: str
    email: str
    phone: str
    address: str


def people() -> list[Person]:
    """Sixty people with distinct names."""
    rng = random.Random(60)
    names = rng.sample([f"{first} {last}" for first in _FIRST for last in _LAST], NUM_PEOPLE)
    return [
        Person(
            number,
            name,
            rng.randint(19, 87),
            rng.choice(_OCCUPATIONS),
            rng.choice(_COUNTRIES),
            f"{name.lower().replace(' ', '.')}@example.com",
            f"555-{rng.randint(100, 999)}-{rng.randint(1000, 9999)}",
            f"{rng.randint(1, 99)} {rng.choice(_STREETS)} Street",
        )
        for number, name in enumerate(names, 1)
    ]


def table() -> str:
    """The people as a Markdown table, about 3,000 tokens."""
    lines = ["| id | name | age | occupation | country | e-mail | phone | address |", "|" + "---|" * 8]
    lines += [
        f"| {p.number} | {p.name} | {p.age} | {p.occupation} | {p.country} | {p.email} | {p.phone} | {p.address} |"
        for p in people()
    ]
    return "\n".join(lines)


def messages(person: Person) -> list[dict[str, str]]:
    """A chat that asks for one person's age. All questions share everything up to the question."""
    question = f"How old is {person.name}? Answer in one sentence."
    return [{"role": "user", "content": f"Here is a table of people.\n\n{table()}\n\n{question}"}]
