"""Texts for models to read and answer: the stories of a file, and stories and dialogues that are built in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import edgeinfer
from edgeinfer.errors import UsageError

SEPARATOR = "<|endoftext|>"
Dialogue = tuple[dict[str, str], ...]


def all_stories(path: Path) -> list[str]:
    """Every story of a text file."""
    hint = f"Give UTF-8 text with stories separated by {SEPARATOR}."
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read {path}: {error}.", hint) from error
    stories = [story.strip() for story in text.split(SEPARATOR) if story.strip()]
    if not stories:
        raise UsageError(f"{path} has no stories.", hint)
    return stories


def read_stories(path: Path, count: int, skip: int = 0) -> list[str]:
    """The last `count` stories of a text file, without the `skip` that come after them."""
    if count < 1 or skip < 0:
        raise UsageError("There must be at least one story.", "Give --stories 1 or more, --skip 0 or more.")
    stories = all_stories(path)
    chosen = stories[: len(stories) - skip][-count:]
    if not chosen:
        raise UsageError(f"{path} has no stories but those that are skipped.", "Skip fewer.")
    return chosen


def story_ids(model: edgeinfer.Model, story: str) -> list[int]:
    """A story after the begin token, which most tokenizers put there themselves, cut at the model's context."""
    begin, ids = model.begin_ids, model.tokenize(story, parse_special=False)
    return (ids if ids[: len(begin)] == begin else begin + ids)[: model.context]


def calibration_text(stories: Iterable[str]) -> str:
    """Stories as the export command takes texts: its paragraphs are texts of their own, so a story must be one."""
    paragraphs = ("\n".join(line for line in story.splitlines() if line.strip()) for story in stories)
    return "\n\n".join(paragraphs) + "\n"


@dataclass(frozen=True)
class Story:
    """A story.

    Attributes:
        hero: a name in it.
        other: a name that is not.
        alone: whether no one else in it is named.
    """

    hero: str
    other: str
    text: str
    alone: bool = True

    @property
    def start(self) -> str:
        """Its first sentence."""
        return self.text.partition(".")[0] + "."


