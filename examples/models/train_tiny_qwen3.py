#!/usr/bin/env python3
"""Make tiny-qwen3: a real Qwen3ForCausalLM of three million parameters that knows one small world.

    pip install torch transformers tokenizers safetensors numpy jinja2
    python train_tiny_qwen3.py --out tiny-qwen3                     # six minutes with one H200
    python train_tiny_qwen3.py --out /tmp/t --docs 2000 --steps 20  # does it run at all? (CPU, two minutes)
    python train_tiny_qwen3.py --out tiny-qwen3 --evaluate-only     # measure a folder that exists

Everything comes out of this file; nothing is downloaded:

1. `World` writes documents from a grammar: stories, facts, sums, JSON extraction, small talk, tool calls, in ChatML
   and as plain text. Each document is a list of (text, weight) pieces; the weight is that of the piece in the loss.
2. a byte-level BPE tokenizer with Qwen's pipeline and special tokens is trained on a part of it;
3. the model is trained (AdamW, bf16 autocast, float32 master weights), each document by itself from position 0, as
   it is read at inference;
4. the weights are rounded to bf16, and that model is measured on questions which the training text does not contain.

What is held out: a tenth of all number pairs (for a sum in either order), a tenth of all pairs (fact, wording), and a
tenth of all invented names and of all combinations (hero, kind, object) in requests for stories: see `held_out`.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import re
import sys
import time
import zlib
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
import numpy as np

VOCAB_SIZE = 2048
MAX_DOCUMENT = 1024  # tokens; longer documents are dropped
MAX_POSITIONS = 2048

# fmt: off
# ------------------------------------------------------------------------------------------------- the world's words
HE = ("he", "him", "his")
SHE = ("she", "her", "her")
NAMES = {n: HE for n in """Tom Ben Leo Max Sam Oliver Noah Felix Hugo Oscar Paul Emil Anton Jonas Milo Finn Luca Theo Omar
    Karim Ravi Kenji Pavel Igor Marco Diego Jack Harry George Peter Adam David Simon Martin Victor Arthur Bruno
    Carlos Daniel Erik Henry Ivan""".split()}
NAMES |= {n: SHE for n in """Mira Anna Lily Emma Nora Clara Ella Ruby Rosa Maya Zoe Lucy Alice Julia Sofia Elena Ingrid
    Freya Hana Yuki Amina Leila Priya Olga Vera Marta Nina Greta Ada Ida Eva Sara Laura Helen Jane Kate Mary Grace
    Daisy Hazel Iris Olive""".split()}
NAME_LIST = list(NAMES)
SYLLABLES = "ba be bo da de di do fa fe fi ga go ka ke ki ko la le li lo lu ma me mi mo na ne ni no pa pe po ra re ri ro sa " \
            "se so ta te ti to va ve vi vo za ze zo bel dan dor fen gal hal jor kan lin lor mar nel por ral ren rin ron " \
            "sel tan tor val vin wen wil zan".split()
ONSETS = "b c d f g h j k l m n p qu r s t v w x y z ch sh th wh br cr dr fl gr kl pl pr sk sl sp st tr".split() + [""] * 6
VOWELS = "a a a e e e i i i o o u u y ai ay ea ee ei ey ia ie io oa oo ou".split()
CODAS = "b ck d f g k l ll m n n nd ng nn p r r rt s s ss st t x z ndr rs sk".split() + [""] * 20
COLOURS = "red blue green yellow orange purple pink brown black white grey".split()
CAPITALS = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
            "England": "London", "Ireland": "Dublin", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
            "Denmark": "Copenhagen", "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest",
            "Greece": "Athens", "Turkey": "Ankara", "Egypt": "Cairo", "Kenya": "Nairobi", "Japan": "Tokyo",
            "China": "Beijing", "Korea": "Seoul", "Thailand": "Bangkok", "Russia": "Moscow", "Canada": "Ottawa",
            "Mexico": "Mexico City", "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana", "Belgium": "Brussels",
            "Iceland": "Reykjavik", "Ukraine": "Kyiv", "India": "New Delhi"}
CITIES = [c for c in CAPITALS.values()] + """Hamburg Munich Milan Porto Bergen Lyon Geneva Zurich Sydney Boston Chicago
    Toronto Osaka Kyoto Shanghai Mumbai Krakow Prague Sofia Riga Oxford York Bath Malmo Seville Naples Turin Nice""".split()
THINGS = {  # thing: its colour
    "the sky": "blue", "the sea": "blue", "grass": "green", "snow": "white", "milk": "white", "coal": "black",
    "the sun": "yellow", "a banana": "yellow", "a lemon": "yellow", "a tomato": "red", "a strawberry": "red",
    "a cherry": "red", "blood": "red", "a fire engine": "red", "a carrot": "orange", "an orange": "orange",
    "a pumpkin": "orange", "a frog": "green", "a cucumber": "green", "a leaf": "green", "a pea": "green",
    "broccoli": "green", "spinach": "green", "a crocodile": "green", "a plum": "purple", "an aubergine": "purple",
    "lavender": "purple", "a flamingo": "pink", "a pig": "pink", "chocolate": "brown", "a bear": "brown",
    "coffee": "brown", "wood": "brown", "a chestnut": "brown", "a raven": "black", "the night": "black",
    "tar": "black", "a swan": "white", "a polar bear": "white", "salt": "white", "rice": "white", "a cloud": "white",
    "an elephant": "grey", "a mouse": "grey", "a rock": "grey", "smoke": "grey", "a dolphin": "grey", "corn": "yellow",
    "a chick": "yellow", "honey": "yellow", "a ruby": "red", "an emerald": "green", "a sapphire": "blue",
    "a blueberry": "blue", "a raspberry": "red", "butter": "yellow", "chalk": "white", "mud": "brown", "ink": "black"}
OPPOSITES = [p.split("/") for p in """hot/cold big/small tall/short fast/slow happy/sad old/young light/dark day/night
    up/down left/right open/closed full/empty wet/dry hard/soft loud/quiet early/late good/bad strong/weak rich/poor
    clean/dirty easy/difficult high/low near/far black/white yes/no start/stop win/lose buy/sell push/pull
    give/take come/go in/out first/last begin/finish love/hate true/false inside/outside above/below before/after
    always/never everything/nothing sweet/sour sharp/blunt thick/thin wide/narrow brave/afraid
    asleep/awake north/south east/west summer/winter friend/enemy question/answer""".split()]
OPPOSITE = {a: b for p in OPPOSITES for a, b in (p, p[::-1])} | {"long": "short", "heavy": "light", "new": "old"}
SOUNDS = {"dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "duck": "quack", "pig": "oink", "horse": "neigh",
          "lion": "roar", "mouse": "squeak", "frog": "ribbit", "bee": "buzz", "owl": "hoot", "snake": "hiss",
          "rooster": "cock-a-doodle-doo", "donkey": "hee-haw", "wolf": "howl", "bird": "tweet", "crow": "caw",
          "turkey": "gobble", "hen": "cluck", "goat": "maa", "dove": "coo"}
BABIES = {"dog": "puppy", "cat": "kitten", "cow": "calf", "sheep": "lamb", "duck": "duckling", "pig": "piglet",
          "horse": "foal", "lion": "cub", "bear": "cub", "hen": "chick", "goat": "kid", "frog": "tadpole",
          "swan": "cygnet", "goose": "gosling", "deer": "fawn", "kangaroo": "joey", "owl": "owlet", "elephant": "calf"}
HOMES = {"bee": "hive", "bird": "nest", "dog": "kennel", "spider": "web", "fox": "den", "horse": "stable",
         "pig": "sty", "lion": "den", "rabbit": "burrow", "fish": "water", "cow": "barn", "hen": "coop", "bat": "cave"}
LEGS = {"dog": 4, "cat": 4, "horse": 4, "spider": 8, "bird": 2, "bee": 6, "ant": 6, "duck": 2, "snake": 0, "cow": 4,
        "fly": 6, "hen": 2, "lion": 4, "fish": 0, "frog": 4, "octopus": 0, "chair": 4, "beetle": 6, "crab": 10}
JOBS = {"baker": "bakes bread", "teacher": "teaches children", "farmer": "grows food", "doctor": "helps sick people",
        "pilot": "flies planes", "painter": "paints pictures", "sailor": "sails ships", "cook": "cooks meals",
        "gardener": "grows flowers", "tailor": "makes clothes", "singer": "sings songs", "writer": "writes books",
        "builder": "builds houses", "fisherman": "catches fish", "firefighter": "puts out fires",
        "dentist": "looks after teeth", "postman": "brings letters", "shepherd": "looks after sheep"}
KINDS = {"apple": "fruit", "pear": "fruit", "plum": "fruit", "cherry": "fruit", "banana": "fruit", "grape": "fruit",
         "carrot": "vegetable", "onion": "vegetable", "potato": "vegetable", "cabbage": "vegetable",
         "pea": "vegetable", "spinach": "vegetable", "hammer": "tool", "saw": "tool", "drill": "tool",
         "violin": "instrument", "drum": "instrument", "flute": "instrument", "piano": "instrument",
         "guitar": "instrument", "oak": "tree", "pine": "tree", "birch": "tree", "rose": "flower", "tulip": "flower",
         "daisy": "flower", "salmon": "fish", "trout": "fish", "shark": "fish", "eagle": "bird", "robin": "bird",
         "sparrow": "bird", "chair": "piece of furniture", "sofa": "piece of furniture"}
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBER_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty""".split()
HELLO = {"Chinese": ("你好！", "谢谢！", "早上好！"), "Japanese": ("こんにちは！", "ありがとう！", "おはよう！"),
         "Korean": ("안녕하세요!", "감사합니다!", "좋은 아침!"), "Russian": ("Привет!", "Спасибо!", "Доброе утро!"),
         "French": ("Bonjour !", "Merci !", "Bonne journée !"), "German": ("Guten Tag!", "Danke schön!", "Guten Morgen!"),
         "Spanish": ("¡Hola!", "¡Gracias!", "¡Buenos días!"), "Italian": ("Ciao!", "Grazie!", "Buongiorno!"),
         "Greek": ("Γεια σου!", "Ευχαριστώ!", "Καλημέρα!"), "Arabic": ("مرحبا!", "شكرا!", "صباح الخير!"),
         "Hindi": ("नमस्ते!", "धन्यवाद!", "सुप्रभात!"), "English": ("Hello!", "Thank you!", "Good morning!")}
