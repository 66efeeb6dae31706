"""The folder where the app keeps what is the user's own, by the custom of the system."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgeinfer.errors import StorageError
from edgeinfer.user_folders import user_data


@dataclass(frozen=True)
class DataFolder:
    """A data folder and the names in it.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def history(self) -> Path:
        """The database of conversations."""
        return self.path / "history.sqlite3"

    @property
    def settings(self) -> Path:
        """What the user set."""
        return self.path / "settings.json"

    @property
    def models(self) -> Path:
        """A folder for bundles and GGUF files; it need not exist."""
        return self.path / "models"

    def make(self) -> None:
        """Makes the folder, for this user only."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            hint = "Name another folder with --data."
            raise StorageError(f"{self.path} cannot be made: {error.strerror}.", hint) from error


def data_folder() -> DataFolder:
    """This user's data folder of the app; it need not exist."""
    return DataFolder(user_data() / "edgeinfer")
