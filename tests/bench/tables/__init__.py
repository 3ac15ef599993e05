"""Tables of what the library does on this machine; see command.py."""
