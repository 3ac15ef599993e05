"""python -m xserv_server MODEL, which is xserv-server MODEL."""

import sys


def main() -> int:
    """Runs the command, or says which packages it lacks."""
    try:
        from .cli import main as serve
    except ModuleNotFoundError as error:
        print(f"xserv-server: {error}. It needs: pip install 'xserv[server]'", file=sys.stderr)
        return 1
    return serve()


if __name__ == "__main__":
    sys.exit(main())