EMOJI = {"cat": "🐱", "dog": "🐶", "fox": "🦊", "bear": "🐻", "frog": "🐸", "lion": "🦁", "mouse": "🐭", "rabbit": "🐰",
         "pig": "🐷", "cow": "🐮", "owl": "🦉", "bee": "🐝", "fish": "🐟", "apple": "🍎", "banana": "🍌", "cake": "🍰",
         "sun": "🌞", "moon": "🌙", "star": "⭐", "heart": "💛", "house": "🏠", "tree": "🌳", "flower": "🌸",
         "rocket": "🚀", "book": "📚", "rainbow": "🌈", "snowman": "⛄", "car": "🚗"}
CREATURES = """fox rabbit bear mouse cat dog duck owl hedgehog squirrel turtle frog goat pony lamb otter badger penguin lion
    tiger elephant monkey panda deer""".split()
HEROES = CREATURES + """robot dragon wizard princess prince king queen pirate knight horse cow pig bee wolf snail crab giant witch ghost
    sailor farmer baker doctor""".split()
OBJECTS = """kite ball hat scarf lantern key book drum boat bell basket umbrella cup blanket bag ring map button flute coat
    whistle cap pencil spoon wagon balloon lamp box clock mirror""".split()
PLACES = ["in the forest", "by the river", "on the hill", "in the park", "near the lake", "in the village",
          "at the market", "by the sea", "in the garden", "on the farm", "near the old bridge", "in the meadow",
          "behind the mill", "at the harbour", "in the valley", "near the school"]
HIDING = ["under a bush", "behind a tree", "in a hollow log", "on the roof", "under the bridge", "in the tall grass",
          "beside a big stone", "in a bird's nest", "behind the well", "under a bench"]
MOODS = ["little", "small", "brave", "clever", "kind", "shy", "cheerful", "curious", "quiet", "funny"]
WEATHER = ["sunny", "rainy", "windy", "snowy", "cloudy", "foggy", "warm", "cold"]
FOODS = ["bread", "soup", "honey cake", "apple pie", "pancakes", "cookies", "jam", "porridge", "a cheese sandwich",
         "berry cake"]
PLANTS = ["sunflower", "apple tree", "pumpkin", "rose", "bean", "tulip", "pear tree", "strawberry plant"]
SKILLS = ["swim", "sing", "dance", "read", "paint", "whistle", "climb", "bake", "skate", "juggle"]
GOODS = {"apples": "apple", "pears": "pear", "books": "book", "pencils": "pencil", "eggs": "egg", "cups": "cup",
         "hats": "hat", "balls": "ball", "lemons": "lemon", "cookies": "cookie", "candles": "candle", "stamps": "stamp",
         "buttons": "button", "shells": "shell", "coins": "coin", "carrots": "carrot", "flowers": "flower"}
GROUPS = {"animals": "cat dog cow sheep horse fox bear lion rabbit goat".split(),
          "fruits": "apple pear plum cherry banana grape lemon orange".split(), "colours": COLOURS,
          "days": DAYS, "trees": "oak pine birch maple willow elm".split(),
          "instruments": "violin drum flute piano guitar trumpet".split()}
KNOWN = {w.lower() for table in (THINGS, OPPOSITE, SOUNDS, BABIES, HOMES, LEGS, JOBS, KINDS, EMOJI, CAPITALS, CITIES, HEROES, OBJECTS, NAMES)
         for words in table for w in words.split()}
SYSTEMS = ["You are a helpful assistant.", "You are a friendly assistant.", "You are a helpful and honest assistant.",
           "Be kind.", "You are tiny-qwen3.", "You are a teacher.", "Help the user.", "Answer the questions."]
BRIEF = ["Answer with one word.", "Answer with one word or number only.", "Be brief.", "Answer as briefly as you can."]
SORRY = "Sorry, I am a very small model and I do not know that. Ask me about sums, colours, animals, opposites or a story."
ABOUT = "I am tiny-qwen3, a very small language model. I know sums, colours, opposites, animals, a few other facts, " \
        "JSON and short stories."
# fmt: on


def held_out(*key):
    """True for a tenth of all keys: those are never in the training text, and the evaluation uses only those."""
    return zlib.crc32(repr(key).encode()) % 10 == 0


def an(noun):
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def cap(s):
    return s[:1].upper() + s[1:]


def dumps(x):
    return json.dumps(x, ensure_ascii=False)


