"""A conversation that a model shall go on with, as chat completions and responses ask for it; knows no wire format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import ContextLengthError, GrammarError
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.messages import Message
from edgeinfer.openai.pieces import Reader
from edgeinfer.openai.tools import ToolUse

if TYPE_CHECKING:
    from edgeinfer.api import Model
    from edgeinfer.generation import TokenStream

__all__ = ["ChatPrompt", "reply_options"]

_SEEDS = 2**64


@dataclass(frozen=True)
class ChatPrompt:
    """What a reply is asked for with.

    Attributes:
        messages: as they were sent.
        tools: what may be called.
        options: of GenerationConfig, for the first reply.
        variables: further names for the chat template.
        begun: what the reply already says.
        form: the request's field that asks for a form of the reply, for errors.
    """

    messages: Sequence[Message]
    tools: ToolUse
    options: Mapping[str, Any]
    variables: Mapping[str, Any] | None = None
    begun: str = ""
    form: str = "response_format"

    def start(self, model: Model, index: int) -> tuple[TokenStream, Reader]:
        """Begins one of the replies.

        Raises:
            RequestError: the form of the reply cannot be had.
            PromptError, ContextLengthError, TemplateError, UsageError: as `Model.stream_chat`.
        """
        options = reply_options(self.tools.options(model, self.options), index)
        try:
            stream = model.stream_chat(
                self.tools.messages(self.messages),
                tools=self.tools.template_tools,
                variables=self.variables,
                begun=self.begun,
                **options,
            )
        except GrammarError as error:
            own = next((name for name in ("regex", "grammar") if name in self.options), self.form)
            param = "tools" if self.tools.calls else own
            raise RequestError(error.message, error.hint, param=param, code="unsupported_schema") from error
        except ContextLengthError as error:
            code = "context_length_exceeded"
            raise RequestError(error.message, error.hint, param="messages", code=code) from error
        return stream, self.tools.reader(model)


def reply_options(options: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Options for one of several replies to a prompt: each draws by a seed of its own."""
    seed = options.get("seed")
    return dict(options) if seed is None else {**options, "seed": (seed + index) % _SEEDS}