KITE = Story(
    "Nora",
    "Ella",
    "One windy day, a girl named Nora went to the hill with her red kite. The kite flew high, high up into the sky. "
    "Nora laughed and ran with the string in her hand.\nThen the wind grew strong and pulled the kite into a tall "
    'tree. Nora was sad. "My kite is stuck!" she said. A big boy named Paul heard her. He climbed up the tree and '
    'gave the kite back to her.\nNora said, "Thank you, Paul! Do you want to fly it with me?" They flew the kite '
    "together until it was time to go home.",
    alone=False,
)
TURTLE = Story(
    "Otto",
    "Max",
    "Once upon a time, there was a little turtle named Otto. Otto lived near a pond and wanted to see the big lake. "
    "All the other animals said that it was too far for a turtle.\nOne morning, Otto started to walk. He walked past "
    "the old tree and past the farm. He was slow, but he did not stop. In the evening he saw the lake. The water was "
    'blue and very big.\nOtto was happy. "I am slow," he said, "but I can go far."',
)
SOUP = Story(
    "Lena",
    "Sara",
    "Grandma and Lena made soup in the kitchen. Lena put in carrots, and Grandma put in salt. Then Lena put in more "
    'salt because she did not know.\nWhen they tasted the soup, they made a funny face. "Oh no, it is too salty!" '
    "said Lena. Grandma smiled. She put in water and potatoes, and soon the soup was good again.\nThey ate two bowls "
    "each, and the cat got a little fish.",
    alone=False,
)
_DOG = Story(
    "Tom",
    "Ben",
    "Once upon a time, there was a boy named Tom. Tom had a small dog. The dog liked to dig in the garden.\nOne day, "
    "the dog found a shiny box. Tom opened the box and saw a toy car. Tom was very happy. He played with the car and "
    "the dog all day.",
)
_BIRD = Story(
    "Lily",
    "Anna",
    "Once upon a time, there was a girl named Lily. Lily saw a little bird on the grass. The bird could not fly."
    '\n"I will help you," said Lily. She gave the bird some water and some bread. The next day the bird was strong. '
    "It flew up to the sky and sang a song for Lily.",
)
_BOAT = Story(
    "Sam",
    "Tim",
    "Sam had a blue boat. He put the boat in the pond in the park. The wind blew, and the boat went far away.\nSam "
    'was sad. A duck saw the boat and pushed it back to him. "Thank you, duck!" said Sam. He gave the duck a piece of '
    "bread, and they were friends.",
)
_CAKE = Story(
    "Mia",
    "Lucy",
    "It was a sunny day. Mia wanted to bake a cake for her mom. She put eggs and flour in a big bowl. The kitchen was "
    'a mess.\nHer mom came in and smiled. "Let us clean up together," she said. They cleaned the kitchen, and then '
    "they ate the cake. Mia was proud.",
)
_BEAR = Story(
    "Bob",
    "Jack",
    "Once upon a time, there was a big bear named Bob. Bob lived in the forest. He was always hungry.\nOne day, Bob "
    "found a tree with honey. The bees were angry and flew around him. Bob ran into the river and hid in the water. "
    'When the bees were gone, he said, "Next time I will ask first."',
)
_SNOW = Story(
    "Anna",
    "Lily",
    "Anna woke up and saw that the whole garden was white. She put on her hat and her coat and ran outside. She made "
    "a big snowman with a carrot nose.\nAt night it was very cold. Anna looked out of the window. The snowman was "
    "still there, and the moon was above him. She said good night and went to bed.",
)
_FROG = Story(
    "Fred",
    "Tim",
    "Once upon a time, there was a green frog named Fred. Fred could jump very high. One day, he jumped over a log "
    'and met a snail.\n"I wish I could jump," said the snail. Fred said, "You can sit on my back." The snail sat on '
    "his back, and they jumped together. They laughed and laughed.",
)
BUILTIN_STORIES = (KITE, TURTLE, SOUP, _DOG, _BIRD, _BOAT, _CAKE, _BEAR, _SNOW, _FROG)


def _asked(request: str) -> Dialogue:
    return ({"role": "user", "content": request},)


def _after(story: Story, request: str) -> Dialogue:
    """A request about a story that the model has told."""
    told = (
        {"role": "user", "content": f"Tell me a story about {story.hero}."},
        {"role": "assistant", "content": story.text},
    )
    return (*told, *_asked(request))


def _renamed(story: Story) -> Dialogue:
    return _after(story, f"Tell it again, but call {story.hero} {story.other}.")


BUILTIN_DIALOGUES: tuple[tuple[str, Dialogue], ...] = (
    ("write", _asked("Write a story with the words boat, brave and sleep.")),
    ("write", _asked("Write a story with the words cake, share and happy.")),
    ("write", _asked("Write a story with the words snow, lost and friend.")),
    ("write", _asked("Tell me a story about Mia.")),
    ("retell", _renamed(KITE)),
    ("retell", _renamed(TURTLE)),
    ("retell", _renamed(SOUP)),
    ("again", _after(KITE, "Tell it again.")),
    ("again", _after(TURTLE, "Tell it again.")),
    ("who", _after(KITE, "Who is in the story?")),
    ("who", _after(SOUP, "Who is in the story?")),
    ("start", _after(TURTLE, "How does the story start?")),
)


def _exact(story: Story) -> Iterator[tuple[str, Dialogue, str]]:
    yield "retell", _renamed(story), story.text.replace(story.hero, story.other)
    yield "again", _after(story, "Tell it again."), story.text
    yield "start", _after(story, "How does the story start?"), story.start
    if story.alone:
        yield "who", _after(story, "Who is in the story?"), f"{story.hero}."


# By kind, with the answer that the request leaves no choice about.
EXACT_DIALOGUES = tuple(dialogue for story in BUILTIN_STORIES for dialogue in _exact(story))