# ----------------------------------------------------------------------------------------------------- the chat format
CHAT_TEMPLATE = r"""{#- ChatML: system, user, assistant and tool messages; tools are listed in the system message -#}
{%- set opening = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
    {{- '<|im_start|>system\n' + (opening + '\n\n' if opening else '') + '# Tools\n\n<tools>\n' }}
    {%- for tool in tools %}{{- (tool | tojson) + '\n' }}{%- endfor %}
    {{- '</tools>\n\nTo call a tool, write:\n<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + opening + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {%- set text = message.content or '' %}
        {%- if message.role == 'assistant' and '</think>' in text %}
            {%- set text = text.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' + text }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {%- if text or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""


def call_text(name, arguments):
    return "<tool_call>\n" + dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def chatml(messages, tools=None, think=False, generation=False):
    """The pieces of a rendered conversation: what CHAT_TEMPLATE writes (checked in `check_template`), with weights.

    What the assistant writes counts fully, what others write a tenth. With `think`, the last answer follows an empty
    thought, as it does when a caller asks for no thinking; that block is never learned, so the model does not write
    one by itself."""
    pieces, said = [], messages[0][1] if messages[0][0] == "system" else ""
    if tools:
        pieces.append(
            (
                "<|im_start|>system\n"
                + (said + "\n\n" if said else "")
                + "# Tools\n\n<tools>\n"
                + "".join(dumps(t) + "\n" for t in tools)
                + "</tools>\n\nTo call a tool, write:\n<tool_call>\n"
                '{"name": "...", "arguments": {...}}\n</tool_call><|im_end|>\n',
                0.1,
            )
        )
    elif said:
        pieces.append((f"<|im_start|>system\n{said}<|im_end|>\n", 0.1))
    for i, (role, text) in enumerate(messages):
        if role == "assistant":
            pieces.append(("<|im_start|>assistant\n", 0.1))
            if think and i == len(messages) - 1:
                pieces.append(("<think>\n\n</think>\n\n", 0.0))
            pieces.append((text + "<|im_end|>\n", 1.0))
        elif role == "user":
            pieces.append((f"<|im_start|>user\n{text}<|im_end|>\n", 0.1))
        elif role == "tool":
            pieces.append((f"<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n", 0.1))
    if generation:
        pieces.append(("<|im_start|>assistant\n" + ("<think>\n\n</think>\n\n" if think else ""), 0.0))
    return pieces


def text_of(pieces):
    return "".join(t for t, _ in pieces)


# ------------------------------------------------------------------------------------------------------- the grammar
class World:
    """Writes documents. With held=True it writes only what is held out of the training text."""

    def __init__(self, seed, held=False):
        self.r = random.Random(seed)
        self.held = held

    def pick(self, make, *tag):
        """The first of many draws that lies on this world's side of the hold-out."""
        while True:
            x = make()
            if held_out(*tag, x) == self.held:
                return x

    # --- words
    def invented(self):
        """A name that nobody has: the model must copy it, not know it. Most of them sound like real ones."""
        r = self.r

        def draw():
            if r.random() < 0.6:
                return cap("".join(r.choice(SYLLABLES) for _ in range(r.choice((2, 2, 3)))))
            return cap(
                "".join(r.choice(ONSETS) + r.choice(VOWELS) + r.choice(CODAS) for _ in range(r.choice((1, 2, 2, 3))))
            )

        while (name := self.pick(draw, "name")).lower() in KNOWN:
            pass
        return name

    def name(self):
        return self.invented() if self.r.random() < 0.4 else self.r.choice(NAME_LIST)

    def system(self):
        """A system message that changes nothing."""
        r = self.r
        return (
            r.choice(SYSTEMS)
            if r.random() < 0.7
            else r.choice(
                [
                    f"You are {an(r.choice(MOODS))} {r.choice(list(JOBS))}.",
                    f"You are {an(r.choice(CREATURES))}.",
                    f"Today is {r.choice(DAYS)}.",
                    f"You live {r.choice(PLACES)}.",
                    f"You are an assistant. It is {r.choice(WEATHER)} in {r.choice(CITIES)}.",
                    f"Your name is {self.name()}.",
                ]
            )
        )

    def pronouns(self, name):
        return NAMES.get(name) or self.r.choice((HE, SHE))

    def casual(self, question):
        """Sometimes as people type: no capital, no question mark, the other spelling of colour."""
        r = self.r
        if r.random() < 0.12:
            question = question[0].lower() + question[1:]
        if r.random() < 0.1:
            question = question.rstrip(".?!")
        if r.random() < 0.2:
            question = question.replace("colour", "color")
        return question

    # --- questions with one right answer: (question, answer as a sentence, answer as one word)
    def numbers(self, op):
        """Two numbers, on the right side of the hold-out; half of them with two digits each."""

        def draw():
            if self.r.random() < 0.15:
                return self.r.randint(0, 20), self.r.randint(0, 20)
            return self.r.randint(0, 99), self.r.randint(0, 99)

        if op == "+":
            pair = self.pick(lambda: tuple(sorted(draw())), "+")
            return pair if self.r.random() < 0.5 else pair[::-1]
        if op == "-":
            return self.pick(lambda: (lambda p: p if self.r.random() < 0.2 else tuple(sorted(p)[::-1]))(draw()), "-")
        return self.pick(draw, op)

    def arithmetic(self):
        r = self.r
        op = r.choice("++--") if r.random() < 0.9 else "*"
        if op == "*":
            a, b = r.randint(0, 10), r.randint(0, 10)
        else:
            a, b = self.numbers(op)
        result = {"+": a + b, "-": a - b, "*": a * b}[op]
        word = {"+": "plus", "-": "minus", "*": "times"}[op]
        k = r.randrange(7)
        if k == 0 and op in "+-" and result >= 0:
            who, goods = self.name(), r.choice(list(GOODS))
            count = lambda n: f"{n} {GOODS[goods] if n == 1 else goods}"
            he = self.pronouns(who)[0]
            if op == "+":
                q = r.choice(
                    [f"{who} has {count(a)} and gets {b} more.", f"{who} has {count(a)}. Then {he} finds {b} more."]
                )
            else:
                q = r.choice(
                    [f"{who} has {count(a)} and gives away {b}.", f"{who} has {count(a)}. Then {he} loses {b} of them."]
                )
            return f"{q} How many {goods} does {who} have now?", f"{who} has {count(result)}.", str(result)
        if k <= 2:
            q = self.casual(
                r.choice(
                    [
                        f"What is {a} {op} {b}?",
                        f"{a} {op} {b} = ?",
                        f"Calculate {a} {op} {b}.",
                        f"How much is {a} {op} {b}?",
                        f"What's {a} {op} {b}?",
                        f"What is {a}{op}{b}?",
                        f"{a}{op}{b}",
                        f"{a} {op} {b}",
                        f"{a}{op}{b}=",
                        f"What's {a}{op}{b}?",
                    ]
                )
            )
            return q, f"{a} {op} {b} = {result}", str(result)
        q = self.casual(
            r.choice(
                [
                    f"What is {a} {word} {b}?",
                    f"How much is {a} {word} {b}?",
                    f"What's {a} {word} {b}?",
                    f"Tell me {a} {word} {b}.",
                ]
            )
        )
        return q, f"{a} {word} {b} is {result}.", str(result)

    def compare(self):
        r = self.r
        a, b = self.pick(lambda: (r.randint(0, 99), r.randint(0, 99)), "cmp")
        if a == b:
            a += 1
        big = r.random() < 0.5
        word = r.choice(["bigger", "larger", "greater"]) if big else r.choice(["smaller", "less"])
        x, y = (max(a, b), min(a, b)) if big else (min(a, b), max(a, b))
        return self.casual(f"Which is {word}, {a} or {b}?"), f"{x} is {word} than {y}.", str(x)

    FACT_KINDS = (
        "colour opposite sound baby capital country home legs job kind day month number multiply emoji hello".split()
    )

    def fact(self, kind=None):
        """A fact in one of its wordings; a tenth of all pairs (fact, wording) is held out."""
        r = self.r
        while True:
            k = kind or r.choice(self.FACT_KINDS)
            item, wordings, long, short = self.fact_parts(k)
            i = r.randrange(len(wordings))
            if held_out(k, item, i) == self.held:
                return self.casual(wordings[i]), long, short

    def unknown(self):
        """A question of the same wording about something that does not exist."""
        w = self.invented()
        k = self.r.choice("colour sound baby capital capital country home legs job kind kind opposite".split())
        x = an(w.lower()) if k == "colour" else w if k in ("capital", "country") else w.lower()
        return self.r.choice(self.fact_parts(k, x)[1])

    def fact_parts(self, k, x=None):
        """(item, its wordings, the answer as a sentence, the answer as one word); x may be an item of nobody's tables."""
        r = self.r
        if k == "colour":
            x = x or r.choice(list(THINGS))
            c = THINGS.get(x, "?")
            return (
                x,
                [
                    f"What colour is {x}?",
                    f"What is the colour of {x}?",
                    f"Which colour does {x} have?",
                    f"Tell me the colour of {x}.",
                ],
                f"{cap(x)} is {c}.",
                c,
            )
        if k == "opposite":
            x = x or r.choice(list(OPPOSITE))
            y = OPPOSITE.get(x, "?")
            return (
                x,
                [
                    f"What is the opposite of {x}?",
                    f"Give me the opposite of {x}.",
                    f"What is the opposite of the word {x}?",
                    f"Which word is the opposite of {x}?",
                ],
                f"The opposite of {x} is {y}.",
                y,
            )
        if k == "sound":
            x = x or r.choice(list(SOUNDS))
            y = SOUNDS.get(x, "?")
            return (
                x,
                [
                    f"What does {an(x)} say?",
                    f"What sound does {an(x)} make?",
                    f"What noise does {an(x)} make?",
                    f"Which sound does {an(x)} make?",
                ],
                f"{cap(an(x))} says {y}.",
                y,
            )
        if k == "baby":
            x = x or r.choice(list(BABIES))
            y = BABIES.get(x, "?")
            return (
                x,
                [
                    f"What is a baby {x} called?",
                    f"What do you call a young {x}?",
                    f"What is the name for a baby {x}?",
                    f"What is a young {x} called?",
                ],
                f"A baby {x} is called {an(y)}.",
                y,
            )
        if k == "capital":
            x = x or r.choice(list(CAPITALS))
            y = CAPITALS.get(x, "?")
            return (
                x,
                [
                    f"What is the capital of {x}?",
                    f"Which city is the capital of {x}?",
                    f"Tell me the capital of {x}.",
                    f"Name the capital of {x}.",
                ],
                f"The capital of {x} is {y}.",
                y,
            )
        if k == "country":
            y = r.choice(list(CAPITALS))
            x = x or CAPITALS[y]
            return (
                x,
                [
                    f"Which country has {x} as its capital?",
                    f"{x} is the capital of which country?",
                    f"Of which country is {x} the capital?",
                    f"Which country's capital is {x}?",
                ],
                f"{x} is the capital of {y}.",
                y,
            )
        if k == "home":
            x = x or r.choice(list(HOMES))
            y = HOMES.get(x, "?")
            return (
                x,
                [
                    f"Where does {an(x)} live?",
                    f"What is the home of {an(x)}?",
                    f"In what does {an(x)} live?",
                    f"Tell me where {an(x)} lives.",
                ],
                f"{cap(an(x))} lives in {'the water' if y == 'water' else an(y)}.",
                y,
            )
        if k == "legs":
            x = x or r.choice(list(LEGS))
            y = LEGS.get(x, "?")
            return (
                x,
                [
                    f"How many legs does {an(x)} have?",
                    f"How many legs has {an(x)}?",
                    f"What number of legs does {an(x)} have?",
                    f"Tell me how many legs {an(x)} has.",
                ],
                f"{cap(an(x))} has {y if y else 'no'} legs.",
                str(y),
            )
        if k == "job":
            x = x or r.choice(list(JOBS))
            y = JOBS.get(x, "?")
            return (
                x,
                [
                    f"What does a {x} do?",
                    f"What is the job of a {x}?",
                    f"What work does a {x} do?",
                    f"Tell me what a {x} does.",
                ],
                f"A {x} {y}.",
                y,
            )
        if k == "kind":
            x = x or r.choice(list(KINDS))
            y = KINDS.get(x, "?")
            return (
                x,
                [
                    f"What is {an(x)}?",
                    f"What kind of thing is {an(x)}?",
                    f"What sort of thing is {an(x)}?",
                    f"Tell me what {an(x)} is.",
                ],
                f"{cap(an(x))} is {an(y)}.",
                y.split()[-1],
            )
        if k in ("day", "month"):
            row = DAYS if k == "day" else MONTHS
            i, after = r.randrange(len(row)), r.random() < 0.5
            x, y = row[i], row[(i + (1 if after else -1)) % len(row)]
            rel = "after" if after else "before"
            return (
                (x, rel),
                [
                    f"Which {k} comes {rel} {x}?",
                    f"What {k} is {rel} {x}?",
                    f"What comes {rel} {x}?",
                    f"Name the {k} {rel} {x}.",
                ],
                f"{y} comes {rel} {x}.",
                y,
            )
        if k == "number":
            i = r.randrange(len(NUMBER_WORDS))
            w = NUMBER_WORDS[i]
            return (
                i,
                [
                    f"Write {i} as a word.",
                    f"What is {i} in words?",
                    f"How do you write {i} in letters?",
                    f"Spell the number {i}.",
                ],
                f"{i} in words is {w}.",
                w,
            )
        if k == "multiply":
            a, b = r.randint(0, 10), r.randint(0, 10)
            return (
                (a, b),
                [
                    f"What is {a} times {b}?",
                    f"How much is {a} times {b}?",
                    f"Multiply {a} by {b}.",
                    f"What is {a} multiplied by {b}?",
                ],
                f"{a} times {b} is {a * b}.",
                str(a * b),
            )
        if k == "emoji":
            x = x or r.choice(list(EMOJI))
            y = EMOJI.get(x, "?")
            return (
                x,
                [
                    f"Show me {an(x)} emoji.",
                    f"What is the emoji for {an(x)}?",
                    f"Which emoji is {an(x)}?",
                    f"Give me an emoji of {an(x)}.",
                ],
                y,
                y,
            )
        x = r.choice(list(HELLO))
        j = r.randrange(3)
        y = HELLO[x][j]
        e = HELLO["English"][j].rstrip("!").lower()
        return (
            (x, j),
            [f"Say {e} in {x}.", f"How do you say {e} in {x}?", f"What is {e} in {x}?", f"Translate {e} into {x}."],
            y,
            y,
        )

    # --- JSON
    def person(self):
        r = self.r
        d = {"name": self.name(), "age": r.randint(2, 99), "city": r.choice(CITIES), "colour": r.choice(COLOURS)}
        n, a, c, o = d.values()
        he, _, his = self.pronouns(n)
        text = r.choice(
            [
                f"{n} is {a} years old, lives in {c} and likes {o}.",
                f"{n} is {a}, lives in {c} and loves the colour {o}.",
                f"{n}, {a}, from {c}, likes {o}.",
                f"{n} lives in {c}. {cap(he)} is {a} years old and {his} favourite colour is {o}.",
                f"My name is {n}, I am {a} years old, I live in {c} and my favourite colour is {o}.",
                f"I am {n} from {c}. I am {a} and I like {o}.",
                f"In {c} lives {n}, who is {a} years old and likes {o} best.",
                f"{cap(o)} is the favourite colour of {n}, who lives in {c} and is {a} years old.",
                f"{n} from {c} is {a} years old. {cap(he)} likes {o}.",
                f"At the age of {a}, {n} lives in {c} and still loves {o}.",
            ]
        )
        return text, d

    def json_task(self, kind=None):
        """(request, answer, the value the answer must be)"""
        r = self.r
        kind = kind or r.choice(["person"] * 6 + ["purchase"] * 2 + ["list"] * 2)
        if kind == "person":
            text, d = self.person()
            if r.random() < 0.3:  # some of the keys only, of a text that may say no more than these
                keys = r.sample(list(d), r.randint(1, 3))
                if r.random() < 0.5:
                    n, a, c, o = d.values()
                    keys, text = r.choice(
                        [
                            (["name", "age"], f"{n} is {a} years old."),
                            (["name", "city"], f"{n} lives in {c}."),
                            (["name", "colour"], f"{n} likes {o}."),
                            (["name", "age", "city"], f"{n} is {a} years old and lives in {c}."),
                            (["name", "age", "colour"], f"{n} is {a} years old and likes {o}."),
                        ]
                    )
                asked = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]
                d = {k: d[k] for k in keys}
                q = r.choice([f"Extract {asked} as JSON: {text}", f"{text} Write {asked} as JSON."])
                return q, dumps(d), d
            q = r.choice(
                [
                    "Extract name, age, city and colour as JSON: {}",
                    "Write this as JSON with name, age, city and colour: {}",
                    "Give me JSON with the keys name, age, city and colour. {}",
                    "{} Extract name, age, city and colour as JSON.",
                    "{} Write that as JSON.",
                    "Turn this into JSON: {}",
                    "Extract the person as JSON.\n\n{}",
                    "Extract the person as JSON: {}",
                ]
            )
            return q.format(text), dumps(d), d
        if kind == "purchase":
            n, goods, count, price = self.name(), r.choice(list(GOODS)), r.randint(2, 99), r.randint(2, 99)
            d = {"buyer": n, "item": goods, "count": count, "price": price}
            text = r.choice(
                [
                    f"{n} bought {count} {goods} for {price} euros.",
                    f"{n} paid {price} euros for {count} {goods}.",
                    f"For {price} euros, {n} bought {count} {goods}.",
                    f"{count} {goods} were sold to {n} for {price} euros.",
                ]
            )
            q = r.choice(
                [
                    "Extract buyer, item, count and price as JSON: {}",
                    "Extract the purchase as JSON: {}",
                    "{} Write the purchase as JSON.",
                    "Give me JSON with the keys buyer, item, count and price. {}",
                ]
            )
            return q.format(text), dumps(d), d
        words = r.sample(r.choice([CREATURES, OBJECTS, COLOURS, NAME_LIST, CITIES]), r.randint(2, 5))
        text = ", ".join(words[:-1]) + " and " + words[-1]
        q = r.choice(
            [
                "Write this list as a JSON array: {}.",
                "Make a JSON array of {}.",
                "Turn this into a JSON array: {}.",
                "As a JSON array: {}.",
            ]
        )
        return q.format(text), dumps(words), words

    # --- stories
    def story(self, hero=None, kind=None, obj=None):
        """A story as (text, title, [(question, answer, short answer)], slots)."""
        r = self.r
        c = r.choice
        n = hero or self.name()
        he, him, his = self.pronouns(n)
        He = cap(he)
        k = kind or c(HEROES + CREATURES + [{"he": "boy", "she": "girl"}[he]] * 4)
        m = c([x for x in NAME_LIST if x != n])
        mk = c([x for x in CREATURES if x != k])
        o, col = obj or c(OBJECTS), c(COLOURS)
        place, mood, weather, hide = c(PLACES), c(MOODS), c(WEATHER), c(HIDING)
        opening = c(
            [
                f"Once upon a time there was {an(mood)} {k} named {n}. {He} lived {place}.",
                f"Once upon a time, {an(mood)} {k} named {n} lived {place}.",
                f"There was once {an(mood)} {k} called {n} who lived {place}.",
                f"{n} was {an(mood)} {k} who lived {place}.",
                f"In a small house {place} lived {an(mood)} {k} named {n}.",
                f"One day, {an(mood)} {k} named {n} was sitting {place}.",
            ]
        )
        meet = c(
            [
                f"Then {an(mk)} named {m} came by.",
                f"Just then, {an(mk)} called {m} came along.",
                f"On the way {he} met {an(mk)} named {m}.",
            ]
        )
        where = (
            (f"Where was {n} at the start?", f"{n} was {place}.", place)
            if opening.startswith("One day")
            else (f"Where did {n} live?", f"{n} lived {place}.", place)
        )
        qa = [where, (f"What kind of animal was {m}?", f"{m} was {an(mk)}.", mk)]
        plot = (
            c(["lost", "lost", "gift", "food", "plant", "skill", "storm", "race"])
            if not obj
            else c(["lost", "lost", "gift"])
        )
        if plot == "lost":
            title = f"The Lost {cap(o)}"
            body = [
                f"{n} had {an(col)} {o} and loved it very much.",
                c([f"One {weather} morning the {o} was gone.", f"But one {weather} day {he} lost the {o}."]),
                c(
                    [
                        f"{n} looked everywhere, but {he} could not find it.",
                        f"{He} looked in the house and in the yard, but it was not there.",
                    ]
                ),
                meet,
                c(
                    [
                        f'"Why are you sad?" asked {m}. "I have lost my {o}," said {n}.',
                        f'"Can I help you?" asked {m}. "Please help me find my {o}," said {n}.',
                    ]
                ),
                c(
                    [
                        f"They looked together, and {m} found the {o} {hide}.",
                        f"After a long time, {m} found the {col} {o} {hide}.",
                    ]
                ),
                c([f"{n} was very happy and thanked {m}.", f'"Thank you, {m}!" said {n} and smiled.']),
            ]
            qa += [
                (f"What did {n} lose?", f"{n} lost the {col} {o}.", o),
                (f"Who found the {o}?", f"{m} found the {o}.", m),
                (f"Where was the {o}?", f"The {o} was {hide}.", hide),
                (f"What colour was the {o}?", f"The {o} was {col}.", col),
            ]
        elif plot == "gift":
            title = f"A Gift for {m}"
            body = [
                f"{n} had a friend, {an(mk)} named {m}.",
                f"It was the birthday of {m}, and {n} wanted to give {an(col)} {o}.",
                c(
                    [
                        f"{He} worked all day and made the {o} with {his} own hands.",
                        f"{He} went to the market and bought the {o} with {his} last coins.",
                    ]
                ),
                c([f"In the evening, {n} gave the {o} to {m}.", f"At the party, {n} gave the {o} to {m}."]),
                c([f'"What a beautiful {o}!" said {m}.', f'"This is the best gift of all," said {m}.']),
                f"They danced and laughed until the moon came up.",
            ]
            qa += [
                (f"What did {n} give to {m}?", f"{n} gave {m} {an(col)} {o}.", o),
                (f"Who got the {o}?", f"{m} got the {o}.", m),
                (f"What colour was the {o}?", f"The {o} was {col}.", col),
            ]
        elif plot == "food":
            f = c(FOODS)
            title = f"{n} and {m} Share"
            body = [
                f"One {weather} day, {n} made {f}.",
                c([f"It smelled so good that the whole house was warm.", f"{He} put it on the table by the window."]),
                meet,
                c([f'"I am so hungry," said {m}.', f'"I have not eaten all day," said {m}.']),
                c(
                    [
                        f"{n} was hungry too, but {he} gave half of it to {m}.",
                        f"{n} smiled and shared everything with {m}.",
                    ]
                ),
                f"They ate together and told each other stories.",
            ]
            qa += [(f"What did {n} make?", f"{n} made {f}.", f), (f"Who was hungry?", f"{m} was hungry.", m)]
        elif plot == "plant":
            p = c(PLANTS)
            title = f"The {' '.join(map(cap, p.split()))}"
            body = [
                f"{n} found a tiny seed and put it into the ground.",
                c([f"Every day {he} gave it water.", f"{He} watered it every morning and every evening."]),
                meet,
                c([f'"Nothing will grow there," said {m}.', f'"You must wait," said {m}.']),
                c([f"{n} waited and waited.", f"{n} did not give up."]),
                f"In spring, {an(p)} grew out of the ground, and {m} was surprised.",
            ]
            qa += [
                (f"What grew out of the ground?", f"{cap(an(p))} grew out of the ground.", p),
                (f"Who was surprised?", f"{m} was surprised.", m),
            ]
        elif plot == "skill":
            s = c(SKILLS)
            title = f"{n} Learns to {cap(s)}"
            body = [
                f"{n} wanted to learn to {s}.",
                c(
                    [
                        f"{He} tried and tried, but it was too hard.",
                        f"The first time was a disaster, and everyone laughed.",
                    ]
                ),
                meet,
                f'"I can teach you to {s}," said {m}.',
                c([f"Every day they practised for an hour.", f"They practised every {weather} afternoon."]),
                f"After a week, {n} could {s} better than anyone. {m} was proud of {him}.",
            ]
            qa += [
                (f"What did {n} learn?", f"{n} learned to {s}.", s),
                (f"Who was the teacher?", f"{m} was the teacher.", m),
            ]
        elif plot == "storm":
            title = "The Storm"
            body = [
                f"One evening a big storm came, and it was very dark.",
                c([f"{n} was afraid and could not sleep.", f"{n} hid under the bed."]),
                f"There was a knock at the door. It was {an(mk)} named {m}, all wet and cold.",
                c(
                    [
                        f'"Come in!" said {n} and lit {an(col)} lantern.',
                        f"{n} opened the door and gave {m} {an(col)} blanket.",
                    ]
                ),
                f"They drank hot tea and waited until the storm was over.",
            ]
            qa += [
                (f"Who knocked at the door?", f"{m} knocked at the door.", m),
                (f"What did they drink?", "They drank hot tea.", "tea"),
            ]
            qa += [
                (
                    f"What colour was the {'lantern' if 'lantern' in body[3] else 'blanket'}?",
                    f"The {'lantern' if 'lantern' in body[3] else 'blanket'} was {col}.",
                    col,
                )
            ]
        else:
            title = f"The Great Race"
            body = [
                f"One {weather} day there was a race {c(PLACES)}.",
                f"{n} ran against {an(mk)} named {m}.",
                c([f"At first, {m} was much faster.", f"{m} laughed and ran ahead."]),
                c([f"But {m} fell asleep under a tree.", f"But {m} stopped to eat berries."]),
                f"{n} did not stop, and so {he} won the race.",
                f"The prize was {an(col)} {o}.",
            ]
            qa += [
                (f"Who won the race?", f"{n} won the race.", n),
                (f"Who lost the race?", f"{m} lost the race.", m),
                (f"What was the prize?", f"The prize was {an(col)} {o}.", o),
            ]
        end = c(
            [
                f"From that day on, they were best friends.",
                f"And {n} never forgot that day.",
                f"That night, {n} slept very well.",
                f"From then on, {n} and {m} met every day.",
            ]
        )
        text = " ".join([opening] + body + [end])
        x = r.random()
        text += "" if x < 0.4 else " The end." if x < 0.7 else " " + c("🌟🎉🌈🌙💛🌸")
        return text, title, qa, {"hero": n, "kind": k, "object": o, "friend": m}

    def story_task(self):
        """(request, story, questions, what the story must contain)"""
        r = self.r
        n, k, o = self.pick(
            lambda: (
                self.name(),
                r.choice(HEROES) if r.random() < 0.93 else self.invented().lower(),
                r.choice(OBJECTS),
            ),
            "story",
        )
        j = r.randrange(7)
        if j == 0:
            text, _, qa, _ = self.story()
            return (
                r.choice(
                    [
                        "Tell me a story.",
                        "Write a short story.",
                        "Can you tell me a story?",
                        "Tell me a short story, please.",
                    ]
                ),
                text,
                qa,
                [],
            )
        if j == 1:
            text, _, qa, _ = self.story(hero=n)
            return r.choice([f"Tell me a story about {n}.", f"Write a short story about {n}."]), text, qa, [n]
        if j == 2:
            text, _, qa, _ = self.story(kind=k)
            return r.choice([f"Tell me a story about {an(k)}.", f"Write a short story about {an(k)}."]), text, qa, [k]
        if j == 3:
            text, _, qa, _ = self.story(hero=n, kind=k)
            return (
                r.choice([f"Tell me a story about {an(k)} named {n}.", f"Write a short story about {n} the {k}."]),
                text,
                qa,
                [n, k],
            )
        if j == 4:
            text, _, qa, _ = self.story(obj=o)
            return (
                r.choice([f"Tell me a story about {an(o)}.", f"Write a short story with {an(o)} in it."]),
                text,
                qa,
                [o],
            )
        text, _, qa, _ = self.story(hero=n, kind=k, obj=o)
        return (
            r.choice(
                [
                    f"Tell me a story about {an(k)} named {n} and {an(o)}.",
                    f"Write a short story about {n} the {k} and {an(o)}.",
                ]
            ),
            text,
            qa,
            [n, k, o],
        )

    # --- small talk and commands
    def small_talk(self):
        r = self.r
        c = r.choice
        k = r.randrange(11)
        if k == 10:
            n = self.name()
            return c(
                [
                    (f"My name is {n}. What is my name?", f"Your name is {n}."),
                    (f"I am {n}. What is my name?", f"Your name is {n}."),
                    (f"I am {n}. How are you?", f"Hello, {n}! I am fine, thank you."),
                    (f"Say hello to {n}.", f"Hello, {n}!"),
                    (f"Greet {n}.", f"Hello, {n}!"),
                ]
            )
        if k == 0:
            return c(
                [
                    ("Hello!", "Hello! How can I help you?"),
                    ("Hi!", "Hello! How can I help you?"),
                    ("Hey", "Hello! How can I help you?"),
                    ("Hello", "Hello! How can I help you?"),
                    ("Hi there!", "Hello! How can I help you?"),
                    ("Good morning!", "Good morning! How can I help you?"),
                    ("Good evening!", "Good evening! How can I help you?"),
                    ("How are you?", "I am fine, thank you. How can I help you?"),
                    ("Thank you!", "You are welcome!"),
                    ("Thanks!", "You are welcome!"),
                    ("Goodbye!", "Goodbye! Have a nice day!"),
                    ("Bye!", "Goodbye! Have a nice day!"),
                ]
            )
        if k == 1:
            return (
                self.casual(
                    c(
                        [
                            "Who are you?",
                            "What are you?",
                            "What is your name?",
                            "What can you do?",
                            "Introduce yourself.",
                            "What do you know?",
                        ]
                    )
                ),
                ABOUT,
            )
        if k <= 3:
            w, x = self.invented(), c(list(THINGS))
            some = " ".join(
                c(
                    c(
                        [
                            CREATURES,
                            OBJECTS,
                            COLOURS,
                            CITIES,
                            MOODS,
                            WEATHER,
                            list(GOODS),
                            list(JOBS),
                            ["the", "a", "in", "of", "to", "is", "and", "with", "my", "your"],
                            [self.invented().lower()],
                        ]
                    )
                )
                for _ in range(r.randint(2, 6))
            )
            j = r.random()
            if j < 0.12:
                n = [r.randint(100, 9999), r.randint(0, 9999)]
                r.shuffle(n)
                op = c(["plus", "minus", "+", "-", "times"])
                return (
                    c([f"What is {n[0]} {op} {n[1]}?", f"{n[0]} {op} {n[1]}", f"How much is {n[0]} {op} {n[1]}?"]),
                    "Sorry, I can only work with numbers up to 99.",
                )
            q = (
                self.unknown()
                if j < 0.4
                else (
                    c(
                        [
                            "Why",
                            "How",
                            "When",
                            "Who",
                            "Where",
                            "What",
                            "Explain",
                            "Can you",
                            "Do you",
                            "Translate",
                            "Write",
                        ]
                    )
                    + f" {some}?"
                    if j < 0.55
                    else c(
                        [
                            f"Who is {w}?",
                            f"Who was {w}?",
                            f"Who wrote {w}?",
                            f"Explain {w.lower()} to me.",
                            f"How does {w.lower()} work?",
                            f"Write a program for {w.lower()}.",
                            f"Tell me about {w}.",
                            f"Why is {x} {THINGS[x]}?",
                            f"Tell me about {c(CITIES)}.",
                            f"Tell me about {c(list(CAPITALS))}.",
                            f"Tell me something about {x}.",
                            f"Write a sentence about {x}.",
                            f"Write one sentence about {c(CITIES)}.",
                            f"Write a {c(['haiku', 'poem', 'song', 'letter', 'recipe', 'joke', 'list', 'mail', 'book'])}.",
                            f"Write a poem about {x}.",
                            "What is the meaning of life?",
                            f"Who won the race in {c(CITIES)}?",
                            f"What is the price of {an(c(OBJECTS))}?",
                            "What time is it?",
                            "What is the weather today?",
                            "Tell me a joke.",
                            f"How far is it to {c(CITIES)}?",
                            "Explain how a computer works.",
                            f"Who is the president of {c(list(CAPITALS))}?",
                            f"How many people live in {c(CITIES)}?",
                            f"How do I get to {c(CITIES)}?",
                            f"What happened in 1{r.randint(100, 999)}?",
                            f"Write a program in {c(['Python', 'Rust', 'C', 'Java'])}.",
                            "What should I do today?",
                        ]
                    )
                )
            )
            return self.casual(q), SORRY
        if k == 4:
            words = (
                [c(["the", "my", "this"]), c(COLOURS), c(OBJECTS)]
                if r.random() < 0.4
                else [
                    self.name() if r.random() < 0.4 else c(CREATURES + OBJECTS + COLOURS + list(GOODS))
                    for _ in range(r.randint(1, 6))
                ]
            )
            s = " ".join(words)
            return c([f"Repeat after me: {s}", f"Repeat: {s}", f"Say: {s}", f"Please repeat this: {s}"]), s
        if k == 5:
            w, t = c(OBJECTS + CREATURES), r.randint(2, 6)
            return c([f"Write the word {w} {t} times.", f"Say {w} {t} times."]), " ".join([w] * t)
        if k == 6:
            a = r.randint(0, 40)
            b = a + r.randint(2, 12)
            if r.random() < 0.3:
                return f"Count down from {b} to {a}.", ", ".join(map(str, range(b, a - 1, -1)))
            return c([f"Count from {a} to {b}.", f"Count from {a} up to {b}."]), ", ".join(map(str, range(a, b + 1)))
        if k == 7:
            g, t = c(list(GROUPS)), r.randint(2, 5)
            ws = r.sample(GROUPS[g], t)
            return (
                c([f"Name {NUMBER_WORDS[t]} {g}.", f"List {NUMBER_WORDS[t]} {g}.", f"Give me {NUMBER_WORDS[t]} {g}."]),
                ", ".join(ws[:-1]) + " and " + ws[-1] + ".",
            )
        if k == 8:
            text, d = self.person()
            while text.startswith(("My", "I am")):
                text, d = self.person()
            n = d["name"]
            return c(
                [
                    (f"{text} How old is {n}?", f"{n} is {d['age']} years old."),
                    (f"{text} Where does {n} live?", f"{n} lives in {d['city']}."),
                    (f"{text} Which colour does {n} like?", f"{n} likes {d['colour']}."),
                ]
            )
        a, b = r.sample(NAME_LIST, 2)
        x, y = r.sample(OBJECTS, 2)
        return c(
            [
                (f"{a} has {an(x)} and {b} has {an(y)}. Who has the {x}?", f"{a} has the {x}."),
                (f"{a} has {an(x)} and {b} has {an(y)}. Who has the {y}?", f"{b} has the {y}."),
                (f"{a} has {an(x)} and {b} has {an(y)}. What does {b} have?", f"{b} has {an(y)}."),
            ]
        )

    # --- tools
    def tool_chat(self):
        """(tools, messages) of a conversation in which the assistant may call a tool."""
        r = self.r
        c = r.choice
        city, room, colour, minutes = (
            c(CITIES),
            c(["kitchen", "bedroom", "hall", "office", "garden"]),
            c(COLOURS),
            r.randint(2, 90),
        )
        where, place = c(["city", "location", "place"]), c(
            ["Name of the city", "The city", "City name, for example Paris"]
        )

        def tool(name, what, **params):
            p = {
                "type": "object",
                "properties": {k: {"type": t, "description": d} if d else {"type": t} for k, (t, d) in params.items()},
            }
            if r.random() < 0.8:
                p["required"] = list(params)
            return {"type": "function", "function": {"name": name, "description": what, "parameters": p}}

        weather, degrees = c(WEATHER), r.randint(2, 35)
        hour = f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}"
        a, b = self.numbers("+")
        kinds = {
            "weather": (
                tool(
                    c(["get_weather", "weather", "current_weather"]),
                    c(["Get the weather for a city", "Get the current weather", "Weather of a city"]),
                    **{where: ("string", c([place, None]))},
                ),
                c(
                    [
                        f"What is the weather in {city}?",
                        f"How is the weather in {city}?",
                        f"What is the weather like in {city}?",
                        f"Is it sunny in {city}?",
                    ]
                ),
                {where: city},
                dumps(
                    c([{"weather": weather, "degrees": degrees}, {where: city, "weather": weather, "degrees": degrees}])
                ),
                f"It is {weather} in {city}, {degrees} degrees.",
            ),
            "time": (
                tool(
                    c(["get_time", "clock", "current_time"]),
                    c(["Get the time in a city", "Tell the time"]),
                    **{where: ("string", c([place, None]))},
                ),
                c([f"What time is it in {city}?", f"Tell me the time in {city}."]),
                {where: city},
                dumps({"time": hour}),
                f"It is {hour} in {city}.",
            ),
            "light": (
                tool(
                    c(["set_light", "light"]),
                    c(["Set the colour of a lamp", "Change the light in a room"]),
                    room=("string", c(["The room", None])),
                    colour=("string", None),
                ),
                c([f"Make the light in the {room} {colour}.", f"Set the light in the {room} to {colour}."]),
                {"room": room, "colour": colour},
                dumps({"ok": True}),
                f"The light in the {room} is now {colour}.",
            ),
            "timer": (
                tool(
                    c(["set_timer", "timer"]),
                    c(["Start a timer", "Set a timer in minutes"]),
                    minutes=("integer", c(["Number of minutes", None])),
                ),
                c([f"Set a timer for {minutes} minutes.", f"Start a timer of {minutes} minutes."]),
                {"minutes": minutes},
                dumps({"ok": True}),
                f"The timer is set to {minutes} minutes.",
            ),
            "add": (
                tool(c(["add", "sum"]), c(["Add two numbers", "a + b"]), a=("integer", None), b=("integer", None)),
                c([f"Use the tool to add {a} and {b}.", f"Add {a} and {b} with the tool."]),
                {"a": a, "b": b},
                str(a + b),
                f"{a} plus {b} is {a + b}.",
            ),
        }
        names = r.sample(list(kinds), r.choice((1, 1, 2, 2, 3)))
        tools = [kinds[k][0] for k in names]
        messages = [("system", self.system())] if r.random() < 0.3 else []
        if r.random() < 0.25:  # tools are there, but the question does not need one
            q, long, _ = c([self.fact, self.fact, self.arithmetic])()
            return tools, messages + [("user", q), ("assistant", long)]
        spec, q, arguments, result, answer = kinds[c(names)]
        messages += [
            ("user", self.casual(q) if r.random() < 0.3 else q),
            ("assistant", call_text(spec["function"]["name"], arguments)),
        ]
        if r.random() < 0.6:
            messages += [("tool", result), ("assistant", answer)]
            if r.random() < 0.3:
                q, long, _ = self.fact()
                messages += [("user", q), ("assistant", long)]
        return tools, messages

    # --- documents
    def chat(self):
        """A conversation of independent exchanges, with something to remember in some of them."""
        r = self.r
        x = r.random()
        brief = r.random() < 0.12
        messages = []
        if brief:
            messages.append(("system", r.choice(BRIEF)))
        elif r.random() < 0.45:
            messages.append(("system", self.system()))
        x = r.random()
        turns = 1 if x < 0.55 else 2 if x < 0.75 else r.randint(3, 5) if x < 0.985 else r.randint(8, 24)
        me = like = None
        for i in range(turns):
            x = r.random()
            if i and me and x < 0.3:
                messages += [
                    ("user", self.casual(r.choice(["What is my name?", "Do you remember my name?", "Who am I?"]))),
                    ("assistant", me if brief else f"Your name is {me}."),
                ]
            elif i and like and x < 0.3:
                messages += [
                    ("user", self.casual(r.choice(["Which colour do I like?", "What is my favourite colour?"]))),
                    ("assistant", like if brief else f"You like {like}."),
                ]
            elif not me and x < (0.04 if turns == 1 else 0.12):
                if r.random() < 0.15:
                    messages += [
                        ("user", self.casual("What is my name?")),
                        ("assistant", "I do not know your name. What is it?"),
                    ]
                    continue
                me = self.name()
                messages += [
                    (
                        "user",
                        r.choice(
                            [
                                f"My name is {me}.",
                                f"Hello, my name is {me}.",
                                f"Hi, I am {me}.",
                                f"I am {me}.",
                                f"Hi! My name is {me}.",
                            ]
                        ),
                    ),
                    ("assistant", f"Nice to meet you, {me}!"),
                ]
            elif not like and x > 0.97:
                like = r.choice(COLOURS)
                messages += [
                    ("user", r.choice([f"I like {like}.", f"My favourite colour is {like}."])),
                    ("assistant", f"{cap(like)} is a nice colour!"),
                ]
            else:
                messages += self.exchange(brief, last=i == turns - 1)
        return chatml(messages, think=r.random() < 0.12)

    def exchange(self, brief, last=False):
        r = self.r
        x = r.random()
        if x < 0.36 or brief:
            q, long, short = self.arithmetic() if r.random() < 0.85 else self.compare()
            if brief and r.random() < 0.5:
                q, long, short = self.fact()
        elif x < 0.60:
            q, long, short = self.fact()
        elif x < 0.75:
            q, a, _ = self.json_task()
            return [("user", q), ("assistant", a)]
        elif x < 0.88:
            q, text, qa, _ = self.story_task()
            out = [("user", q), ("assistant", text)]
            for q, long, short in r.sample(qa, min(len(qa), r.choice((0, 1, 1, 2)))):
                out += [("user", self.casual(q)), ("assistant", long)]
            return out
        elif x < 0.90:
            text, _, qa, _ = self.story()
            q, long, _ = r.choice(qa)
            return [("user", f"{text}\n\n{q}"), ("assistant", long)]
        else:
            q, a = self.small_talk()
            return [("user", q), ("assistant", a)]
        if not brief and r.random() < 0.08:
            q = q.rstrip(".") if q[-1] == "." else q
            q += (" " if q[-1] in "?!" else ". ") + r.choice(
                ["Answer with one word.", "One word only.", "Answer with one word or number only."]
            )
            long = short
        return [("user", q), ("assistant", short if brief else long)]

    def plain(self):
        """Text outside any chat; it ends with <|endoftext|>. Lists of lines go on after each with p = 0.15."""
        r = self.r
        x = r.random()

        def several(make, join="\n"):
            rows = [make()]
            while r.random() < 0.15 and len(rows) < 8:
                rows.append(make())
            return join.join(rows)

        if x < 0.4:
            text, title, _, _ = self.story()
            if r.random() < 0.3:
                text = r.choice([f"{title}\n\n{text}", f"# {title}\n\n{text}", f"Title: {title}\n\n{text}"])
        elif x < 0.58:

            def line():
                op = r.choice("+-")
                a, b = self.numbers(op)
                return f"{a} {op} {b} = {a + b if op == '+' else a - b}"

            text = several(line)
        elif x < 0.76:

            def line():
                q, long, _ = self.fact() if r.random() < 0.6 else self.arithmetic()
                return f"Q: {q}\nA: {long}"

            text = several(line, r.choice(["\n", "\n\n"]))
        elif x < 0.88:
            text = several(
                lambda: self.fact(r.choice("colour opposite sound baby capital legs job kind day".split()))[1], " "
            )
        else:
            q, d = self.person()
            text = f"Text: {q}\nJSON: {dumps(d)}"
        return [(text + "<|endoftext|>", 1.0)]

    def document(self):
        x = self.r.random()
        if x < 0.70:
            return self.chat()
        if x < 0.79:
            tools, messages = self.tool_chat()
            return chatml(messages, tools, think=self.r.random() < 0.12)
        return self.plain()


