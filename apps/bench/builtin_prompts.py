"""A dozen dialogues written for the built-in story model; knows nothing of data sets or models."""

from __future__ import annotations

__all__ = ["BUILTIN_DIALOGUES"]

Dialogue = tuple[dict[str, str], ...]

_KITE = (
    "One windy day, a girl named Nora went to the hill with her red kite. The kite flew high, high up into the sky. "
    "Nora laughed and ran with the string in her hand.\nThen the wind grew strong and pulled the kite into a tall "
    'tree. Nora was sad. "My kite is stuck!" she said. A big boy named Paul heard her. He climbed up the tree and '
    'gave the kite back to her.\nNora said, "Thank you, Paul! Do you want to fly it with me?" They flew the kite '
    "together until it was time to go home."
)
_TURTLE = (
    "Once upon a time, there was a little turtle named Otto. Otto lived near a pond and wanted to see the big lake. "
    "All the other animals said that it was too far for a turtle.\nOne morning, Otto started to walk. He walked past "
    "the old tree and past the farm. He was slow, but he did not stop. In the evening he saw the lake. The water was "
    'blue and very big.\nOtto was happy. "I am slow," he said, "but I can go far."'
)
_SOUP = (
    "Grandma and Lena made soup in the kitchen. Lena put in carrots, and Grandma put in salt. Then Lena put in more "
    'salt because she did not know.\nWhen they tasted the soup, they made a funny face. "Oh no, it is too salty!" '
    "said Lena. Grandma smiled. She put in water and potatoes, and soon the soup was good again.\nThey ate two bowls "
    "each, and the cat got a little fish."
)


def _asked(request: str) -> Dialogue:
    return ({"role": "user", "content": request},)


def _after(name: str, story: str, request: str) -> Dialogue:
    """A request about a story that the model has told."""
    told = ({"role": "user", "content": f"Tell me a story about {name}."}, {"role": "assistant", "content": story})
    return (*told, *_asked(request))


BUILTIN_DIALOGUES: tuple[tuple[str, Dialogue], ...] = (
    ("write", _asked("Write a story with the words boat, brave and sleep.")),
    ("write", _asked("Write a story with the words cake, share and happy.")),
    ("write", _asked("Write a story with the words snow, lost and friend.")),
    ("write", _asked("Tell me a story about Mia.")),
    ("retell", _after("Nora", _KITE, "Tell it again, but call Nora Ella.")),
    ("retell", _after("Otto", _TURTLE, "Tell it again, but call Otto Max.")),
    ("retell", _after("Lena", _SOUP, "Tell it again, but call Lena Sara.")),
    ("again", _after("Nora", _KITE, "Tell it again.")),
    ("again", _after("Otto", _TURTLE, "Tell it again.")),
    ("who", _after("Nora", _KITE, "Who is in the story?")),
    ("who", _after("Lena", _SOUP, "Who is in the story?")),
    ("start", _after("Otto", _TURTLE, "How does the story start?")),
)
