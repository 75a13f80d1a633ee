# SPDX-License-Identifier: Apache-2.0
"""Words and sentences made by rule: the same on every machine, and of no one's text.

Nothing here reads a file. All draw from the `random.Random` that they are given and from nothing else.
"""

from __future__ import annotations

import random

ADJECTIVES = """able abrupt absent adult agile alert amber ample angry arid awake bald bitter bland blue bold brave
brief bright brisk broad broken bronze busy calm careful cheap clean clever cloudy coarse cold common cool costly
crisp crooked cruel curious curved damp dark dear deep dense dim distant dizzy dry dull dusty eager early easy elastic
elegant empty even exact faint fair famous fancy fast fierce fine firm flat fluffy foolish fragile frank fresh frozen
full funny gentle giant glad gloomy golden grand grave greasy green grim handy happy harsh hasty heavy helpful hidden
hollow honest hot huge humble hungry icy idle jolly keen kind large late lavish lazy lean light little lively lonely
long loose loud lovely lucky mellow mighty mild misty modern modest narrow neat nervous nimble noble noisy odd old
orange pale patient plain polite poor proper proud puny purple quick quiet rapid rare raw ready real rich rigid ripe
robust rough round royal rude rusty sad salty scarce shallow sharp shiny short shy silent silly simple sleepy slim
slow small smooth sober soft solid sore sour spare spicy steady steep stiff stormy strange strict sturdy subtle sudden
sunny sweet swift tall tame tart tender thick thin thirsty tidy tight tiny tired tough tranquil true unusual upbeat
upset urban useful vague valid vast violet vivid warm weak weary wet white wicked wide wild windy wise witty wooden
worried worthy yellow young zealous""".split()

NOUNS = """account acorn actor address advice airport alley almond anchor angle ankle answer apple apron arch arrow
artist atlas attic aunt autumn axis bacon badge bakery balloon bamboo banana bandage banker barn barrel basin basket
battery beach beacon bean bear beaver bedroom beetle bell bench bicycle biscuit blanket blossom boat border bottle
boulder bowl bracket branch bread breeze brick bridge broom brother bubble bucket buffalo builder bundle bush butter
button cabin cabinet cable cactus cake camel camera canal candle canoe canvas captain carpet carrot castle cat cattle
cave ceiling cellar chair chalk channel cherry chest chicken chimney circle circus citizen clerk cliff climate clock
cloud clover coach coast coffee collar college column comet copper coral corner cotton cousin cradle crane crater
cricket crown crystal cup curtain cushion dancer deer desert diamond dinner doctor dolphin donkey door dragon drawer
dream driver drum eagle ear easel echo editor elbow elephant engine envelope evening fabric factory falcon farmer
feather fence ferry fiddle field finger fire flag flame flour flower flute forest fork fountain fox frog furnace
galaxy garage garden garlic gate giraffe glacier glass glove goat grape grass guitar hammer harbor hat hawk hedge
helmet hill honey hook horse hotel house hunter iron island ivory jacket jar jelly jewel judge jungle kettle kitchen
kite knee knight ladder lake lamp lantern lawyer leaf lemon letter library lily lizard lobster locket machine magnet
mango maple marble market meadow medal melon mirror monkey moon mountain mouse museum mustard napkin needle nest
notebook oak oasis ocean office olive onion orchard organ otter oven owl oyster paddle painter palace panda paper
parade parrot pasta pastry peach peanut pebble pencil pepper piano picture pigeon pillow pilot pine pirate planet
plate plow pocket poem pond pony potato powder prince pumpkin puzzle quarry queen rabbit radio raft railway rain raven
ribbon rice ring river robin rocket roof rope rose sailor salad salt sand satchel school scooter sculptor seal season
shadow sheep shelf shell ship shirt shoe shovel signal silk silver singer sister sketch sleeve smoke snail snow soap
sofa soldier song soup spider spoon spring square squirrel stable stairs star station statue stone story stove stream
street student sugar summer sunset swallow table tailor teacher temple tent theater thumb ticket tiger timber toast
tomato tower trail train treasure tree trumpet tunnel turkey turtle uncle valley vase vessel village violin volcano
wagon wallet walnut water weather whale wheat wheel whistle window winter wizard wolf wool worker yard
zebra""".split()

VERBS = """carried counted crossed described found followed forgot guarded heard held joined kept learned left lifted
liked lost measured mended missed moved named needed noticed opened painted passed planned praised reached remembered
repaired sold studied told touched turned visited wanted watched wrote""".split()

PLACES = """above the market|across the river|after dinner|along the coast|at noon|behind the old mill|before the
storm|by the gate|during the winter|for many years|from the north|in the evening|in the middle of town|near the
station|on the way home|out of habit|over the hill|past the harbor|under the bridge|with great care|without a word|at
the end of the week""".replace("\n", " ")

SENTENCES = ("The {a} {n} {v} the {n2} {p}.", "Nobody {v} the {n} that stood beside a {a} {n2}.",
             "It was the {n}, not the {n2}, that the {a} {n3} {v} {p}.",
             "Every {n} has its {a} side, and people know it.",
             "A {a} {n} and a {a2} {n2} were all that we {v} {p}.", "When the {n} came back, the {a} {n2} had gone.",
             "Most people think of the {n} as {a}, but in truth it is {a2}.", "She {v} the {n}, and then the {n2} too.",
             "If you ask about the {n}, they will show you a {a} {n2}.", "There is a {n} {p}, {a} and {a2} as ever.",
             "What the {n} {v} is less important than what the {n2} did.",
             "Did anyone see how the {a} {n} {v} the {n2}?",
             "In those days a {n} cost as much as a {a} {n2}, or a little more.",
             "They {v} it {p}, as the {a} {n} had asked.",
             "One could say that the {n} is {a} because the {n2} is {a2}.", "{p2}, the {n} was {a} again.")

_ONSETS = "b br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sk sl sp st t th tr v w wh y z".split()
_VOWELS = "a a e e i i o o u ai ea ee ie oa oo ou".split()
_ENDS = "b ck ct d ft g l ld ll m mp n nd ng nk nt p r rd rk rm rn rt s sh ss st t th x".split() + [""] * 12
_SUFFIXES = ["", "", "er", "le", "ing", "ness", "ful", "ous", "ic", "al", "ist", "ment", "ion", "y"]


def made_word(draw: random.Random) -> str:
    """Pronounceable, one to three syllables and often an ending: as long in tokens as rare English words are."""
    syllables = [draw.choice(_ONSETS) + draw.choice(_VOWELS) + draw.choice(_ENDS)
                 for _ in range(draw.choice((1, 1, 2, 2, 3)))]
    return "".join(syllables) + draw.choice(_SUFFIXES)


def key(draw: random.Random) -> str:
    """What a needle is named by: adjective-noun, each in a third of the cases a made word."""
    adjective = draw.choice(ADJECTIVES) if draw.random() < 2 / 3 else made_word(draw)
    noun = draw.choice(NOUNS) if draw.random() < 2 / 3 else made_word(draw)
    return f"{adjective}-{noun}"


def sentences(draw: random.Random, count: int) -> list[str]:
    """Plain English by grammar, of about 13 words each."""
    places = PLACES.split("|")
    return [draw.choice(SENTENCES).format(
        a=draw.choice(ADJECTIVES), a2=draw.choice(ADJECTIVES), n=draw.choice(NOUNS), n2=draw.choice(NOUNS),
        n3=draw.choice(NOUNS), v=draw.choice(VERBS), p=draw.choice(places), p2=draw.choice(places).capitalize())
        for _ in range(count)]