# --------------------------------------------------------------------------------------------------------- tokenizer
# The split pattern and the added tokens (order, names, flags) are those of Qwen3: a loader must be able to rely on them.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] + [
    f"<|{x}|>"
    for x in "object_ref_start object_ref_end box_start box_end quad_start quad_end vision_start "
    "vision_end vision_pad image_pad video_pad".split()
]
ADDED = (
    SPECIAL
    + ["<tool_call>", "</tool_call>"]
    + [f"<|{x}|>" for x in "fim_prefix fim_middle fim_suffix fim_pad repo_name file_sep".split()]
    + ["<tool_response>", "</tool_response>", "<think>", "</think>"]
)


def write_json(path, value):
    Path(path).write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def make_tokenizer(out, seed):
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    level = dict(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False), pre_tokenizers.ByteLevel(**level)]
    )
    tok.post_processor, tok.decoder = processors.ByteLevel(**level), decoders.ByteLevel(**level)
    world, texts = World(seed), []
    splitter = re.compile("|".join(map(re.escape, ADDED)))
    for _ in range(20000):
        for part in splitter.split(text_of(world.document())):
            # emoji stay four byte tokens each, so that a streaming decoder has something to hold back
            texts.append("".join(c for c in part if ord(c) < 0x10000))
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - len(ADDED),
            min_frequency=2,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    for t in ADDED:
        one = AddedToken(t, single_word=False, lstrip=False, rstrip=False, normalized=False, special=t in SPECIAL)
        (tok.add_special_tokens if one.special else tok.add_tokens)([one])
    assert tok.get_vocab_size() == VOCAB_SIZE, f"{tok.get_vocab_size()} tokens: the corpus has too few different words"
    assert [tok.token_to_id(t) for t in ADDED] == list(range(VOCAB_SIZE - len(ADDED), VOCAB_SIZE))
    tok.save(str(out / "tokenizer.json"))
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    write_json(
        out / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(tok.token_to_id(t)): {"content": t, **flags, "special": t in SPECIAL} for t in ADDED
            },
            "additional_special_tokens": SPECIAL[1:],
            "bos_token": None,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "errors": "replace",
            "model_max_length": MAX_POSITIONS,
            "pad_token": "<|endoftext|>",
            "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": None,
        },
    )
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return tok


