"""xserv_ray: serves a model of xserv as replicas of Ray Serve, by the application of xserv_server.

    serve run xserv_ray.app:build model=path/to/folder replicas=2

or build(), for a program or a configuration file of Ray Serve's.
"""

from .app import Arguments, build

__all__ = ["Arguments", "build"]
