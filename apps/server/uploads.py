"""Bodies of requests while they are received and read: how many there are at once, of whom, and how large together.

Where there are too many, the one that came on worst of whoever has the most is given up, so that a body that arrives
at once always finds a place. Knows nothing of HTTP messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator

from edgeinfer.apps.server.security import Security
from edgeinfer.openai.errors import RequestError

__all__ = ["Upload", "Uploads"]

# Reading a larger body takes long enough for others to notice: one such is read at a time.
_LARGE = 64 * 1024
# Clients that wait for their refusals, each of whom keeps a connection.
_MOST_PUT_OFF = 256
_HINT = "Try again in a moment."


class Uploads:
    """The bodies that are in hand.

    Args:
        security: says how many there may be, and how fast they must come.
    """

    def __init__(self, security: Security) -> None:
        self._security = security
        self._unfinished: set[Upload] = set()
        self._held = 0
        self._put_off = 0
        self._reading = asyncio.Lock()

    def begin(self, address: str) -> Upload:
        """A body that somebody is going to send."""
        upload = Upload(self, address, self._security)
        self._unfinished.add(upload)
        self._make_room(upload)
        return upload

    def _make_room(self, latest: Upload) -> None:
        """Gives up unfinished bodies until what is left is within the limits.

        Raises:
            RequestError: the latest is the one that has to go.
        """
        while (worst := self._worst(latest)) is not None:
            worst.give_up()
            if worst is latest:
                raise RequestError("The server is taking in as much as it can.", _HINT, status=503, code="server_busy")

    def _worst(self, latest: Upload) -> Upload | None:
        """Who has to go; nobody while all are within the limits."""
        security, unfinished = self._security, self._unfinished
        if unfinished:
            address, most = Counter(upload.address for upload in unfinished).most_common(1)[0]
            if len(unfinished) > security.max_uploads or most > security.max_uploads_each:
                rivals = [upload for upload in unfinished if upload.address == address]
                return min(rivals, key=lambda upload: (upload is latest, upload.deadline))
        if self._held <= max(security.max_held, security.max_body):
            return None
        # What is complete is not taken back; one of many bytes goes before many of few.
        return max((*unfinished, latest), key=lambda upload: upload.size)

    async def put_off(self) -> None:
        """Lets a client wait to hear that its body was refused: who begins again at once costs others less so."""
        if self._put_off >= _MOST_PUT_OFF:
            return
        self._put_off += 1
        try:
            # Those who were refused at once shall not come again at once.
            await asyncio.sleep(self._security.refusal_seconds * random.uniform(0.5, 1.5))
        finally:
            self._put_off -= 1

    @contextlib.asynccontextmanager
    async def _turn(self, size: int) -> AsyncIterator[None]:
        if size <= _LARGE:
            yield
            return
        async with self._reading:
            yield


class Upload:
    """One body.

    Attributes:
        address: who sends it.
        size: bytes so far.
        deadline: by the event loop's clock, when more of it must have come.
    """

    def __init__(self, uploads: Uploads, address: str, security: Security) -> None:
        self._uploads = uploads
        self._rate = security.body_rate
        self._waiting: asyncio.Timeout | None = None
        self.address = address
        self.size = 0
        self.deadline = asyncio.get_running_loop().time() + security.body_seconds

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """While the next part is waited for.

        Raises:
            TimeoutError: it did not come in time, or the body was given up in favour of others.
        """
        try:
            async with asyncio.timeout_at(self.deadline) as self._waiting:
                yield
        finally:
            self._waiting = None

    def add(self, nbytes: int, *, last: bool) -> None:
        """A part has come; each byte gives its sender more time.

        Raises:
            RequestError: there is no room for it.
        """
        self.size += nbytes
        self._uploads._held += nbytes
        self.deadline += nbytes / self._rate
        if last:
            self._uploads._unfinished.discard(self)
        self._uploads._make_room(self)

    def give_up(self) -> None:
        """Ends it, so that there is room for others."""
        self.end()
        self.deadline = 0.0  # which every clock is past
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(self.deadline)

    def read(self) -> contextlib.AbstractAsyncContextManager[None]:
        """While something is made of it; of large ones, one at a time."""
        return self._uploads._turn(self.size)

    def end(self) -> None:
        """What it held is free; any number of times."""
        self._uploads._unfinished.discard(self)
        self._uploads._held -= self.size
        self.size = 0
