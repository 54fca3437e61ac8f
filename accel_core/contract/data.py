"""The answer of the hook `data_source`: how a library's loader gives readers their data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


@frozen(kw_only=True, eq=False)
class DataSource:
    """How a library's loader or dataset gives this rank its data."""

    library: str
    """Name of the library, for messages."""
    loader: DataLoader[Any]
    """The loader that is read: the user's, or one that stands for it.

    `set_epoch`, if the loader has it, is called with the number of each epoch. A loader with `state_dict` and
    `load_state_dict` resumes by its own state, which is the state after the batch that it returned last.
    """
    shares_itself: bool | None
    """True if each reader's loader gives another part of the data; False if core shares the data out.

    None: nobody knows, and core guesses.
    """
    resumes_anywhere: bool = False
    """True if any number of readers and workers can continue from the loader's state."""
