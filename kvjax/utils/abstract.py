"""Members that a subclass has to define."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Member = TypeVar("Member", bound=Callable[..., Any])


def abstract(member: Member) -> Member:
    """Marks a member of a base class that every subclass which is asked for it defines.

    `abc.abstractmethod` would refuse a subclass when a value of it is made. A component may do without a member that
    nothing asks it for, or leave it to the component that its method `at` returns.

    Raises:
      NotImplementedError: the member is called on a class that does not define it.
    """

    @functools.wraps(member)
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no method `{member.__name__}`")

    return refuse  # type: ignore[return-value]