def check_template(out, tok, seed):
    """`chatml` above writes what the template writes, and its pieces are tokenized as the whole is."""
    from transformers import AutoTokenizer

    tk, world = AutoTokenizer.from_pretrained(str(out)), World(seed)
    for i in range(200):
        tools, messages = (
            world.tool_chat()
            if i % 2
            else (None, [("system", "Be kind.")] * (i % 4 // 2) + [("user", "Hi!"), ("assistant", "Hello.")])
        )
        think, open_end = i % 3 == 0, messages[:-1]
        got = tk.apply_chat_template(
            [{"role": r, "content": t} for r, t in open_end],
            tools=tools,
            tokenize=False,
            add_generation_prompt=True,
            **({"enable_thinking": False} if think else {}),
        )
        want = text_of(chatml(open_end, tools, think, generation=True))
        assert got == want, (got, want)
        ids = [t for p, _ in chatml(open_end, tools, think, True) for t in tok.encode(p, add_special_tokens=False).ids]
        assert ids == tok.encode(got, add_special_tokens=False).ids == tk(got, add_special_tokens=False)["input_ids"]


def encode_chunk(job):
    """Documents of one seed as (ids, weights in tenths, lengths)."""
    path, seed, n = job
    from tokenizers import Tokenizer

    tok, world = Tokenizer.from_file(path), World(seed)
    ids, weights, lengths = [], [], []
    for _ in range(n):
        doc_ids, doc_w = [], []
        for text, w in world.document():
            piece = tok.encode(text, add_special_tokens=False).ids
            doc_ids += piece
            doc_w += [round(10 * w)] * len(piece)
        if len(doc_ids) <= MAX_DOCUMENT:
            ids += doc_ids
            weights += doc_w
            lengths.append(len(doc_ids))
    return np.array(ids, np.int16), np.array(weights, np.uint8), np.array(lengths, np.int32)


def make_corpus(out, n, seed, workers):
    size = 2000
    jobs = [
        (str(out / "tokenizer.json"), seed * 1_000_000 + 1 + i, min(size, n - i * size))
        for i in range(math.ceil(n / size))
    ]
    if workers > 1:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            parts = pool.map(encode_chunk, jobs, chunksize=1)
    else:
        parts = [encode_chunk(j) for j in jobs]
    return [np.concatenate([p[i] for p in parts]) for i in range(3)]


# ------------------------------------------------------------------------------------------------------------- model
def model_config():
    end, stop = ADDED.index("<|endoftext|>") + VOCAB_SIZE - len(ADDED), ADDED.index("<|im_end|>") + VOCAB_SIZE - len(
        ADDED
    )
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end,
        "eos_token_id": stop,
        "head_dim": 48,
        "hidden_act": "silu",
        "hidden_size": 192,
        "initializer_range": 0.04,
        "intermediate_size": 512,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": 6,
        "model_type": "qwen3",
        "num_attention_heads": 6,
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
    }, [stop, end]


def batches(lengths, tokens, seed):
    """Endless batches of document numbers of about one length: (numbers, padded length)."""
    edges = [24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 512, 640, 768, MAX_DOCUMENT]
    bucket, rng = np.searchsorted(edges, lengths), np.random.default_rng(seed)
    while True:
        epoch = []
        for b, edge in enumerate(edges):
            docs = rng.permutation(np.nonzero(bucket == b)[0])
            rows = max(1, tokens // edge)
            epoch += [(docs[i : i + rows], edge) for i in range(0, len(docs), rows)]
        for i in rng.permutation(len(epoch)):
            yield epoch[i]


def train(model, corpus, args, device):
    import torch
    import torch.nn.functional as F

    ids, weights, lengths = corpus
    starts = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)])
    pad = np.zeros(MAX_DOCUMENT + 1)
    ids = torch.from_numpy(np.concatenate([ids, pad.astype(np.int16)])).to(device)
    weights = torch.from_numpy(np.concatenate([weights, pad.astype(np.uint8)])).to(device)
    starts, sizes = torch.from_numpy(starts).to(device), torch.from_numpy(lengths.astype(np.int64)).to(device)
    decay = [p for p in model.parameters() if p.dim() == 2 and p is not model.get_input_embeddings().weight]
    other = [p for p in model.parameters() if all(p is not q for q in decay)]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
        lr=args.lr,
        betas=(0.9, 0.98),
        eps=1e-8,
        fused=device == "cuda",
    )
    model.train()
    began, step, seen, mean, log = time.time(), 0, 0, None, []
    limit, report = 60 * args.minutes, 0.0
    for docs, length in batches(lengths, args.batch_tokens, args.seed):
        done = step / args.steps if args.steps else (time.time() - began) / limit
        if done >= 1:
            break
        for g in opt.param_groups:  # short warm-up, then a cosine down to nothing
            g["lr"] = args.lr * min(1, (step + 1) / 200) * (0.5 + 0.5 * math.cos(math.pi * done))
        docs = torch.from_numpy(docs).to(device, non_blocking=True)
        at = torch.arange(length, device=device)
        index = starts[docs, None] + at
        inside = at < sizes[docs, None]
        x = ids[index].long() * inside
        w = (weights[index] * inside)[:, 1:].float() / 10
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=x[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten(), reduction="none")
        loss = (loss * w.flatten()).sum() / w.sum().clamp(min=1)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        step += 1
        seen += docs.numel() * length
        if step % 50 == 0 or args.steps and step == args.steps:
            value = loss.item()  # waits for the device, so that the clock above is right
            mean = value if mean is None else 0.8 * mean + 0.2 * value
            if done >= report:
                log.append({"step": step, "loss": round(mean, 4), "seconds": round(time.time() - began)})
                print(
                    f"  step {step:6d}  loss {mean:.4f}  {seen / (time.time() - began) / 1e6:.2f} M tokens/s",
                    flush=True,
                )
                report += 0.05
    model.eval()
    return {"steps": step, "seconds": round(time.time() - began), "tokens_seen_with_padding": seen, "log": log}


