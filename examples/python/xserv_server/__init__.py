"""xserv_server: serves a model of xserv over HTTP, as OpenAI's interface has it.

    xserv-server path/to/folder
    python -m xserv_server path/to/folder

or create_app(), for an ASGI server of your own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app
    from .settings import Settings

__all__ = ["Settings", "create_app"]


def __getattr__(name: str) -> Any:
    # They are read when they are used, so that the command can say which packages are missing.
    if name not in __all__:
        raise AttributeError(f"module 'xserv_server' has no attribute {name!r}")
    from . import app

    return getattr(app, name)
