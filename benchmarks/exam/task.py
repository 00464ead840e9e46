"""Draws the exam's problems: a ring of facts strewn over a long prompt, followed and computed in the answer.

All comes in records of four tokens.

    prompt  [Question: - - -], then in any order facts [KEY NEXT CHAPTER .], in each block of 128 tokens its chapter's
            name [= HEAD = =] and its chapter's operation [* OP * *], and filler; last [KEY from V Answer:]
    answer  round the ring [KEY NEXT CHAPTER OP], once more [KEY NEXT OP V], and at the first key [KEY #### V </s>]

OP is one of v + n, v - n and n - v, modulo 10; V is the value so far, so that an error stays to the end. The first fact
says "turn" in the place of a chapter, and its record has no operation. No two facts name the same successor.
Each token needs one cache family:

    next, chapter   c4 rows of the prompt (a row is a whole fact), beyond 2,048 tokens chosen by the c4 indexer
    op              c128 rows: only there do a chapter's name and its operation lie together. The block that the prompt
                    leaves open is asked for once decoding has closed it: c128 state
    key, value      the window
    recall          the operation again, a round later: c4 rows that decoding has written, and their state
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tools.tiny_checkpoint.tokenizer import ASSISTANT, BOS, EOS, PAD, THINK, THINK_END, USER

MARKS = (BOS, EOS, PAD, "Question:", "Answer:", "####", "turn", "from", "-", ".", "=", "*")
CHAT = (USER, ASSISTANT, THINK, THINK_END)  # no problem has them; a server's chat encoder must find them
PADDING = 128  # the vocabulary is a multiple of this
NOT_ASKED = -100  # a label that no loss counts
FILLER = "well so then and but now yes oh".split()  # noqa: SIM905
NUMBERS = "zero one two three four five six seven eight nine".split()  # noqa: SIM905
SYLLABLES = [consonant + vowel for vowel in "aeiou" for consonant in "bdfgklmnprstvz"]


def name(number: int) -> str:
    """Returns a name of two syllables: no digits, so that the last number of a text is the answer's."""
    return SYLLABLES[number % len(SYLLABLES)] + SYLLABLES[number // len(SYLLABLES)]


@dataclass
class Task:
    """Holds the sizes and the words of the task; an id is a word's place.

    fillers, ops, values, chapters_at, heads, keys_at, nexts: the first ids of the words of each role.
    """

    keys: int = 512
    chapters: int = 32
    block: int = 128  # tokens that share a chapter
    base: int = 10

    def __post_init__(self) -> None:
        people = [name(len(SYLLABLES) ** 2 - 1 - i).title() for i in range(self.chapters)]
        words, roles = list(MARKS), []
        for some in (
            FILLER,
            [f"{kind}-{n}" for kind in ("plus", "minus", "from") for n in NUMBERS[: self.base]],
            [str(n) for n in range(self.base)],
            [f"in-{person}" for person in people],
            [f"{person}:" for person in people],
            [name(i) for i in range(self.keys)],
            [f"to-{name(i)}" for i in range(self.keys)],
        ):
            roles.append((len(words), len(some)))
            words += some
        self.roles = roles
        starts = [first for first, _ in roles]
        self.fillers, self.ops, self.values, self.chapters_at, self.heads, self.keys_at, self.nexts = starts
        words += CHAT
        self.words = words + [f"<unused-{i}>" for i in range(-len(words) % PADDING)]
        self.ids = {word: number for number, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        return [self.ids[word] for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ``ids``, one space between words; the end has no word."""
        return " ".join(self.words[number] for number in ids if self.words[number] != EOS)

    def kin(self) -> list[list[int]]:
        """Returns pairs of ids that mean the same in two roles."""
        pairs = (self.ops, self.values, self.base), (self.chapters_at, self.heads, self.chapters)
        pairs += ((self.keys_at, self.nexts, self.keys),)
        return [[first + i, second + i] for first, second, count in pairs for i in range(count)]

    def room(self, prompt: int) -> tuple[int, int, int]:
        """Returns how many blocks of a prompt have a chapter, how many of them it closes, and the most facts."""
        records, per_block = prompt // 4, self.block // 4
        whole, rest = divmod(records, per_block)
        blocks = min(whole + (rest >= 5), self.chapters)
        return blocks, min(whole, blocks), min(records - 2 - 2 * blocks, self.keys)

    def longest(self, prompt: int) -> int:
        """Returns the steps of the longest ring that a prompt has facts for."""
        return self.room(prompt)[2] - 1

    @staticmethod
    def answer_length(steps: int) -> int:
        return 8 * steps + 12

    @staticmethod
    def kinds(steps: int) -> list[str]:
        first = ["key", "next", "turn", "turn", *("key", "next", "chapter", "op") * steps]
        again = ["key", "again", "turn", "value", *("key", "again", "recall", "value") * steps]
        return [*first, *again, "key", "fin", "final", "end"]

    def batch(self, count: int, prompt: int, steps: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns ids [count, prompt + answer] and the next token of each, NOT_ASKED within the prompt.

        prompt: tokens, a multiple of 4, a block and a record at least. Drawn on the generator's device.
        """
        device, records, per_block = draw.device, prompt // 4, self.block // 4
        blocks, closed, facts = self.room(prompt)
        if closed < 1 or steps >= facts:
            raise ValueError(f"a prompt of {prompt} tokens has no room for {steps} steps")

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=draw, device=device)

        def below(high: int, *shape: int) -> Tensor:
            return torch.randint(high, shape, generator=draw, device=device)

        def record(*parts: Tensor | str) -> Tensor:
            like = next(part for part in parts if isinstance(part, Tensor))
            filled = [torch.full_like(like, self.ids[p]) if isinstance(p, str) else p for p in parts]
            return torch.stack(filled, -1)

        # Two records of each block are its chapter's name and operation; facts lie in any of the others.
        first = torch.arange(blocks, device=device) * per_block
        low, high = first.clamp(min=1), (first + per_block).clamp(max=records - 1)
        one = (uniform(count, blocks) * (high - low)).long()
        two = (one + 1 + (uniform(count, blocks) * (high - low - 1)).long()) % (high - low)
        names, deeds = low + one, low + two
        free = 0.5 + uniform(count, records)
        free[:, 0] = free[:, -1] = 0
        free.scatter_(1, names, 0).scatter_(1, deeds, 0)
        spots = free.argsort(1, descending=True)[:, :facts]
        # The first facts are the ring, the others are a ring that is not asked for.
        keys = uniform(count, self.keys).argsort(1)[:, :facts]
        after = torch.cat([ring.roll(-1, 1) for ring in (keys[:, : steps + 1], keys[:, steps + 1 :])], 1)
        # Step i asks for its operation at token prompt + 4 i + 2: until the open block is closed, of closed ones only.
        ready = -prompt % self.block // 4
        limit = torch.full((facts,), blocks, device=device)
        limit[:ready] = closed
        chosen = (uniform(count, facts) * limit).long()
        tags, ops = uniform(count, self.chapters).argsort(1)[:, :blocks], below(3 * self.base, count, blocks)
        chapter, op = self.chapters_at + tags.gather(1, chosen), ops.gather(1, chosen)
        chapter[:, 0] = self.ids["turn"]

        rows = torch.arange(count, device=device)[:, None]
        key, then, deed = self.keys_at + keys, self.nexts + after, self.ops + op
        start = below(self.base, count)
        text = self.fillers + below(len(FILLER), count, records, 4)
        text[:, 0] = torch.tensor(self.encode("Question: - - -"), device=device)
        text[rows, names] = record("=", self.heads + tags, "=", "=")
        text[rows, deeds] = record("*", self.ops + ops, "*", "*")
        text[rows, spots] = record(key, then, chapter, ".")
        text[:, -1] = record(key[:, 0], "from", self.values + start, "Answer:")

        ring = slice(0, steps + 1)
        values = torch.stack(self._values(start, op[:, 1 : steps + 1]), 1)
        round_one = record(key[:, ring], then[:, ring], chapter[:, ring], deed[:, ring])
        round_one[:, 0, 3] = self.ids["-"]
        round_two = record(key[:, ring], then[:, ring], deed[:, ring], self.values + values)
        round_two[:, 0, 2] = self.ids["turn"]
        end = record(key[:, 0], "####", self.values + values[:, -1], EOS)[:, None]
        ids = torch.cat((text, round_one, round_two, end), 1).flatten(1)
        labels = torch.full_like(ids, NOT_ASKED)
        labels[:, prompt - 1 : -1] = ids[:, prompt:]
        return ids, labels

    def _values(self, start: Tensor, ops: Tensor) -> list[Tensor]:
        """Returns the value [count] at the start and after each of ``ops`` [count, steps]."""
        values = [start]
        for op in ops.T:
            kind, n, now = op // self.base, op % self.base, values[-1]
            values.append(torch.stack((now + n, now - n, n - now)).gather(0, kind[None])[0] % self.base)
        return values