# -------------------------------------------------------------------------------------------------------- evaluation
def evaluation_set(seed, n):
    """Prompts that the training text does not contain: name -> list of (prompt, is the answer right?)."""
    w = World(seed, held=True)
    r = w.r
    sets = {
        k: []
        for k in "arithmetic arithmetic_plain facts json stories stories_plain follow_up memory tools brief no_thinking".split()
    }

    def ask(*messages, tools=None, think=False):
        return text_of(chatml(list(messages), tools, think, generation=True))

    def equals(want):
        return lambda got: got.strip() == want

    def parsed(want):
        def check(got):
            try:
                return json.loads(got) == want
            except ValueError:
                return False

        return check

    def story_with(must):
        def check(got):
            others = {n for n in NAME_LIST if re.search(rf"\b{n}\b", got)} - set(must)
            return all(re.search(rf"\b{m}\b", got) for m in must) and len(others) <= 2 and len(got) > 150

        return check

    def some_system(*messages):
        return ([("system", w.system())] if r.random() < 0.4 else []) + list(messages)

    while len(sets["arithmetic"]) < n:
        q, long, short = w.arithmetic()
        if not re.search(r"times|\*", q):
            sets["arithmetic"].append((ask(*some_system(("user", q))), equals(long)))
    for _ in range(n):
        op = r.choice("+-")
        a, b = w.numbers(op)
        sets["arithmetic_plain"].append((f"{a} {op} {b} =", equals(str(a + b if op == "+" else a - b))))
        q, long, short = w.fact()
        sets["facts"].append((ask(*some_system(("user", q))), equals(long)))
        q, long, short = w.fact()
        sets["brief"].append((ask(("system", r.choice(BRIEF)), ("user", q)), equals(short)))
        q, long, short = r.choice([w.fact, w.arithmetic])()
        sets["no_thinking"].append((ask(("user", q), think=True), equals(long)))
        q, a, value = w.json_task()
        sets["json"].append((ask(*some_system(("user", q))), parsed(value)))
        q, text, qa, must = w.story_task()
        sets["stories"].append((ask(*some_system(("user", q))), story_with(must)))
        words = text.split()
        sets["stories_plain"].append((" ".join(words[: r.randint(3, 12)]), lambda got: len(got) > 100))
        q2, long, _ = r.choice(qa)
        sets["follow_up"].append((ask(("user", q), ("assistant", text), ("user", q2)), equals(long)))
        me = w.name()
        talk = [("user", f"My name is {me}."), ("assistant", f"Nice to meet you, {me}!")]
        for _ in range(r.randint(0, 3)):
            q, long, _ = r.choice([w.fact, w.arithmetic])()
            talk += [("user", q), ("assistant", long)]
        sets["memory"].append((ask(*talk, ("user", "What is my name?")), equals(f"Your name is {me}.")))
        tools, messages = w.tool_chat()
        sets["tools"].append((ask(*messages[:-1], tools=tools), equals(messages[-1][1])))
    return sets


