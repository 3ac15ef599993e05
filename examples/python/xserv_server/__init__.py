"""xserv_server: serves a model of xserv over HTTP, as OpenAI's interface has it.

    xserv-server path/to/folder
    python -m xserv_server path/to/folder

or create_app(), for an ASGI server of your own.
"""

from .app import create_app
from .settings import Settings

__all__ = ["Settings", "create_app"]
