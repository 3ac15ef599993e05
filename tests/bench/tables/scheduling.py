from typing import Any
def run(*a: Any) -> Any: raise NotImplementedError