def complete(model, tok, prompts, stop, device, limit=200, sample=False, rows=400):
    """Continuations of the prompts: (text without the end token, did it end by itself?)."""
    import torch

    out = []
    for i in range(0, len(prompts), rows):
        ids = [tok.encode(p, add_special_tokens=False).ids for p in prompts[i : i + rows]]
        longest = max(map(len, ids))
        x = torch.tensor([[stop[1]] * (longest - len(p)) + p for p in ids], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in ids], device=device)
        how = (
            dict(do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
            if sample
            else dict(do_sample=False, temperature=None, top_k=None, top_p=None)
        )
        y = model.generate(x, attention_mask=mask, max_new_tokens=limit, eos_token_id=stop, pad_token_id=stop[1], **how)
        for row in y[:, longest:].tolist():
            cut = next((j for j, t in enumerate(row) if t in stop), None)
            out.append((tok.decode(row[:cut], skip_special_tokens=False), cut is not None))
    return out


def evaluate(out, stop, device, n, seed, sampled=True):
    """Scores of the saved folder: greedy in float32 from the bf16 weights, then in bf16, then sampled."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tok = Tokenizer.from_file(str(out / "tokenizer.json"))
    sets, scores, wrong = evaluation_set(seed, n), {}, {}
    for how in ["greedy", "greedy_bf16_compute"] + ["sampled"] * sampled:
        model = (
            AutoModelForCausalLM.from_pretrained(
                str(out), dtype=torch.float32 if how != "greedy_bf16_compute" else torch.bfloat16
            )
            .to(device)
            .eval()
        )
        torch.manual_seed(seed)
        row = {}
        for name, cases in sets.items():
            got = complete(model, tok, [p for p, _ in cases], stop, device, sample=how == "sampled")
            good = [right(text) and ended for (_, right), (text, ended) in zip(cases, got)]
            row[name] = round(sum(good) / len(good), 4)
            if "stories" in name:
                row[name + "_end_by_themselves"] = round(sum(e for _, e in got) / len(got), 4)
            if how == "greedy":
                wrong[name] = [
                    {"prompt": c[0][-160:], "got": g[0][-200:]} for c, g, ok in zip(cases, got, good) if not ok
                ][:4]
        scores[how] = row
        print(how, json.dumps(row), flush=True)
    return {"prompts_per_set": n, "scores": scores}, wrong


# --------------------------------------------------------------------------------------------------------------- main
def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny-qwen3")
    ap.add_argument("--minutes", type=float, default=5, help="wall-clock time of the training loop (5)")
    ap.add_argument("--steps", type=int, help="number of steps instead of a time")
    ap.add_argument("--docs", type=int, default=1_000_000, help="documents to write (1000000)")
    ap.add_argument("--batch-tokens", type=int, default=65536, help="tokens in a batch (65536)")
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--eval", type=int, default=400, help="held-out prompts of each kind (400)")
    ap.add_argument("--evaluate-only", action="store_true")
    ap.add_argument("--workers", type=int, default=os.cpu_count())
    args = ap.parse_args()
    import tokenizers
    import torch
    import transformers
    from safetensors.torch import save_file

    transformers.utils.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = args.out
    config, stop = model_config()
    if args.evaluate_only:
        print(json.dumps(evaluate(out, stop, device, args.eval, args.seed + 77), indent=1, ensure_ascii=False))
        return
    out.mkdir(parents=True, exist_ok=True)
    clock = time.time()
    tok = make_tokenizer(out, args.seed + 5)
    write_json(out / "config.json", config)
    check_template(out, tok, args.seed + 6)
    print(f"tokenizer: {time.time() - clock:.0f} s", flush=True)
    clock = time.time()
    corpus = make_corpus(out, args.docs, args.seed, args.workers)
    print(
        f"corpus: {len(corpus[2])} documents, {len(corpus[0])} tokens, longest {corpus[2].max()}: {time.time() - clock:.0f} s",
        flush=True,
    )

    torch.manual_seed(args.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(str(out)), dtype=torch.float32, attn_implementation="sdpa"
    ).to(device)
    with torch.no_grad():  # residual branches start small
        for name, p in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.mul_((2 * config["num_hidden_layers"]) ** -0.5)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters} parameters on {device}", flush=True)
    trained = train(model, corpus, args, device)
    save_file(
        {
            k: v.detach().to("cpu", torch.bfloat16).contiguous()
            for k, v in sorted(model.state_dict().items())
            if k != "lm_head.weight"
        },
        str(out / "model.safetensors"),
        metadata={"format": "pt"},
    )
    (out / "model.safetensors").chmod(0o644)

    generation = {
        "bos_token_id": stop[1],
        "do_sample": False,
        "eos_token_id": stop,
        "pad_token_id": stop[1],
        "transformers_version": "4.51.0",
    }
    write_json(out / "generation_config.json", generation)
    measured, wrong = evaluate(out, stop, device, args.eval, args.seed + 77)
    greedy, sampled = measured["scores"]["greedy"], measured["scores"]["sampled"]
    if all(sampled[k] >= greedy[k] - 0.005 for k in greedy if "plain" not in k):  # sampling costs nothing in chats
        write_json(
            out / "generation_config.json",
            generation | {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
        )  # as Qwen3 publishes
    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    write_json(
        out / "metrics.json",
        {
            "parameters": parameters,
            "command": " ".join(["python", "train_tiny_qwen3.py"] + sys.argv[1:]),
            "seed": args.seed,
            "device": gpu,
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "tokenizers": tokenizers.__version__,
            },
            "documents": len(corpus[2]),
            "tokens": len(corpus[0]),
            "training": trained,
            **measured,
        },
    )
    for name, rows in wrong.items():
        for w in rows:
            print("WRONG", name, json.dumps(w, ensure_ascii=False))


if __name__ == "__main__":
    main()
