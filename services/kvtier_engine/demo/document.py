"""The documents the demo asks about: tables of people, the same in every run."""

import random
from collections.abc import Sequence
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


def people(edition: int = 0, num_people: int = NUM_PEOPLE) -> list[Person]:
    """People with distinct names; each edition has others."""
    rng = random.Random(60 + edition)
    names = rng.sample([f"{first} {last}" for first in _FIRST for last in _LAST], num_people)
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


def table(persons: Sequence[Person]) -> str:
    """A Markdown table, about 50 tokens a person."""
    lines = ["| id | name | age | occupation | country | e-mail | phone | address |", "|" + "---|" * 8]
    lines += [
        f"| {p.number} | {p.name} | {p.age} | {p.occupation} | {p.country} | {p.email} | {p.phone} | {p.address} |"
        for p in persons
    ]
    return "\n".join(lines)


def asking(persons: Sequence[Person], question: str) -> list[dict[str, str]]:
    """A chat that begins with the table of people. What is asked comes last, so that all questions share the table.

    The first person's name comes first, so that two tables have next to nothing in common.
    """
    content = f"{persons[0].name} and others are in this table.\n\n{table(persons)}\n\n{question}"
    return [{"role": "user", "content": content}]


def age_of(person: Person) -> str:
    return f"How old is {person.name}? Answer in one sentence."
